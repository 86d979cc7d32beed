"""VirtualHardware: GPUs that are not there, running the user's real step on the CPU."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim

from splittune.errors import DeviceError
from splittune.hardware.autograd import finish_backward
from splittune.hardware.base import Device, DeviceConditions, DeviceMemory
from splittune.hardware.virtual.attention import fused_attention
from splittune.hardware.virtual.autocast import cuda_autocast
from splittune.hardware.virtual.catalog import GPUS, GpuModel
from splittune.hardware.virtual.ledger import Ledger
from splittune.parallel import BalancedDataParallel
from splittune.parallel.compiled import as_written
from splittune.parallel.link import Link, strides_as
from splittune.split import BatchSplit
from splittune.units import MIB, format_bytes

# A CUDA context with lazy loading: 287,047,680 bytes, measured in torch's pull request 86509.
CUDA_CONTEXT_BYTES = 287_047_680


class VirtualHardware:
    """`Hardware` of catalog GPUs: real tensors and gradients, accounted memory, modelled time.

    Inside `metered`, a ledger owns every tensor to one virtual GPU, raises `torch.OutOfMemoryError`
    where a GPU's memory would be exceeded, and advances modelled clocks; the same inputs give the
    same figures. Outside, models wrapped here train all the same and nothing is counted.

    Args:
        gpus: one catalog entry for each device; the first is 'GPU 0'.
        occupied_bytes: for each device, what another program holds there. None: nothing.
        wrapper_bytes: tensors that are allocated on every device when a model is wrapped, and stay: the buckets of
            DistributedDataParallel say.

    Raises:
        DeviceError: no device, or one whose memory is wholly occupied.
    """

    is_modelled = True

    def __init__(
        self,
        gpus: Sequence[GpuModel],
        *,
        occupied_bytes: Sequence[int] | None = None,
        wrapper_bytes: Sequence[int] = (),
    ) -> None:
        self.gpus, self.wrapper_bytes = tuple(gpus), tuple(wrapper_bytes)
        occupied = (0,) * len(self.gpus) if occupied_bytes is None else tuple(occupied_bytes)
        if not self.gpus:
            raise DeviceError('no virtual GPU: expected at least one, e.g. devices="4xRTX3090".')
        if len(occupied) != len(self.gpus):
            raise DeviceError(
                f"occupied_bytes has {len(occupied)} entries for {len(self.gpus)} devices: give one each."
            )
        self.outside_bytes = tuple(held + CUDA_CONTEXT_BYTES for held in occupied)
        for index, (gpu, outside) in enumerate(zip(self.gpus, self.outside_bytes, strict=True)):
            if not CUDA_CONTEXT_BYTES <= outside < gpu.total_bytes:
                raise DeviceError(
                    f"virtual GPU {index} ({gpu.name}): {format_bytes(occupied[index])} occupied + "
                    f"{format_bytes(CUDA_CONTEXT_BYTES)} for the CUDA context of {format_bytes(gpu.total_bytes)} "
                    "leaves nothing. Occupy less, from 0 bytes up."
                )
        self.devices = tuple(
            Device(index=index, name=gpu.name, torch_device="cpu", total_bytes=gpu.total_bytes)
            for index, gpu in enumerate(self.gpus)
        )
        self._ledger: Ledger | None = None
        # wrappers rather than models: once its wrapper is gone, a model is on no device any more
        self._wrapped: list[weakref.ref[nn.Module]] = []

    @property
    def occupied_bytes(self) -> tuple[int, ...]:
        """What other programs hold of each device: all that is outside but our own CUDA context."""
        return tuple(outside - CUDA_CONTEXT_BYTES for outside in self.outside_bytes)

    @property
    def spec(self) -> str | None:
        """As ``devices=`` takes it; None for GPUs not in the catalog.

        Example: ``"1xRTX3090:occupied=512.0MiB,3xRTX3090"``.
        """
        if not set(self.gpus) <= set(GPUS):
            return None
        groups: list[str] = []
        each = zip(self.gpus, self.occupied_bytes, strict=True)
        for (gpu, held), group in itertools.groupby(each):
            # str of a quotient by a power of two is exact: it reads back as the same bytes
            occupied = f":occupied={held / MIB}MiB" if held else ""
            groups.append(f"{len(list(group))}x{gpu.name}{occupied}")
        return ",".join(groups)

    def wrap(self, model: nn.Module, split: BatchSplit, **options: Any) -> BalancedDataParallel:
        """`model`, on the CPU, wrapped for `split`; parameters and buffers are virtual GPU 0's.

        `options` go to the wrapper: `loss_fn`, `weight_fn`, `engine`, `eval_batch_size`, `sync_batch_norm`.
        """
        if split.num_devices != len(self.gpus):
            raise DeviceError(f"the split {split} is for {split.num_devices} devices, and there are {len(self.gpus)}.")
        if any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers())):
            model.to("cpu")
        wrapper = BalancedDataParallel(
            module=model,
            shard_sizes=split.shard_sizes,
            device_ids=["cpu"] * len(self.gpus),
            link=VirtualLink(self),
            **options,
        )
        if self._ledger is not None:
            for device in range(len(self.gpus)):
                for num_bytes in self.wrapper_bytes:
                    self._ledger.allocate(device, num_bytes)
        return wrapper

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Count inside; may be nested.

        Clocks start at 0, and only what models wrapped here hold is there at first.

        Compiled modules run as they were written: the ledger sees every operation, and what the compiler would have
        saved is not modelled. Autocast casts what it casts on CUDA (`cuda_autocast`), and attention with dropout is one
        operation as there (`fused_attention`).

        Raises:
            torch.OutOfMemoryError: those models alone exceed GPU 0.
        """
        if self._ledger is not None:
            yield
            return
        self._ledger = self._make_ledger()
        try:
            with self._ledger, as_written(), cuda_autocast(), fused_attention():
                for ref in self._wrapped:
                    wrapper = ref()
                    if wrapper is not None:
                        self._place(wrapper)
                yield
        finally:
            self._ledger = None

    def adopt(self, module: nn.Module) -> None:
        """Inside `metered`, have the module's own parameters, buffers and gradients belong to virtual GPU 0.

        Submodules are adopted by themselves.
        """
        self._place(module, recurse=False)

    def prepare_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Choose the multi-tensor update, torch's default for CUDA tensors and not for CPU ones.

        State that the optimizer brings along belongs to virtual GPU 0, as the parameters do.
        """
        for group in optimizer.param_groups:
            # a learning rate that is a tensor goes with capturable optimizers alone, and torch
            # decides so as well
            decided = group.get("fused") or group.get("differentiable") or isinstance(group.get("lr"), Tensor)
            if "foreach" in group and group["foreach"] is None and not decided:
                group["foreach"] = True
        if self._ledger is not None:
            for value in (value for state in optimizer.state.values() for value in state.values()):
                if isinstance(value, Tensor) and value.dim():  # a step counter stays on the host
                    self._ledger.own(value, 0)

    def clock(self) -> float:
        """Modelled seconds since `metered` was entered, when every device will have finished what it was given.

        Nobody waits for that: what is timed in parts takes what it takes unwatched.
        """
        return self.ledger.timeline.end_s()

    def busy_s(self) -> tuple[float, ...]:
        """Modelled seconds for which each device's kernels ran."""
        return tuple(self.ledger.timeline.busy_s)

    def copied_s(self) -> tuple[float, ...]:
        """Modelled seconds for which each device's queue stood still for copies."""
        return tuple(self.ledger.timeline.copied_s)

    def link_bytes(self) -> tuple[int, ...]:
        """Bytes over each device's link since `metered` was entered."""
        return tuple(self.ledger.timeline.link_bytes)

    def allocated_bytes(self) -> tuple[int, ...]:
        """What each device's tensors hold now, rounded as the allocator does."""
        ledger = self.ledger
        ledger.free_dead()
        return tuple(allocator.allocated_bytes for allocator in ledger.allocators)

    def free_bytes(self) -> tuple[int, ...] | None:
        """None: a virtual device has no driver, and its allocator says itself when it is full."""
        return None

    def num_alloc_retries(self) -> tuple[int, ...]:
        """None ever: an allocation that fails with the cache handed back is out of memory.

        Handing back costs no modelled time.
        """
        return (0,) * len(self.gpus)

    def reset_peaks(self) -> None:
        ledger = self.ledger
        ledger.free_dead()
        for allocator in ledger.allocators:
            allocator.reset_peaks()

    def memory(self) -> tuple[DeviceMemory, ...]:
        return tuple(
            DeviceMemory(
                device=index,
                total_bytes=self.gpus[index].total_bytes,
                outside_bytes=self.outside_bytes[index],
                peak_allocated_bytes=allocator.peak_allocated_bytes,
                peak_reserved_bytes=allocator.peak_reserved_bytes,
            )
            for index, allocator in enumerate(self.ledger.allocators)
        )

    def conditions(self) -> tuple[DeviceConditions, ...] | None:
        """None: clocks are modelled as constant, and heat not at all."""
        return None

    def locate(self, error: BaseException) -> int | None:
        """The virtual GPU that an out-of-memory error names."""
        named = re.search(r"Virtual GPU (\d+)", str(error))
        return None if named is None else int(named[1])

    def recover(self, *, thoroughly: bool = False) -> None:
        """Collect garbage; inside `metered`, hand free segments back and start the peaks anew.

        It is always thorough: there are no libraries that keep anything.
        """
        finish_backward()
        gc.collect()
        if self._ledger is not None:
            self._ledger.free_dead()
            for allocator in self._ledger.allocators:
                allocator.hand_back()
            self.reset_peaks()

    def __reduce__(self) -> tuple[Any, ...]:
        # Cards are told by what they are: what they hold belongs to this process.
        return _make_again, (self.gpus, self.occupied_bytes, self.wrapper_bytes)

    def track(self, wrapper: nn.Module) -> None:
        """Count what `wrapper` holds as virtual GPU 0's from now on, as long as it lives."""
        self._wrapped = [ref for ref in self._wrapped if ref() is not None]
        self._wrapped.append(weakref.ref(wrapper))
        self._place(wrapper)

    def _make_ledger(self) -> Ledger:
        capacities = [gpu.total_bytes - outside for gpu, outside in zip(self.gpus, self.outside_bytes, strict=True)]
        return Ledger(self.gpus, capacities)

    def _place(self, model: nn.Module, *, recurse: bool = True) -> None:
        if self._ledger is None:
            return
        for tensor in (*model.parameters(recurse), *model.buffers(recurse)):
            self._ledger.own(tensor, 0)
            if tensor.grad is not None:
                self._ledger.own(tensor.grad, 0)

    @property
    def ledger(self) -> Ledger:
        """What counts, inside `metered`; `DeviceError` outside."""
        if self._ledger is None:
            raise DeviceError("virtual GPUs are not metered here: do this inside `with hardware.metered():`.")
        return self._ledger


def _make_again(
    gpus: Sequence[GpuModel], occupied_bytes: Sequence[int], wrapper_bytes: Sequence[int]
) -> VirtualHardware:
    return VirtualHardware(gpus, occupied_bytes=occupied_bytes, wrapper_bytes=wrapper_bytes)


class VirtualLink:
    """`parallel.Link` between virtual GPUs. A place is a device's index, None for the host."""

    threaded = False  # a dispatch mode sees one thread; overlap is the timeline's business

    def __init__(self, hardware: VirtualHardware) -> None:
        self._hardware = hardware

    def __deepcopy__(self, memo: Any) -> VirtualLink:
        return self  # a copy of a model runs on the same cards

    def adopt(self, wrapper: nn.Module) -> None:
        self._hardware.track(wrapper)

    def place(self, position: int) -> int:
        return position

    def place_of(self, tensor: Tensor) -> int | None:
        ledger = self._hardware._ledger
        return None if ledger is None else ledger.owner_of(tensor)

    def copy(self, tensor: Tensor, place: Any) -> Tensor:
        if tensor.layout == torch.sparse_coo:  # an embedding's gradient
            indices, values = self.copy(tensor._indices(), place), self.copy(tensor._values(), place)
            return torch.sparse_coo_tensor(
                indices, values, tensor.size(), is_coalesced=tensor.is_coalesced(), check_invariants=False
            )
        # What torch makes of the strides in a copy: those of an expanded gradient overlap, and
        # could not be written to.
        strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        with self.on(place):
            target = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype)
        return target.copy_(tensor)

    def empty(self, shape: Sequence[int], like: Tensor, place: Any) -> Tensor:
        with self.on(place):
            return torch.empty_strided(tuple(shape), strides_as(like, shape), dtype=like.dtype)

    def hop(self, source: Tensor, start: Any, target: Tensor, end: Any) -> Any:
        ledger = self._hardware._ledger
        with nullcontext() if ledger is None else ledger.unseen():
            target.copy_(source)
        return None if ledger is None else ledger.timeline.hop(start, end, target.nbytes)

    def wait(self, place: Any, mark: Any) -> None:
        ledger = self._hardware._ledger
        if ledger is not None and place is not None and mark is not None:
            ledger.timeline.wait_until(place, mark)

    def is_in_order_with(self, other: Link) -> bool:
        return isinstance(other, VirtualLink)

    def nccl(self, places: Sequence[Any]) -> VirtualNccl | None:
        ledger = self._hardware._ledger
        return None if ledger is None or None in places else VirtualNccl(ledger, places)

    def on(self, place: Any) -> AbstractContextManager[Any]:
        ledger = self._hardware._ledger
        return nullcontext() if ledger is None else ledger.on(place)

    @contextmanager
    def replica(self, position: int, num_replicas: int) -> Iterator[None]:
        ledger = self._hardware._ledger
        if ledger is None:
            yield
            return
        with ledger.on(position, makes_guests=True), ledger.timeline.replica(position, num_replicas):
            yield


class VirtualNccl:
    """`parallel.Nccl` among virtual GPUs, the first of which is the root: the cards of the catalog are all CUDA's.

    What NCCL itself holds on each card, buffers and channels, is not modelled.
    """

    def __init__(self, ledger: Ledger, devices: Sequence[int]) -> None:
        self._ledger, self._devices = ledger, tuple(devices)

    def broadcast(self, flats: Sequence[Tensor]) -> None:
        with self._ledger.unseen():
            for target in flats[1:]:
                target.copy_(flats[0])
        self._ledger.timeline.collective(self._devices, flats[0].nbytes)

    def can_add(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def add_up(self, flats: Sequence[Tensor]) -> None:
        with self._ledger.unseen():
            for other in flats[1:]:
                flats[0].add_(other)
        self._ledger.timeline.collective(self._devices, flats[0].nbytes)
