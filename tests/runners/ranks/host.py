"""The CPU as a rank's real card, with a scripted clock, and memory by the samples that its model is given."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from splittune import TuneResult, autotune
from splittune.hardware.base import Device, DeviceConditions, DeviceMemory
from splittune.parallel import BalancedDataParallel
from splittune.runners.ranks.control import ControlGroup
from splittune.split import BatchSplit

FORWARD_S, READING_S, UPDATE_S = 1e-3, 1e-5, 5e-3
BASE_BYTES, SAMPLE_BYTES, TOTAL_BYTES = 100_000, 10_000, 1_000_000


class HostHardware:
    """One 'card' of 1 MB that takes 100 kB, and 10 kB for each sample that its layer is given; more is out of memory.

    Its clock is scripted: a millisecond for each forward, and `slow_s` for each of its samples.
    """

    is_modelled = False
    spec = None

    def __init__(self, rank: int, *, slow_s: float = 0.0, is_shared: bool = False) -> None:
        self.devices = (
            Device(
                index=0,
                name=f"host{rank}",
                torch_device="cpu",
                total_bytes=TOTAL_BYTES,
                uuid="GPU-0" if is_shared else f"GPU-{rank}",
            ),
        )
        self.slow_s, self._most, self._now_s = slow_s, 0, 0.0

    def took(self, num_samples: int) -> None:
        """What the model tells of each forward."""
        self._most = max(self._most, num_samples)
        if BASE_BYTES + SAMPLE_BYTES * num_samples > self.devices[0].total_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 1 MB")
        self._now_s += FORWARD_S + self.slow_s * num_samples

    def took_update(self) -> None:
        """What a scaler tells of each update."""
        self._now_s += UPDATE_S

    def passed(self, time_s: float) -> None:
        """Something else took so long."""
        self._now_s += time_s

    def wrap(self, model: nn.Module, split: BatchSplit, **options: Any) -> BalancedDataParallel:
        return BalancedDataParallel(module=model, shard_sizes=split.shard_sizes, device_ids=["cpu"])

    @contextmanager
    def metered(self) -> Iterator[None]:
        yield

    def adopt(self, module: nn.Module) -> None: ...

    def prepare_optimizer(self, optimizer: optim.Optimizer) -> None: ...

    def clock(self) -> float:
        self._now_s += READING_S
        return self._now_s

    def busy_s(self) -> tuple[float, ...] | None:
        return None

    def copied_s(self) -> tuple[float, ...] | None:
        return None

    def reset_peaks(self) -> None:
        self._most = 0

    def memory(self) -> tuple[DeviceMemory, ...]:
        peak = BASE_BYTES + SAMPLE_BYTES * self._most
        total = self.devices[0].total_bytes
        return (
            DeviceMemory(
                device=0, total_bytes=total, outside_bytes=0, peak_allocated_bytes=peak, peak_reserved_bytes=peak
            ),
        )

    def allocated_bytes(self) -> tuple[int, ...]:
        return (0,)

    def free_bytes(self) -> tuple[int, ...] | None:
        return None

    def num_alloc_retries(self) -> tuple[int, ...]:
        return (0,)

    def conditions(self) -> tuple[DeviceConditions, ...] | None:
        return None

    def locate(self, error: BaseException) -> int | None:
        return 0

    def recover(self, *, thoroughly: bool = False) -> None:
        gc.collect()


class Telling(nn.Module):
    """Tells its card of every batch, and has a fault: "kill" and "hang", "own" and "out of memory" in whole steps.

    Two are the rank's, not the model's. "agreement": it has no memory for what it says of its third order. "slow
    agreement": its card's clock goes on by a thousand seconds in every collective of the control group.
    """

    def __init__(self, card: HostHardware, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)
        self.card, self.fault = [card], fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.card[0].took(len(x))
        output: torch.Tensor = self.layer(x)
        if self.fault == "kill" and len(x) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang" and len(x) > 1:
            time.sleep(1000)
        if self.fault in ("own", "out of memory") and _is_synchronised():
            if self.fault == "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 1 MB")
            raise LookupError("the user's own")
        return output


class SkipsTogether(torch.amp.GradScaler):
    """Skips the given synchronised steps, in each run of them, as if the sum of the gradients had overflowed.

    On one `rank` alone where that is named. A skipped step takes no update's time of the card.
    """

    def __init__(self, card: HostHardware, numbers: tuple[int, ...], rank: int | None = None) -> None:
        super().__init__("cpu", init_scale=2.0**20)
        self.card, self.numbers = card, numbers if rank in (None, dist.get_rank()) else ()
        self.num_steps, self.is_skipped = 0, False

    def step(self, optimizer: optim.Optimizer) -> None:  # type: ignore[override]
        self.num_steps = self.num_steps + 1 if _is_synchronised() else 0
        self.is_skipped = self.num_steps in self.numbers
        if not self.is_skipped:
            self.card.took_update()
            optimizer.step()

    def update(self, new_scale: object = None) -> None:
        if self.is_skipped:
            self._init_scale /= 2

    def get_scale(self) -> float:
        return self._init_scale


def _is_synchronised() -> bool:
    return any(frame.name == "_run_whole_steps" for frame in traceback.extract_stack())


def _gather_until(number: int) -> Any:
    """`ControlGroup.gather`, whose call of this number finds no memory; the first tells who is there."""
    numbers, gather = count(1), ControlGroup.gather

    def fails(self: ControlGroup, packed: bytes, room_bytes: int) -> Any:
        raise MemoryError("no room for an answer")

    def gathers(self: ControlGroup, thing: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if next(numbers) == number:
                patch.setattr(ControlGroup, "_gathered", fails)
            return gather(self, thing)

    return gathers


def _taking(card: HostHardware, time_s: float, collective: Callable[..., Any]) -> Any:
    """The collective, which takes so long by the card's clock."""

    def takes(self: ControlGroup, *args: Any) -> Any:
        card.passed(time_s)
        return collective(self, *args)

    return takes


def tuned_on_hosts(
    group: dist.ProcessGroup | None,
    slow_s: tuple[float, ...],
    options: dict[str, Any],
    faults: tuple[str, ...] = (),
    skips: Any = None,
) -> tuple[TuneResult | None, str, str, bool]:
    """The result on this rank, or the error's type and words; and whether the job is as it was found.

    `skips` are those of `SkipsTogether`: its numbers and its rank.
    """
    from splittune import collective
    from splittune.profiling import pacing

    rank = dist.get_rank()
    card = HostHardware(rank, slow_s=slow_s[rank], is_shared="shared" in faults)
    fault = faults[rank] if faults else ""
    patch = pytest.MonkeyPatch()
    patch.setattr(collective, "card_of_rank", lambda devices: card)
    patch.setattr(pacing, "FIRST_WARM_UP_S", 0.0)
    if fault == "agreement":
        patch.setattr(ControlGroup, "gather", _gather_until(4))
    if fault == "slow agreement":
        for name in ("broadcast", "gather"):
            patch.setattr(ControlGroup, name, _taking(card, 1000.0, getattr(ControlGroup, name)))
    model = Telling(card, fault)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result, kind, words = None, "", ""
    try:
        result = autotune(
            model,
            [(torch.randn(24, 16), torch.randn(24, 16))],
            strategy="ddp",
            progress=False,
            grad_scaler=None if skips is None else SkipsTogether(card, *skips),
            **options,
        )
    except Exception as error:  # noqa: BLE001  whatever it is, is told
        kind, words = type(error).__name__, str(error)
    finally:
        patch.undo()
    is_as_found = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    if not {"kill", "hang"} & set(faults):
        total = torch.ones(())
        dist.all_reduce(total)  # the group is of use
        is_as_found = is_as_found and total.item() == dist.get_world_size()
    return result, kind, words, is_as_found
