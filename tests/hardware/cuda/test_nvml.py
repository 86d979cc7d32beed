# ruff: noqa: N802 - the fake has NVML's own names
from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from splittune.errors import NvmlUnavailableError
from splittune.hardware.cuda.nvml import Nvml
from splittune.units import GIB

FIRST = "GPU-11111111-2222-3333-4444-555555555555"
SECOND = "GPU-66666666-7777-8888-9999-000000000000"


class NVMLError(Exception):
    pass


@dataclass
class FakeCard:
    uuid: str
    bus: str
    name: str = "NVIDIA GeForce RTX 3090"


class FakePynvml:
    """As much of nvidia-ml-py as a connection needs. What it is asked of a card, test_nvml_standin.py tests."""

    NVMLError = NVMLError
    NVMLError_NotFound = type("NVMLError_NotFound", (NVMLError,), {})
    NVMLError_InvalidArgument = type("NVMLError_InvalidArgument", (NVMLError,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_NoPermission = type("NVMLError_NoPermission", (NVMLError,), {})
    NVMLError_FunctionNotFound = type("NVMLError_FunctionNotFound", (NVMLError,), {})
    NVMLError_NoData = type("NVMLError_NoData", (NVMLError,), {})

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

    def nvmlInit(self):
        self.num_connections += 1

    def nvmlShutdown(self):
        self.num_connections -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise self.NVMLError_NotFound("Not Found")

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(total=24 * GIB, free=18 * GIB, used=6 * GIB)

    def nvmlDeviceGetMigMode(self, card):
        raise self.NVMLError_NotSupported("Not Supported")

    def nvmlDeviceGetName(self, card):
        return card.name

    def nvmlDeviceGetUUID(self, card):
        return card.uuid

    def nvmlDeviceGetPciInfo(self, card):
        return SimpleNamespace(busId=card.bus)

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return []

    def nvmlDeviceGetGraphicsRunningProcesses(self, card):
        return []


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


def test_names_of_older_releases_are_decoded(install):
    """Older releases of nvidia-ml-py return bytes; a listing holds text."""
    card = FakeCard(FIRST.encode(), b"00000000:01:00.0", name=b"Tesla V100")
    install(card)
    with Nvml() as nvml:
        device = nvml.list_devices()[0]
    assert (device.name, device.uuid, device.pci_bus_id) == ("Tesla V100", FIRST, "00000000:01:00.0")


def test_importing_the_module_asks_nvml_nothing():
    """An import of ours starts nothing: it works over a pynvml that has no call to make."""
    code = "import sys, types; sys.modules['pynvml'] = types.ModuleType('pynvml'); import splittune.hardware.cuda.nvml"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
