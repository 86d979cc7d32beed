"""What a trial does to virtual devices, written down: allocations, kernels, copies and waits, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from splittune.hardware.virtual.allocator import Block
from splittune.hardware.virtual.catalog import GpuModel
from splittune.hardware.virtual.hardware import VirtualHardware
from splittune.hardware.virtual.ledger import Ledger
from splittune.hardware.virtual.roofline import Work
from splittune.hardware.virtual.timeline import Timeline

# No trial is ever out of memory here: what a card has is asked when the tape is played.
_ENDLESS_BYTES = 2**62

# fmt: off
Kind = Literal[
    "allocate", "free", "launch", "transfer", "hop", "collective", "wait_until", "wait_for", "enter", "exit",
    "before_backward",
]
# fmt: on


class Event(NamedTuple):
    """One thing that happened: what, where, and how much.

    Worked: ``Event("launch", (1,), Work("copy", num_flops=0, num_bytes=4096))`` is a kernel on device 1, and
    ``Event("free", (0, 17), ())`` gives the block back that the tape's 18th allocation took on device 0.
    """

    kind: Kind
    where: tuple[Any, ...]
    """Devices, None for the host; then the ordinal of the block or copy that is meant, where one is."""
    amounts: tuple[Any, ...] = ()
    """Bytes, or the fields of a `Work`: what may change with the batch."""


class Tape:
    """Events of a trial, in parts: `cut` begins the next one."""

    def __init__(self) -> None:
        self.parts: list[list[Event]] = [[]]
        self.num_blocks = 0
        self.num_hops = 0

    def note(self, kind: Kind, where: tuple[Any, ...], amounts: tuple[Any, ...] = ()) -> None:
        self.parts[-1].append(Event(kind, where, amounts))

    def cut(self) -> None:
        self.parts.append([])


class TapedHardware(VirtualHardware):
    """Virtual devices of endless memory that write down what happens to them."""

    def __init__(self, gpus: Sequence[GpuModel], *, wrapper_bytes: Sequence[int] = ()) -> None:
        super().__init__(gpus, wrapper_bytes=wrapper_bytes)
        self.tape = Tape()

    def cut(self) -> None:
        """Begin the next part of the tape, once everything has been freed that is dead."""
        self.ledger.free_dead()
        self.tape.cut()

    def before_backward(self) -> None:
        """Note that a forward ended, once everything has been freed that is dead."""
        self.ledger.free_dead()
        self.tape.note("before_backward", ())

    def _make_ledger(self) -> Ledger:
        return _TapedLedger(self.gpus, self.tape)


class _TapedLedger(Ledger):
    def __init__(self, gpus: Sequence[GpuModel], tape: Tape) -> None:
        super().__init__(gpus, [_ENDLESS_BYTES] * len(gpus))
        self.timeline = _TapedTimeline(gpus, tape)
        self._tape = tape
        self._ordinals: dict[Block, int] = {}

    def allocate(self, device: int, num_bytes: int) -> Block | None:
        block = super().allocate(device, num_bytes)
        if block is not None:
            self._ordinals[block] = self._tape.num_blocks
            self._tape.num_blocks += 1
            self._tape.note("allocate", (device,), (num_bytes,))
        return block

    def free(self, device: int, block: Block) -> None:
        self._tape.note("free", (device, self._ordinals.pop(block)))
        super().free(device, block)

    def launch(self, device: int, work: Work) -> None:
        self._tape.note("launch", (device,), work)
        super().launch(device, work)


class _Mark(float):
    """When a hop ends, and which hop it is."""

    ordinal: int


class _TapedTimeline(Timeline):
    def __init__(self, gpus: Sequence[GpuModel], tape: Tape) -> None:
        super().__init__(gpus)
        self._tape = tape

    def transfer(self, source: int | None, target: int | None, num_bytes: int) -> None:
        self._tape.note("transfer", (source, target), (num_bytes,))
        super().transfer(source, target, num_bytes)

    def hop(self, source: int | None, target: int | None, num_bytes: int) -> float:
        self._tape.note("hop", (source, target), (num_bytes,))
        mark = _Mark(super().hop(source, target, num_bytes))
        mark.ordinal = self._tape.num_hops
        self._tape.num_hops += 1
        return mark

    def collective(self, devices: Sequence[int], num_bytes: int) -> None:
        self._tape.note("collective", tuple(devices), (num_bytes,))
        super().collective(devices, num_bytes)

    def wait_until(self, device: int, mark_s: float) -> None:
        assert isinstance(mark_s, _Mark), "every mark is a hop's"
        self._tape.note("wait_until", (device, mark_s.ordinal))
        super().wait_until(device, mark_s)

    def wait_for(self, device: int) -> None:
        self._tape.note("wait_for", (device,))
        super().wait_for(device)

    @contextmanager
    def replica(self, device: int, num_replicas: int) -> Iterator[None]:
        self._tape.note("enter", (device, num_replicas))
        with super().replica(device, num_replicas):
            yield
        self._tape.note("exit", (device,))
