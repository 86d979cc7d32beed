# ruff: noqa: N802 - the fake has NVML's own names
from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from splittune.errors import DeviceError, NvmlUnavailableError
from splittune.hardware.nvml import Nvml, NvmlDevice, NvmlMemory, NvmlProcess
from splittune.units import GIB, MIB

FIRST = "GPU-11111111-2222-3333-4444-555555555555"
SECOND = "GPU-66666666-7777-8888-9999-000000000000"


class NVMLError(Exception):
    pass


@dataclass
class FakeCard:
    uuid: str
    bus: str
    name: str = "NVIDIA GeForce RTX 3090"
    total: int = 24 * GIB
    free: int = 18 * GIB
    is_divided: bool | None = None  # None: a card that MIG does not know
    computing: list | None = field(default_factory=list)  # None: the driver does not tell
    drawing: list | None = field(default_factory=list)


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class FakePynvml:
    """The calls of nvidia-ml-py that splittune makes, over cards given by the test."""

    NVMLError = NVMLError
    NVMLError_NotFound = type("NVMLError_NotFound", (NVMLError,), {})
    NVMLError_InvalidArgument = type("NVMLError_InvalidArgument", (NVMLError,), {})
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *cards: FakeCard) -> None:
        self.cards = cards
        self.num_connections = 0
        self.calls: list[str] = []
        self.broken = ""  # names the call that fails from now on

    def __getattribute__(self, name: str):
        value = object.__getattribute__(self, name)
        if name.startswith("nvml"):
            self.calls.append(name)
            if name == self.broken:
                raise NVMLError("GPU is lost")
        return value

    def nvmlSystemGetDriverVersion(self):
        return "580.95.05"

    def nvmlInit(self):
        self.num_connections += 1

    def nvmlShutdown(self):
        self.num_connections -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._find("uuid", uuid)

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        return self._find("bus", bus)

    def _find(self, attribute, value):
        for card in self.cards:
            if getattr(card, attribute) == value:
                return card
        raise self.NVMLError_NotFound("Not Found")

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetMemoryInfo(self, card):
        # NVML's own 'used' leaves the driver's reserve out in one version of the call
        return SimpleNamespace(total=card.total, free=card.free, used=card.total - card.free - 900 * MIB)

    def nvmlDeviceGetMigMode(self, card):
        if card.is_divided is None:
            raise NVMLError("Not Supported")
        return (int(card.is_divided), int(card.is_divided))

    def nvmlDeviceGetName(self, card):
        return card.name

    def nvmlDeviceGetUUID(self, card):
        return card.uuid

    def nvmlDeviceGetPciInfo(self, card):
        return SimpleNamespace(busId=card.bus)

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return self._processes(card.computing)

    def nvmlDeviceGetGraphicsRunningProcesses(self, card):
        return self._processes(card.drawing)

    @staticmethod
    def _processes(processes):
        if processes is None:
            raise NVMLError("Not Supported")
        return processes


@pytest.fixture
def install(monkeypatch):
    """Puts a fake pynvml, and the versions of distributions named pynvml, in place of what is installed."""

    def installed(*cards: FakeCard, pynvml_version: str | None = None) -> FakePynvml:
        fake = FakePynvml(*cards)
        monkeypatch.setitem(sys.modules, "pynvml", fake)

        def version(distribution: str) -> str:
            assert distribution == "pynvml"
            if pynvml_version is None:
                raise importlib.metadata.PackageNotFoundError(distribution)
            return pynvml_version

        monkeypatch.setattr(importlib.metadata, "version", version)
        return fake

    return installed


def test_used_is_what_is_not_free(install):
    """Used memory is total - free, not the figure NVML calls 'used'."""
    install(FakeCard(FIRST, "00000000:01:00.0", total=24 * GIB, free=18 * GIB))
    with Nvml() as nvml:
        memory = nvml.device_memory(uuid=FIRST)
    assert memory == NvmlMemory(total_bytes=24 * GIB, free_bytes=18 * GIB)
    assert memory.used_bytes == 6 * GIB


def test_a_device_is_found_by_its_uuid(install):
    """The UUID picks the card, wherever NVML counts it, and its place is never asked."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"), FakeCard(SECOND, "00000000:02:00.0", free=1 * GIB))
    with Nvml() as nvml:
        assert nvml.device_memory(uuid=SECOND, pci_bus_id="00000000:01:00.0").free_bytes == 1 * GIB
    assert "nvmlDeviceGetHandleByIndex" not in fake.calls


def test_a_mig_instance_is_found_by_its_own_spelling(install):
    """torch gives a MIG instance's UUID without its prefix: GPU- is tried, then MIG-."""
    install(FakeCard(FIRST.replace("GPU-", "MIG-"), "00000000:01:00.0", total=5 * GIB, free=4 * GIB))
    with Nvml() as nvml:
        assert nvml.device_memory(uuid=FIRST).total_bytes == 5 * GIB


@pytest.mark.parametrize("uuid", [None, "GPU-unknown"])
@pytest.mark.parametrize("is_divided", [None, False])
def test_a_device_without_a_known_uuid_is_found_by_its_bus(install, uuid, is_divided):
    """Where the UUID leads nowhere the PCI bus id does."""
    install(FakeCard(FIRST, "00000000:01:00.0"), FakeCard(SECOND, "00000000:02:00.0", 1, is_divided=is_divided))
    with Nvml() as nvml:
        assert nvml.device_memory(uuid=uuid, pci_bus_id="00000000:02:00.0").total_bytes == 24 * GIB


def test_a_divided_card_is_not_taken_by_its_bus(install):
    """The bus id of a card divided by MIG names more memory than this process may use, so it is refused."""
    install(FakeCard(FIRST, "00000000:01:00.0", is_divided=True))
    with Nvml() as nvml, pytest.raises(NvmlUnavailableError, match=r"00000000:01:00.0 is divided by MIG.*MIG-<uuid>"):
        nvml.device_memory(uuid=None, pci_bus_id="00000000:01:00.0")


def test_an_unknown_device_is_an_error_that_names_it(install):
    """A device NVML does not know is never replaced by another: the error names both ids and what to do."""
    install(FakeCard(FIRST, "00000000:01:00.0"))
    with Nvml() as nvml, pytest.raises(NvmlUnavailableError) as caught:
        nvml.device_memory(uuid=SECOND, pci_bus_id="00000000:09:00.0")
    assert SECOND in str(caught.value)
    assert "00000000:09:00.0" in str(caught.value)
    assert "nvidia-smi -L" in str(caught.value)


def test_nothing_is_asked_before_the_first_question(install):
    """Making the object opens no connection, the first question does, and the next ones share it."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"))
    nvml = Nvml()
    assert fake.calls == []
    nvml.device_memory(uuid=FIRST)
    nvml.device_memory(uuid=FIRST)
    assert fake.calls.count("nvmlInit") == 1
    assert fake.calls.count("nvmlDeviceGetHandleByUUID") == 1, "a handle is looked up once"
    nvml.close()


def test_the_connection_is_closed_with_the_block(install):
    """Leaving the block closes the connection, an exception inside it too, and closing twice is harmless."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"))
    with Nvml() as nvml:
        nvml.device_memory(uuid=FIRST)
        assert fake.num_connections == 1
    assert fake.num_connections == 0
    with pytest.raises(NvmlUnavailableError), nvml:
        nvml.device_memory(uuid=SECOND)
    assert fake.num_connections == 0
    nvml.close()
    assert fake.num_connections == 0


def test_a_closed_connection_opens_again(install):
    """A question after `close` opens a new connection and looks its handle up anew."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"))
    nvml = Nvml()
    nvml.device_memory(uuid=FIRST)
    nvml.close()
    nvml.device_memory(uuid=FIRST)
    assert fake.num_connections == 1
    assert fake.calls.count("nvmlDeviceGetHandleByUUID") == 2
    nvml.close()


def test_the_connection_goes_with_the_object(install):
    """An object nobody holds any more has closed its connection."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"))
    nvml = Nvml()
    nvml.device_memory(uuid=FIRST)
    del nvml
    gc.collect()
    assert fake.num_connections == 0


def test_closing_survives_a_driver_that_went_first(install):
    """NVML failing at shutdown is no error: there is nothing left to hand back."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"))
    nvml = Nvml()
    nvml.device_memory(uuid=FIRST)
    fake.broken = "nvmlShutdown"
    nvml.close()


@pytest.mark.parametrize(
    ("call", "asked_for"),
    [
        ("nvmlInit", "a connection"),
        ("nvmlDeviceGetHandleByUUID", f"the memory of {FIRST}"),
        ("nvmlDeviceGetMemoryInfo", f"the memory of {FIRST}"),
    ],
)
def test_an_nvml_error_becomes_ours(install, call, asked_for):
    """What NVML answers stands in the message, with the question and what to check; its own error is the cause."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"))
    fake.broken = call
    with Nvml() as nvml, pytest.raises(NvmlUnavailableError) as caught:
        nvml.device_memory(uuid=FIRST, pci_bus_id="00000000:01:00.0")
    assert str(caught.value).startswith(f"NVML was asked for {asked_for} and answered: GPU is lost.")
    assert "nvidia-smi" in str(caught.value)
    assert isinstance(caught.value.__cause__, NVMLError)
    assert isinstance(caught.value, DeviceError)


def test_a_missing_module_says_what_to_install(install, monkeypatch):
    """Without nvidia-ml-py the error names the distribution, not the module."""
    install()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    with pytest.raises(NvmlUnavailableError, match="pip install nvidia-ml-py"):
        Nvml().list_devices()


@pytest.mark.parametrize("version", ["11.5.3", "8.0.4", "0+unknown", "None"])
def test_an_old_pynvml_is_refused(install, version):
    """The distribution pynvml before 12 hides nvidia-ml-py's module; the error says how to get rid of it."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"), pynvml_version=version)
    with pytest.raises(NvmlUnavailableError) as caught:
        Nvml().device_memory(uuid=FIRST)
    assert f"pynvml {version} is installed" in str(caught.value)
    assert "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py" in str(caught.value)
    assert fake.calls == []


@pytest.mark.parametrize("version", ["12.0.0", "13.0.1"])
def test_a_recent_pynvml_is_harmless(install, version):
    """From 12 on the distribution pynvml has no module of that name and brings nvidia-ml-py along."""
    install(FakeCard(FIRST, "00000000:01:00.0"), pynvml_version=version)
    with Nvml() as nvml:
        assert nvml.device_memory(uuid=FIRST).total_bytes == 24 * GIB


def test_every_device_is_listed_with_what_runs_on_it(install):
    """A listing holds name, ids, memory, and each program once, with its memory where the driver tells."""
    install(
        FakeCard(
            FIRST,
            "00000000:01:00.0",
            computing=[process(20, 5 * GIB), process(7, None)],
            drawing=[process(20, 5 * GIB), process(9, 1 * GIB)],
        ),
        FakeCard(SECOND, "00000000:02:00.0", name="NVIDIA A100-SXM4-40GB", total=40 * GIB, free=40 * GIB),
    )
    with Nvml() as nvml:
        first, second = nvml.list_devices()
    assert first == NvmlDevice(
        name="NVIDIA GeForce RTX 3090",
        uuid=FIRST,
        pci_bus_id="00000000:01:00.0",
        memory=NvmlMemory(total_bytes=24 * GIB, free_bytes=18 * GIB),
        processes=(
            NvmlProcess(pid=7, used_bytes=None),
            NvmlProcess(pid=9, used_bytes=1 * GIB),
            NvmlProcess(pid=20, used_bytes=5 * GIB),
        ),
    )
    assert (second.name, second.processes) == ("NVIDIA A100-SXM4-40GB", ())


def test_processes_are_none_where_the_driver_does_not_tell(install):
    """A driver that lists no programs leaves None, not an empty list that would say 'nobody'."""
    install(FakeCard(FIRST, "00000000:01:00.0", computing=None))
    with Nvml() as nvml:
        assert nvml.list_devices()[0].processes is None


def test_a_card_that_does_not_draw_lists_what_computes(install):
    """A card without graphics still lists its computing programs."""
    install(FakeCard(FIRST, "00000000:01:00.0", computing=[process(7, 1 * GIB)], drawing=None))
    with Nvml() as nvml:
        assert nvml.list_devices()[0].processes == (NvmlProcess(pid=7, used_bytes=1 * GIB),)


def test_memory_is_none_where_the_driver_keeps_no_figures(install):
    """A GPU that shares the host's memory is listed without figures instead of hiding the list."""
    fake = install(FakeCard(FIRST, "00000000:01:00.0"))
    fake.broken = "nvmlDeviceGetMemoryInfo"
    with Nvml() as nvml:
        assert nvml.list_devices()[0].memory is None


def test_a_machine_without_gpus_lists_none(install):
    """A driver without cards gives an empty list, not an error."""
    install()
    with Nvml() as nvml:
        assert nvml.list_devices() == ()


def test_names_of_older_releases_are_decoded(install):
    """Older releases of nvidia-ml-py return bytes; a listing holds text."""
    card = FakeCard(FIRST.encode(), b"00000000:01:00.0", name=b"Tesla V100")
    install(card)
    with Nvml() as nvml:
        device = nvml.list_devices()[0]
    assert (device.name, device.uuid, device.pci_bus_id) == ("Tesla V100", FIRST, "00000000:01:00.0")


def test_importing_the_module_asks_nvml_nothing():
    """An import of ours starts nothing: it works over a pynvml that has no call to make."""
    code = "import sys, types; sys.modules['pynvml'] = types.ModuleType('pynvml'); import splittune.hardware.nvml"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_installed_nvidia_ml_py_has_every_call_made():
    """The fake stands for calls that the real module has."""
    pynvml = pytest.importorskip("pynvml")
    missing = [name for name in dir(FakePynvml) if name.lower().startswith("nvml") and not hasattr(pynvml, name)]
    assert missing == []


def test_the_driver_says_its_version(install):
    """Reports of real cards name the driver they ran with."""
    install()
    with Nvml() as nvml:
        assert nvml.driver_version() == "580.95.05"
