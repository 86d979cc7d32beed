"""Real cards: torch's allocator for our own memory, NVML for everybody's where there is one."""

from __future__ import annotations

import gc
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from splittune.cards import all_cards, count_cards, kind_of_cards, label_of, module_of, with_index
from splittune.errors import DeviceError, NvmlUnavailableError
from splittune.hardware.autograd import finish_backward
from splittune.hardware.base import Device, DeviceConditions, DeviceMemory
from splittune.hardware.cuda.busy import BusyGauge
from splittune.hardware.cuda.mig import refuse_several_instances
from splittune.hardware.cuda.nvml import Nvml
from splittune.hardware.cuda.nvml_calls import NvmlProcess
from splittune.parallel import BalancedDataParallel

if TYPE_CHECKING:
    from torch import nn, optim

    from splittune.split import BatchSplit

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_Question = Callable[[Nvml, "str | None", "str | None"], _Answer]  # asked with a device's UUID and PCI bus id


class CudaHardware:
    """The cards of one process, one or several; the first is 'GPU 0'.

    They are CUDA's, or of the other kind that torch has here (`cards.kind_of_cards`): all but NVML
    is asked by the kind. How much memory the other programs hold comes from NVML, or from
    ``torch.cuda.mem_get_info`` where NVML cannot be reached or stops answering, and on devices that
    are not NVIDIA's, which is logged once. Both see the whole device. `conditions` and `processes`
    come from NVML alone.

    Example: of 24 GiB NVML says 20 GiB used, and torch's allocator has 19 GiB reserved:
    ``outside_bytes`` is 1 GiB.

    Args:
        torch_devices: cards, each once. ``torch.device("cuda")`` is the current one.
        nvml: the connection to ask; None opens one when memory is first read.

    Raises:
        DeviceError: no device is named, or one is no card, not there, or named twice; or there
            are several, and one is a MIG instance.
    """

    def __init__(self, torch_devices: Sequence[torch.device], *, nvml: Nvml | None = None) -> None:
        self._torch_devices = _check_devices(torch_devices)
        self._kind = self._torch_devices[0].type
        self._torch = module_of(self._kind)
        # also initialises CUDA: peaks of a device cannot be reset before
        self._properties = tuple(self._torch.get_device_properties(device) for device in self._torch_devices)
        refuse_several_instances([properties.name for properties in self._properties], len(self._torch_devices))
        self._devices = tuple(
            Device(
                index=index,
                name=properties.name,
                torch_device=str(device),
                total_bytes=properties.total_memory,
                uuid=_uuid(properties),
            )
            for index, (device, properties) in enumerate(zip(self._torch_devices, self._properties, strict=True))
        )
        self._gauge = BusyGauge(self._torch_devices)
        self._nvml: Nvml | None = Nvml() if nvml is None else nvml
        if torch.version.hip is not None or self._kind != "cuda":
            self._nvml = None
            whose = "AMD" if self._kind == "cuda" else label_of(self._kind)
            logger.info(
                "NVML knows no %s devices: torch.%s.mem_get_info tells what other programs hold.", whose, self._kind
            )

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._devices

    @property
    def is_modelled(self) -> bool:
        """False: times come from the clock."""
        return False

    @property
    def spec(self) -> str | None:
        """None: real devices are named, not specified."""
        return None

    def wrap(self, model: nn.Module, split: BatchSplit, **options: Any) -> BalancedDataParallel:
        """`model`, moved to device 0 in place, wrapped for this split: the module to train with.

        `options` go to the wrapper: `loss_fn`, `weight_fn`, `engine`, `eval_batch_size`, `sync_batch_norm`.

        Raises:
            DeviceError: the split is for another number of devices.
        """
        if split.num_devices != len(self._devices):
            raise DeviceError(
                f"the split {split} has shares for {split.num_devices} devices, but there are {len(self._devices)}: "
                f"{', '.join(device.torch_device for device in self._devices)}. "
                "Tune for these devices, or name those it was tuned for."
            )
        model.to(self._torch_devices[0])
        wrapper = BalancedDataParallel(
            module=model, device_ids=self._torch_devices, shard_sizes=split.shard_sizes, **options
        )
        self._gauge.forget()
        wrapper.gauge = self._gauge
        return wrapper

    def metered(self) -> AbstractContextManager[None]:
        """Turns `busy_s` on; torch's allocator and NVML always count."""
        return self._gauge.counting()

    def adopt(self, module: nn.Module) -> None:
        """Nothing: it is where the job has put it, and torch's allocator counts it there."""

    def prepare_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Move the optimizer's state to its parameters' device, as torch does on loading a state.

        Left alone where nothing is elsewhere: loading also casts a state to its parameter's dtype,
        and some optimizers keep theirs in another.
        """
        if _has_state_elsewhere(optimizer):
            optimizer.load_state_dict(optimizer.state_dict())

    def clock(self) -> float:
        """Seconds, read once every device has finished its work."""
        self._synchronize()
        return time.perf_counter()

    def busy_s(self) -> tuple[float, ...] | None:
        """Seconds in which each replica ran, by CUDA events; None outside `metered`.

        From its first kernel to its last, with the gaps between them: see `BusyGauge.busy_s`.
        """
        self._synchronize()
        return self._gauge.busy_s()

    def copied_s(self) -> None:
        """None: events around a replica do not tell its copies from its waiting."""
        return

    def reset_peaks(self) -> None:
        """Start the peaks of every device anew from what is held now."""
        for device in self._torch_devices:
            self._torch.reset_peak_memory_stats(device)

    def memory(self) -> tuple[DeviceMemory, ...]:
        """Peaks since the last `reset_peaks`, with what others hold now.

        Where ``torch.cuda.set_per_process_memory_fraction`` caps this process, `total_bytes` is no
        more than the cap and what is outside it, so that the headroom is what this process may
        really still take. Example: of 24 GiB with 2 GiB outside and a cap of 12 GiB the total is 14
        GiB, and 10 GiB at the peak leaves 2 GiB.
        """
        return tuple(self._memory_of(index) for index in range(len(self._devices)))

    def allocated_bytes(self) -> tuple[int, ...]:
        """What this process's tensors, and torch's own workspaces, hold on each device now."""
        return tuple(self._torch.memory_allocated(device) for device in self._torch_devices)

    def free_bytes(self) -> tuple[int, ...] | None:
        """What each device's driver can still give, by ``torch.cuda.mem_get_info``; None where that fails."""
        try:
            return tuple(int(self._torch.mem_get_info(device)[0]) for device in self._torch_devices)
        except (RuntimeError, AttributeError):  # devices that are lost, or of a kind that does not tell
            return None

    def num_alloc_retries(self) -> tuple[int, ...]:
        """How often torch's allocator has handed its cache back to the driver and tried again."""
        stats = (self._torch.memory_stats(device) for device in self._torch_devices)
        return tuple(int(each.get("num_alloc_retries", 0)) for each in stats)  # empty where CUDA has not begun

    def conditions(self) -> tuple[DeviceConditions, ...] | None:
        """Clock, temperature and what throttles each device now; None without NVML."""
        return self._ask(range(len(self._devices)), lambda nvml, uuid, bus: nvml.conditions(uuid=uuid, pci_bus_id=bus))

    def processes(self) -> tuple[tuple[NvmlProcess, ...] | None, ...] | None:
        """The programs on each device, this one too; None without NVML.

        Of a device whose driver does not tell, None stands in its place.
        """
        return self._ask(range(len(self._devices)), lambda nvml, uuid, bus: nvml.processes(uuid=uuid, pci_bus_id=bus))

    def locate(self, error: BaseException) -> int | None:
        """The device torch's message names by its ordinal: ``"GPU 1 has a total capacity of"``."""
        named = re.search(r"\bGPU (\d+) has a total capacity", str(error))
        ordinals = [device.index for device in self._torch_devices]
        return ordinals.index(int(named[1])) if named is not None and int(named[1]) in ordinals else None

    def recover(self, *, thoroughly: bool = False) -> None:
        """Collect garbage and hand cached memory back, on every device.

        Call it outside any except block, whose error holds a failed step's frames. `thoroughly`
        frees cuBLAS's workspaces as well, tens of MiB for each thread that multiplied, and collects
        again what finalizers let go.
        """
        finish_backward(self._torch_devices)
        gc.collect()  # frames of a failed step hold tensors in cycles
        self._synchronize()  # a block in use by another stream is freed only once that has finished
        if thoroughly:
            # private, but what torch's own graph trees call before they count memory (see
            # tests/gpu)
            clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear_workspaces is not None and self._kind == "cuda":
                clear_workspaces()
            gc.collect()
        self._torch.empty_cache()  # of every device, not only of the current one
        self.reset_peaks()

    def _synchronize(self) -> None:
        for device in self._torch_devices:
            self._torch.synchronize(device)

    def _memory_of(self, index: int) -> DeviceMemory:
        device = self._torch_devices[index]
        total_bytes, used_bytes = self._whole_device(index)
        # never negative: between the two readings another program may have freed
        outside_bytes = max(0, used_bytes - self._torch.memory_reserved(device))
        cap_bytes = _cap_bytes(self._torch, device, self._devices[index].total_bytes)
        if cap_bytes is not None:
            total_bytes = min(total_bytes, cap_bytes + outside_bytes)
        return DeviceMemory(
            device=index,
            total_bytes=total_bytes,
            outside_bytes=outside_bytes,
            peak_allocated_bytes=self._torch.max_memory_allocated(device),
            peak_reserved_bytes=self._torch.max_memory_reserved(device),
        )

    def _whole_device(self, index: int) -> tuple[int, int]:
        """Total and used bytes of a device, every program's together."""
        answers = self._ask([index], lambda nvml, uuid, bus: nvml.device_memory(uuid=uuid, pci_bus_id=bus))
        if answers is not None:
            return answers[0].total_bytes, answers[0].used_bytes
        free_bytes, total_bytes = self._torch.mem_get_info(self._torch_devices[index])
        return total_bytes, total_bytes - free_bytes

    def _ask(self, indices: Iterable[int], question: _Question[_Answer]) -> tuple[_Answer, ...] | None:
        """NVML's answer about each device; None without NVML, from its first failure on."""
        if self._nvml is None:
            return None
        try:
            return tuple(
                question(self._nvml, self._devices[index].uuid, _pci_bus_id(self._properties[index]))
                for index in indices
            )
        except NvmlUnavailableError as error:
            # for good: figures from two sources, trial by trial, could not be compared
            self._nvml = None
            logger.warning("%s Meanwhile torch.%s.mem_get_info tells what other programs hold.", error, self._kind)
            return None


def _check_devices(torch_devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """The devices with their indices; refuses what no job could run on."""
    kind = kind_of_cards()
    if not torch_devices:
        raise DeviceError(
            f'no device is named: expected at least one, such as devices=["{kind}:0"]. '
            f"Leave devices out for all visible {label_of(kind)} devices."
        )
    for position, device in enumerate(torch_devices):
        if device.type != kind:
            raise DeviceError(
                f"devices[{position}] is {str(device)!r}: expected a {label_of(kind)} device such as '{kind}:0'. "
                'To plan without one, name virtual GPUs, such as devices="4xRTX3090".'
            )
    num_visible = count_visible_devices()
    devices = tuple(with_index(device) if num_visible else device for device in torch_devices)
    for position, device in enumerate(devices):
        if not num_visible or device.index >= num_visible:
            # a second instance is not there because CUDA shows one only: that reason goes first
            refuse_several_instances(_visible_names(), len(devices))
            raise DeviceError(
                f"devices[{position}] is {str(device)!r}, which is not there: {describe_visible_devices()}. "
                "Name one that is; CUDA_VISIBLE_DEVICES decides what is visible."
            )
        first = devices.index(device)
        if first != position:
            raise DeviceError(
                f"devices[{position}] is {str(device)!r}, which devices[{first}] names already: expected every card "
                "once, since it has one share of the batch. Name it once."
            )
    return devices


def count_visible_devices() -> int:
    """Cards this process may use; 0 where torch has none."""
    return count_cards()


def describe_visible_devices() -> str:
    """What is visible, for messages: ``"2 CUDA devices are visible (cuda:0, cuda:1)"``."""
    cards = all_cards()
    if cards:
        names = ", ".join(map(str, cards))
        return f"{len(cards)} {label_of(cards[0].type)} device{'s are' if len(cards) > 1 else ' is'} visible ({names})"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    return "no CUDA device is visible"


def _visible_names() -> list[str]:
    return [str(module_of(card).get_device_properties(card).name) for card in all_cards()]


def _uuid(properties: Any) -> str | None:
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _pci_bus_id(properties: Any) -> str | None:
    """As NVML spells it, ``"00000000:3B:00.0"``; None in a torch that does not tell."""
    numbers: list[int | None] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [number for number in numbers if number is not None]
    return "{:08X}:{:02X}:{:02X}.0".format(*known) if len(known) == len(numbers) else None


def _cap_bytes(module: Any, device: torch.device, device_bytes: int) -> int | None:
    """What set_per_process_memory_fraction leaves to this process; None without a cap."""
    if not hasattr(module, "get_per_process_memory_fraction"):  # not in every torch since 2.6
        return None
    fraction = float(module.get_per_process_memory_fraction(device))
    return int(fraction * device_bytes) if fraction < 1 else None


def _has_state_elsewhere(optimizer: optim.Optimizer) -> bool:
    states: Any = optimizer.state  # an optimizer may keep a state of its own in it, under another key
    return any(
        # a step counter is one number, and may stay on the host
        tensor.dim() > 0 and tensor.device != parameter.device
        for parameter, state in states.items()
        if isinstance(parameter, torch.Tensor)
        for tensor in _tensors_in(state)
    )


def _tensors_in(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        yield from _tensors_in(tuple(state.values()))
    elif isinstance(state, (list, tuple, set, deque)):
        for value in state:
            yield from _tensors_in(value)
