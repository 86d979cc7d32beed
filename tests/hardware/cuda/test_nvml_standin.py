"""The real pynvml, over a stand-in for the driver's library that is compiled here."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from splittune.errors import NvmlUnavailableError
from splittune.hardware.base import DeviceConditions
from splittune.hardware.cuda import CudaHardware
from splittune.hardware.cuda.nvml import Nvml
from splittune.hardware.cuda.nvml_calls import NvmlDevice, NvmlInstance, NvmlMemory, NvmlProcess
from splittune.units import GIB, MIB
from tests.hardware.cuda.fake_cuda import FakeCard, FakeCuda
from tests.hardware.cuda.nvml_standin.standin import (
    GPU_IS_LOST,
    LIBRARY,
    NO_PERMISSION,
    NO_WORDS,
    NOT_SUPPORTED,
    UNKNOWN,
    Card,
    Instance,
    Process,
    Standin,
    build,
)
from tests.processes import DEADLINE_S

pynvml_spec = importlib.util.find_spec("pynvml")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or pynvml_spec is None,
    reason="the stand-in is a Linux library, and pynvml (nvidia-ml-py) loads it",
)

# what torch calls its devices in fake_cuda.py, as NVML spells it
UUIDS = [f"GPU-0000000{index}-1111-2222-3333-444444444444" for index in range(3)]
BUSES = [f"00000000:{0x3A + index:02X}:00.0" for index in range(3)]
INSTANCE = UUIDS[0].replace("GPU-", "MIG-")
CARDS = [
    Card(uuid=uuid, bus=bus, total=24 * GIB, free=(20 - index) * GIB)
    for index, (uuid, bus) in enumerate(zip(UUIDS, BUSES, strict=True))
]
CARD = CARDS[0]
DIVIDED = Card(
    uuid="GPU-99999999-1111-2222-3333-444444444444",
    bus=BUSES[0],
    name="NVIDIA A100-SXM4-40GB",
    total=40 * GIB,
    free=10 * GIB,
    mig=1,
    clock=1410,
    temperature=40,
    reasons=0x4,
    instances=(
        Instance(uuid="MIG-other", total=5 * GIB, free=1 * GIB, processes=(Process(pid=8, used=1 * GIB),)),
        Instance(uuid=INSTANCE, total=5 * GIB, free=4 * GIB, processes=(Process(pid=7, used=1 * GIB),)),
    ),
)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """The folder in which the stand-in is compiled."""
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture
def driver(libraries, tmp_path, monkeypatch):
    """A copy of the stand-in under a fresh copy of the real pynvml; `driver()` is a recent one."""
    made = []

    def drive(*cards: Card, flags: tuple[str, ...] = (), trouble: tuple[str, ...] = ()) -> Standin:
        standin = Standin(build(libraries, *flags), tmp_path / f"driver{len(made)}")
        standin.write(*cards, trouble=trouble)
        made.append(standin)
        # pynvml keeps the library it loaded for good, so every test has a pynvml of its own
        pynvml = importlib.util.module_from_spec(pynvml_spec)
        monkeypatch.setitem(sys.modules, "pynvml", pynvml)
        pynvml_spec.loader.exec_module(pynvml)

        def load(name):
            assert name == LIBRARY
            return ctypes.CDLL(str(standin.path))

        pynvml.CDLL = load
        return standin

    yield drive
    for standin in made:
        standin.write()  # lets calls that hang return


@pytest.fixture
def torch_cards(monkeypatch):
    """Puts so many cards in the place of torch's, each with 1 GiB of others on it."""

    def put(num_cards: int, name: str = "NVIDIA GeForce RTX 3090") -> list[torch.device]:
        FakeCuda([FakeCard(name=name, outside=1 * GIB) for _ in range(num_cards)]).install(monkeypatch)
        return [torch.device("cuda", index) for index in range(num_cards)]

    return put


@pytest.fixture
def impatient(monkeypatch):
    """Ends the patience of whoever waits for a call of this name, once it hangs; the list of all
    that was waited for."""
    waits, result = [], concurrent.futures.Future.result

    def until(standin: Standin, hanging: str) -> list[concurrent.futures.Future]:
        def wait(self: concurrent.futures.Future, timeout: float | None = None) -> object:
            waits.append(self)
            while standin.calls()[-1:] != [hanging]:
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    return result(self, 0.01)
            raise concurrent.futures.TimeoutError

        gc.collect()  # connections that other tests left would be closed in the middle of this one
        monkeypatch.setattr(concurrent.futures.Future, "result", wait)
        return waits

    return until


def run_python(standin: Standin, code: str, *arguments: str) -> subprocess.CompletedProcess:
    """The outcome of a program of its own that finds the stand-in as it would the driver's library."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"LD_LIBRARY_PATH": str(standin.path.parent), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


# From here on: which card is meant.


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_card_is_found_by_its_uuid_in_any_order(driver, order):
    """NVML's order is not torch's: the UUID picks the card wherever NVML counts it, and its place is never asked."""
    standin = driver(*(CARDS[place] for place in order))
    with Nvml() as nvml:
        free = [nvml.device_memory(uuid=uuid, pci_bus_id=BUSES[0]).free_bytes for uuid in UUIDS]
    assert free == [20 * GIB, 19 * GIB, 18 * GIB]
    assert not {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetCount_v2"} & set(standin.calls())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_hardware_reads_each_of_torchs_devices_from_its_own_card(driver, torch_cards, order):
    """Device 0 of the job has the figures of its card, whatever NVML's order and the job's."""
    driver(*(CARDS[place] for place in order))
    first, second = torch_cards(2)
    assert [memory.outside_bytes for memory in CudaHardware([first, second]).memory()] == [4 * GIB, 5 * GIB]
    assert [memory.outside_bytes for memory in CudaHardware([second, first]).memory()] == [5 * GIB, 4 * GIB]


@pytest.mark.parametrize("uuid", [None, "GPU-unknown"])
@pytest.mark.parametrize("mig", [None, 0])
def test_a_card_without_a_known_uuid_is_found_by_its_bus(driver, uuid, mig):
    """Where the UUID leads nowhere the PCI bus id does, on a card that MIG could divide and does not too."""
    driver(CARD, Card(uuid="GPU-x", bus="00000000:5E:00.0", total=8 * GIB, free=8 * GIB, mig=mig))
    with Nvml() as nvml:
        assert nvml.device_memory(uuid=uuid, pci_bus_id="00000000:5E:00.0").total_bytes == 8 * GIB


def test_an_unknown_device_is_an_error_that_names_it(driver):
    """A device NVML does not know is never replaced by another: the error names both ids and what to do."""
    driver(CARD)
    with Nvml() as nvml, pytest.raises(NvmlUnavailableError) as caught:
        nvml.device_memory(uuid=UUIDS[1], pci_bus_id=BUSES[1])
    assert UUIDS[1] in str(caught.value)
    assert BUSES[1] in str(caught.value)
    assert "nvidia-smi -L" in str(caught.value)


def test_a_mig_instance_is_read_through_its_own_handle(driver):
    """An instance's memory and programs are its own, not the card's and not its neighbour's."""
    driver(DIVIDED)
    with Nvml() as nvml:
        memory = nvml.device_memory(uuid=UUIDS[0], pci_bus_id=BUSES[0])
        assert memory == NvmlMemory(total_bytes=5 * GIB, free_bytes=4 * GIB)
        assert nvml.processes(uuid=UUIDS[0]) == (NvmlProcess(pid=7, used_bytes=1 * GIB),)


def test_a_mig_instance_runs_as_its_card_does(driver):
    """Clock and heat belong to the card, so an instance has its card's."""
    driver(CARDS[1], DIVIDED)
    with Nvml() as nvml:
        assert nvml.conditions(uuid=UUIDS[0]) == DeviceConditions(
            sm_clock_mhz=1410, temperature_c=40, throttle_reasons=("power cap",)
        )


@pytest.mark.parametrize("ids", [{"uuid": DIVIDED.uuid}, {"uuid": None, "pci_bus_id": DIVIDED.bus}])
def test_a_divided_card_is_not_taken_for_one_of_its_parts(driver, ids):
    """The whole of a card that MIG divides is more than this process may use: it is refused, and says what to name."""
    driver(DIVIDED)
    with Nvml() as nvml, pytest.raises(NvmlUnavailableError, match=r"is divided by MIG.*MIG-<uuid>"):
        nvml.device_memory(**ids)


def test_one_mig_instance_is_a_job(driver, torch_cards):
    """A job on a single instance is measured against the instance's memory."""
    driver(DIVIDED)
    memory = CudaHardware(torch_cards(1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb")).memory()[0]
    assert (memory.total_bytes, memory.outside_bytes) == (5 * GIB, 1 * GIB)


# From here on: the figures.


def test_used_counts_the_drivers_reserve(driver):
    """Used is total - free: what the driver keeps for itself is not ours to take, though NVML's
    'used' leaves it out."""
    driver(Card(uuid=UUIDS[0], bus=BUSES[0], total=24 * GIB, free=18 * GIB, reserved=900 * MIB))
    with Nvml() as nvml:
        assert nvml.device_memory(uuid=UUIDS[0]).used_bytes == 6 * GIB


def test_processes_are_listed_with_their_memory_where_the_driver_tells(driver):
    """Each program stands once, by pid, whether it computes, draws or both; untold memory is None,
    not a huge number."""
    processes = (
        Process(pid=20, used=5 * GIB),
        Process(pid=7),
        Process(pid=20, used=5 * GIB, drawing=True),
        Process(pid=9, used=0, drawing=True),
    )
    driver(Card(uuid=UUIDS[0], bus=BUSES[0], total=24 * GIB, free=18 * GIB, processes=processes))
    with Nvml() as nvml:
        assert nvml.processes(uuid=UUIDS[0]) == (
            NvmlProcess(pid=7, used_bytes=None),
            NvmlProcess(pid=9, used_bytes=0),
            NvmlProcess(pid=20, used_bytes=5 * GIB),
        )


@pytest.mark.parametrize(
    ("silent", "expected"),
    [
        (("computing",), None),  # not (), which would say 'nobody'
        (("drawing",), (NvmlProcess(pid=7, used_bytes=1),)),
        (("computing", "drawing"), None),
        ((), (NvmlProcess(pid=7, used_bytes=1),)),
    ],
)
def test_processes_are_none_where_the_driver_does_not_tell(driver, silent, expected):
    """A driver that does not list what computes leaves None; one that does not list what draws, what computes."""
    driver(Card(uuid=UUIDS[0], bus=BUSES[0], total=2, free=1, processes=(Process(pid=7, used=1),), silent=silent))
    with Nvml() as nvml:
        assert nvml.processes(uuid=UUIDS[0]) == expected


def test_an_older_driver_lists_its_processes_too(driver):
    """A driver without the newest version of the call is asked in the one before it, if this pynvml knows that one."""
    card = Card(uuid=UUIDS[0], bus=BUSES[0], total=2, free=1, processes=(Process(pid=7), Process(pid=8, drawing=True)))
    driver(card, flags=("-DOLD_DRIVER",))
    listed = (NvmlProcess(pid=7, used_bytes=None), NvmlProcess(pid=8, used_bytes=None))
    knows_it = hasattr(sys.modules["pynvml"], "nvmlDeviceGetComputeRunningProcesses_v2")
    with Nvml() as nvml:
        assert nvml.processes(uuid=UUIDS[0]) == (listed if knows_it else None)


@pytest.mark.parametrize("flags", [(), ("-DOLD_DRIVER",)], ids=["recent driver", "older driver"])
def test_conditions_are_clock_temperature_and_what_throttles(driver, flags):
    """A hot card under its power cap says so in plain words, by the old name of the call too."""
    driver(Card(uuid=UUIDS[0], bus=BUSES[0], total=2, free=1, clock=1695, temperature=84, reasons=0x64), flags=flags)
    with Nvml() as nvml:
        assert nvml.conditions(uuid=UUIDS[0]) == DeviceConditions(
            sm_clock_mhz=1695,
            temperature_c=84,
            throttle_reasons=("power cap", "software thermal slowdown", "hardware thermal slowdown"),
        )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["SwPowerCap"], ("power cap",)),
        (["HwSlowdown"], ("hardware slowdown",)),
        (["SwThermalSlowdown"], ("software thermal slowdown",)),
        (["HwThermalSlowdown"], ("hardware thermal slowdown",)),
        (["HwPowerBrakeSlowdown"], ("power brake",)),
        (["GpuIdle", "ApplicationsClocksSetting", "SyncBoost", "DisplayClockSetting"], ()),
        (["None"], ()),
    ],
    ids=str,
)
def test_the_reasons_are_pynvmls(driver, names, words):
    """Every bit that pynvml names has its word, and those under which a card runs as it should have none."""
    standin = driver()
    bits = sum(getattr(sys.modules["pynvml"], f"nvmlClocksEventReason{name}") for name in names)
    standin.write(Card(uuid=UUIDS[0], bus=BUSES[0], total=2, free=1, reasons=bits))
    with Nvml() as nvml:
        assert nvml.conditions(uuid=UUIDS[0]).throttle_reasons == words


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
@pytest.mark.parametrize(
    ("call", "lacking"),
    [
        ("nvmlDeviceGetClockInfo", {"sm_clock_mhz": None}),
        ("nvmlDeviceGetTemperature", {"temperature_c": None}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"throttle_reasons": ()}),
    ],
)
def test_a_condition_that_the_driver_does_not_tell_is_absent(driver, call, lacking, code):
    """What one card does not support or this user may not see is None, and the rest is told."""
    driver(
        Card(uuid=UUIDS[0], bus=BUSES[0], total=2, free=1, clock=1695, temperature=64, reasons=0x4),
        trouble=(f"fail {call} {code}",),
    )
    told = {"sm_clock_mhz": 1695, "temperature_c": 64, "throttle_reasons": ("power cap",)}
    with Nvml() as nvml:
        assert nvml.conditions(uuid=UUIDS[0]) == DeviceConditions(**(told | lacking))


def test_every_card_is_listed(driver):
    """A listing holds each card's name, ids, memory and programs; a card without figures does not hide the others."""
    standin = driver(
        Card(uuid=UUIDS[1], bus=BUSES[1], total=24 * GIB, free=18 * GIB, processes=(Process(pid=7),)),
        DIVIDED,
    )
    with Nvml() as nvml:
        first, second = nvml.list_devices()
        standin.write(CARD, trouble=(f"fail nvmlDeviceGetMemoryInfo {UNKNOWN}",))
        assert [device.memory for device in nvml.list_devices()] == [None]
        standin.write()
        assert nvml.list_devices() == ()
    assert first == NvmlDevice(
        name="NVIDIA GeForce RTX 3090",
        uuid=UUIDS[1],
        pci_bus_id=BUSES[1],
        memory=NvmlMemory(total_bytes=24 * GIB, free_bytes=18 * GIB),
        processes=(NvmlProcess(pid=7, used_bytes=None),),
    )
    assert (second.name, second.uuid) == ("NVIDIA A100-SXM4-40GB", DIVIDED.uuid)


def listed_by_the_command(standin: Standin) -> str:
    """What `splittune devices` prints over the stand-in, on a wide terminal."""
    done = run_python(standin, "from splittune.cli import main; main()", "devices")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_instances_of_a_divided_card_are_listed_below_it(driver):
    """Each MIG instance has its name, UUID, memory and programs, though slots between them are
    free; other cards have none."""
    standin = driver(DIVIDED, CARDS[1])
    with Nvml() as nvml:
        divided, whole = nvml.list_devices()
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert divided.instances == (
        NvmlInstance(
            name=name,
            uuid="MIG-other",
            memory=NvmlMemory(total_bytes=5 * GIB, free_bytes=1 * GIB),
            processes=(NvmlProcess(pid=8, used_bytes=1 * GIB),),
        ),
        NvmlInstance(
            name=name,
            uuid=INSTANCE,
            memory=NvmlMemory(total_bytes=5 * GIB, free_bytes=4 * GIB),
            processes=(NvmlProcess(pid=7, used_bytes=1 * GIB),),
        ),
    )
    assert whole.instances == ()
    lines = [line for line in listed_by_the_command(standin).splitlines() if "NVIDIA" in line]
    assert [[cell.rstrip() for cell in line.strip("│").split("│")] for line in lines] == [
        [" NVIDIA A100-SXM4-40GB", f" {DIVIDED.uuid}", " 40.00 GiB", " 30.00 GiB", " nobody known"],
        [f"   {name}", " MIG-other", " 5.00 GiB", " 4.00 GiB", " process 8: 1.00 GiB"],
        [f"   {name}", f" {INSTANCE}", " 5.00 GiB", " 1.00 GiB", " process 7: 1.00 GiB"],
        [" NVIDIA GeForce RTX 3090", f" {UUIDS[1]}", " 24.00 GiB", " 5.00 GiB", " nobody known"],
    ]


def test_mig_that_is_switched_off_has_no_instances(driver):
    """A card that could be divided and is not is listed as any other."""
    driver(dataclasses.replace(DIVIDED, mig=0, instances=()))
    with Nvml() as nvml:
        assert [device.instances for device in nvml.list_devices()] == [()]


@pytest.mark.parametrize(
    ("call", "code", "lacking"),
    [
        ("nvmlDeviceGetMigMode", UNKNOWN, ()),
        ("nvmlDeviceGetMaxMigDeviceCount", UNKNOWN, None),
        ("nvmlDeviceGetMigDeviceHandleByIndex", GPU_IS_LOST, None),
        ("nvmlDeviceGetMigDeviceHandleByIndex", NO_PERMISSION, ()),
        ("nvmlDeviceGetMemoryInfo", UNKNOWN, "memory"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", NO_PERMISSION, "processes"),
    ],
)
def test_what_is_not_told_of_instances_hides_no_card(driver, call, code, lacking):
    """Each call that fails leaves the rest of the listing: the card, and of its instances what was told."""
    standin = driver(DIVIDED, trouble=(f"fail {call} {code}",))
    with Nvml() as nvml:
        (card,) = nvml.list_devices()
    assert card.uuid == DIVIDED.uuid
    if isinstance(lacking, str):
        assert [instance.uuid for instance in card.instances] == ["MIG-other", INSTANCE]
        assert [getattr(instance, lacking) for instance in card.instances] == [None, None]
    else:
        assert card.instances == lacking
    printed = listed_by_the_command(standin)
    assert DIVIDED.uuid in printed
    assert ("MIG instances" in printed) is (lacking is None)


def test_a_driver_that_dies_at_any_call_of_a_listing_is_our_error(driver):
    """At each call in turn the listing is NvmlUnavailableError, or complete but for what was not told any more."""
    standin = driver(DIVIDED, CARDS[1])
    with Nvml() as nvml:
        nvml.list_devices()
    num_unavailable = 0
    for number in range(len(standin.calls())):
        driver(DIVIDED, CARDS[1], trouble=(f"die {number}",))
        with Nvml() as nvml:
            try:
                assert [card.uuid for card in nvml.list_devices()] == [DIVIDED.uuid, UUIDS[1]]
            except NvmlUnavailableError:
                num_unavailable += 1
    assert num_unavailable > 0


def test_the_driver_says_its_version(driver):
    """Reports of real cards name the driver they ran with."""
    driver()
    with Nvml() as nvml:
        assert nvml.driver_version() == "580.95.05"


# From here on: calls that fail, and a driver that dies.


@pytest.mark.parametrize(("code", "words"), [(GPU_IS_LOST, "GPU is lost"), (NO_WORDS, "an error that pynvml has no")])
@pytest.mark.parametrize(
    ("call", "question", "asked_for"),
    [
        ("nvmlInitWithFlags", Nvml.device_memory, "a connection"),
        ("nvmlDeviceGetHandleByUUID", Nvml.device_memory, f"the memory of {UUIDS[0]}"),
        ("nvmlDeviceGetMemoryInfo", Nvml.device_memory, f"the memory of {UUIDS[0]}"),
        ("nvmlDeviceGetClockInfo", Nvml.conditions, f"the conditions of {UUIDS[0]}"),
        ("nvmlDeviceGetTemperature", Nvml.conditions, f"the conditions of {UUIDS[0]}"),
        ("nvmlDeviceGetCurrentClocksEventReasons", Nvml.conditions, f"the conditions of {UUIDS[0]}"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", Nvml.processes, f"the processes of {UUIDS[0]}"),
    ],
)
def test_a_failing_call_becomes_our_error(driver, call, question, asked_for, code, words):
    """What NVML answers stands in the message, with the question and what to check; its own error is the cause."""
    driver(CARD, trouble=(f"fail {call} {code}",))
    with Nvml() as nvml, pytest.raises(NvmlUnavailableError) as caught:
        question(nvml, uuid=UUIDS[0], pci_bus_id=BUSES[0])
    assert str(caught.value).startswith(f"NVML was asked for {asked_for} and answered: ")
    assert words in str(caught.value)
    assert "nvidia-smi" in str(caught.value)
    assert isinstance(caught.value.__cause__, sys.modules["pynvml"].NVMLError)


def test_a_machine_without_the_library_says_so(driver):
    """Where no NVIDIA driver is installed the error says that its library was not found."""
    standin = driver()
    sys.modules["pynvml"].CDLL = lambda name: ctypes.CDLL(str(standin.path.with_name("nowhere.so")))
    with pytest.raises(NvmlUnavailableError, match="NVML Shared Library Not Found"):
        Nvml().list_devices()


def test_the_search_goes_on_when_nvml_dies_half_way(driver, torch_cards, caplog):
    """After NVML's last answer torch's own figures go on, conditions and processes are None, and it is said once."""
    # connection, handle, MIG mode and memory of two cards are 7 calls, and the memory of the first is one more
    standin = driver(*CARDS[:2], trouble=("die 8",))
    hardware = CudaHardware(torch_cards(2))
    assert [memory.outside_bytes for memory in hardware.memory()] == [4 * GIB, 5 * GIB]
    readings = [hardware.memory() for _ in range(3)]
    # a reading whose second half failed is whole all the same: each of its devices has a figure
    assert [[memory.outside_bytes for memory in reading] for reading in readings] == [
        [4 * GIB, 1 * GIB],
        [1 * GIB, 1 * GIB],
        [1 * GIB, 1 * GIB],
    ]
    assert hardware.conditions() is None
    assert hardware.processes() is None
    assert len(standin.calls()) == 9, "nobody asks the dead"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "GPU is lost" in record.getMessage()
    assert "torch.cuda.mem_get_info" in record.getMessage()


def ask_everything(hardware):
    """Memory three times, conditions and processes, as a search asks between and in trials."""
    readings = [[memory.outside_bytes for memory in hardware.memory()] for _ in range(3)]
    return readings, hardware.conditions(), hardware.processes()


@pytest.mark.parametrize("fault", ["dies", "answers an error", "refuses an answer"])
def test_nvml_may_fail_at_any_call(driver, torch_cards, caplog, tried, fault):
    """At each call in turn: every device has a figure, NVML's or torch's and nothing else, and whoever asks goes on."""
    clock = {"clock": 1500, "temperature": 40, "reasons": 0, "processes": (Process(pid=7, used=1 * GIB),)}
    cards = [Card(uuid=UUIDS[i], bus=BUSES[i], total=24 * GIB, free=(20 - i) * GIB, **clock) for i in range(2)]
    standin = driver(*cards)
    _, conditions, processes = ask_everything(CudaHardware(torch_cards(2)))
    assert conditions is not None
    calls = standin.calls()
    names = sorted({name for name in calls if name not in ("nvmlErrorString", "nvmlShutdown")})
    assert len(calls) > 20
    troubles = {
        "dies": [f"die {number}" for number in range(len(calls))],
        "answers an error": [f"fail {name} {UNKNOWN}" for name in names],
        "refuses an answer": [f"fail {name} {NO_PERMISSION}" for name in names],
    }[fault]
    for trouble in troubles:
        caplog.clear()
        driver(*cards, trouble=(trouble,))
        readings, told_conditions, told_processes = ask_everything(CudaHardware(torch_cards(2)))
        for reading in readings:
            assert all(told in (nvml, 1 * GIB) for told, nvml in zip(reading, (4 * GIB, 5 * GIB), strict=True)), trouble
        if told_conditions is not None and fault == "dies":
            assert told_conditions == conditions, trouble
        assert told_processes is None or len(told_processes) == len(processes), trouble
        if readings[-1] != [4 * GIB, 5 * GIB]:
            assert "torch.cuda.mem_get_info" in caplog.text, trouble
    where = "at each call in turn" if fault == "dies" else "at each kind of call"
    tried(f"NVML {fault}", where, "torch's figures", "every device has a figure, the search goes on")


def test_hardware_samples_conditions_and_processes_of_each_device(driver, torch_cards):
    """Conditions and processes come in the job's order of devices."""
    first = Card(
        uuid=UUIDS[0], bus=BUSES[0], total=2, free=1, clock=1000, temperature=50, reasons=0x8, silent=("computing",)
    )
    second = Card(uuid=UUIDS[1], bus=BUSES[1], total=2, free=1, clock=2000, processes=(Process(pid=7, used=1),))
    driver(first, second)
    hardware = CudaHardware(list(reversed(torch_cards(2))))
    assert hardware.conditions() == (
        DeviceConditions(sm_clock_mhz=2000),
        DeviceConditions(sm_clock_mhz=1000, temperature_c=50, throttle_reasons=("hardware slowdown",)),
    )
    assert hardware.processes() == ((NvmlProcess(pid=7, used_bytes=1),), None)


# From here on: calls that hang.


@pytest.mark.parametrize(
    ("call", "question"),
    [
        ("nvmlInitWithFlags", Nvml.device_memory),
        ("nvmlDeviceGetMemoryInfo", Nvml.device_memory),
        ("nvmlDeviceGetTemperature", Nvml.conditions),
        ("nvmlDeviceGetComputeRunningProcesses_v3", Nvml.processes),
    ],
)
def test_a_call_that_hangs_is_left_behind_and_not_repeated(driver, impatient, call, question):
    """A hung call is an error after the time limit; from then on nothing is asked, and closing does not wait."""
    standin = driver(CARD, trouble=(f"hang {call}",))
    nvml, waits = Nvml(time_limit_s=1.0), impatient(standin, call)
    with pytest.raises(
        NvmlUnavailableError, match=r"and did not answer within 1 s; it is not asked again\. .*nvidia-smi"
    ):
        question(nvml, uuid=UUIDS[0])
    calls, num_waits = standin.calls(), len(waits)
    for _ in range(3):
        with pytest.raises(NvmlUnavailableError, match=r"did not answer an earlier question within 1 s"):
            nvml.device_memory(uuid=UUIDS[0])
        nvml.close()
    del nvml
    gc.collect()
    assert len(waits) == num_waits > 0
    assert standin.calls() == calls
    assert calls[-1] == call


def test_the_search_goes_on_when_nvml_hangs(driver, torch_cards, impatient, caplog):
    """A reading that hangs is taken from torch instead, and the next ones at once."""
    standin = driver(CARD)
    hardware = CudaHardware(torch_cards(1), nvml=Nvml(time_limit_s=1.0))
    assert hardware.memory()[0].outside_bytes == 4 * GIB
    standin.write(CARD, trouble=("hang nvmlDeviceGetMemoryInfo",))
    waits = impatient(standin, "nvmlDeviceGetMemoryInfo")
    assert hardware.memory()[0].outside_bytes == 1 * GIB
    num_waits = len(waits)
    assert hardware.memory()[0].outside_bytes == 1 * GIB
    assert hardware.conditions() is None
    assert len(waits) == num_waits
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


# From here on: whole programs, which find the library as they would find the driver's.

ASK = f"""
import sys
from splittune.errors import NvmlUnavailableError
from splittune.hardware.cuda.nvml import Nvml
nvml = Nvml(time_limit_s=float(sys.argv[1]))
try:
    print(nvml.device_memory(uuid="{UUIDS[0]}").free_bytes)
except NvmlUnavailableError as error:
    print(error)
"""


def test_a_program_closes_its_connection_when_it_ends(driver):
    """A program finds the library by its name, and its connection is closed at its end though nobody closed it."""
    standin = driver(CARD)
    done = run_python(standin, ASK, str(DEADLINE_S))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{20 * GIB}\n", "")
    assert standin.calls()[-1] == "nvmlShutdown"
    assert standin.calls().count("nvmlShutdown") == standin.calls().count("nvmlInitWithFlags") == 1


@pytest.mark.parametrize(
    ("call", "said"), [("nvmlDeviceGetMemoryInfo", "did not answer within 2 s"), ("nvmlShutdown", str(20 * GIB))]
)
def test_a_call_that_hangs_does_not_keep_a_program_from_ending(driver, call, said):
    """With a call that never returns, the last one too, a program ends by itself, in order and silently."""
    standin = driver(CARD, trouble=(f"hang {call}",))
    done = run_python(standin, ASK, "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout
    assert standin.calls()[-1] == call


def test_a_forked_child_asks_for_itself_and_leaves_its_parents_connection(driver):
    """A loader's worker has no thread of ours: its questions start one, and its end closes nothing of the parent's."""
    code = f"""{ASK}
import gc, os
child = os.fork()
if child == 0:
    print(nvml.device_memory(uuid="{UUIDS[0]}").total_bytes, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
child = os.fork()
if child == 0:
    del nvml
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    standin = driver(CARD)
    done = run_python(standin, code, str(DEADLINE_S))
    assert done.returncode == 0, done.stderr
    assert str(24 * GIB) in done.stdout
    assert standin.calls().count("nvmlShutdown") == 1
