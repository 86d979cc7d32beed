"""Folders of made-up searches, small and large, as `TuneResult.save` leaves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splittune.config import SplitConfig
from splittune.config.data import Strategy
from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report import TuneResult, save_tables
from splittune.report.advice import AdviceRow, How
from splittune.report.state_parts import ModelBytes
from splittune.search import Trial
from splittune.split import BatchSplit
from splittune.training.module_memory import ModuleMemory
from splittune.units import GIB, MIB

SCRIPT = "<script>document.title='run'</script><img src=x onerror=alert(1)>\"&'"


@dataclass(frozen=True)
class Cards:
    """Cards of 24 GiB, of which others hold one, of GPU 0 in one process 19; half a gibibyte must stay free.

    A card takes 2 GiB, and 0.25 for each of its samples; GPU 0 in one process one more, and 0.02 for each of all. A
    micro-step takes 5 ms and 2 for each sample of the largest share, an update 4 ms.
    """

    names: tuple[str, ...]
    is_modelled: bool = True
    strategy: Strategy = "dp"

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(
            Device(index=index, name=name, torch_device="cpu", total_bytes=24 * GIB)
            for index, name in enumerate(self.names)
        )

    def run(self, split: BatchSplit, kind: str = "search") -> Measurement:
        peaks = [
            int(
                (2 + 0.25 * share + (1 + 0.02 * split.micro_batch_size if index == 0 and self.strategy == "dp" else 0))
                * GIB
            )
            for index, share in enumerate(split.shard_sizes)
        ]
        outside = [
            19 * GIB if index == 0 and len(self.names) > 1 and self.strategy == "dp" else GIB
            for index in range(len(self.names))
        ]
        if any(peak + 768 * MIB + other > 24 * GIB for peak, other in zip(peaks, outside, strict=True)):
            return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message="device 0: CUDA out of memory")
        memory = tuple(
            DeviceMemory(
                device=index,
                total_bytes=24 * GIB,
                outside_bytes=other,
                peak_allocated_bytes=peak,
                peak_reserved_bytes=peak + 256 * MIB,
                micro_step_peak_bytes=peak,
                update_peak_bytes=GIB,
                resting_bytes=2 * GIB if index == 0 else GIB // 2,
            )
            for index, (peak, other) in enumerate(zip(peaks, outside, strict=True))
        )
        busy = tuple(0.005 + 0.002 * share for share in split.shard_sizes)
        jitter = (0.0,) if self.is_modelled else (0.0, 1e-4, 2e-4)
        return Measurement(
            split=split,
            outcome=Outcome.OK,
            micro_step_times_s=tuple(max(busy) + more for more in jitter),
            update_times_s=tuple(0.004 + more / 10 for more in jitter),
            memory=memory,
            device_busy_s=busy,
            device_copied_s=tuple(0.2 * (max(busy) - each) for each in busy) if self.is_modelled else None,
        )


def search(
    cards: Cards, *, batch: int = 64, num_trials: int = 12, job: str = "GPT2 of 124439808 parameters"
) -> TuneResult:
    """Even splits first, then ever other shares of GPU 0 in ever other numbers of steps; at the end both once more."""
    splits = []
    for steps in (batch // len(cards.names), 8, 4, 2, 1):
        micro = -(-batch // max(steps, 1))
        splits.append(
            BatchSplit.even(global_batch_size=batch, accumulation_steps=max(steps, 1), num_devices=len(cards.names))
        )
        if len(cards.names) > 1:
            splits += [
                BatchSplit.with_gpu0(
                    global_batch_size=batch,
                    accumulation_steps=max(steps, 1),
                    num_devices=len(cards.names),
                    gpu0_bsz=share,
                )
                for share in range(micro // len(cards.names) + 1)
            ]
    splits = list(dict.fromkeys(splits))
    runs = [cards.run(splits[number % len(splits)]) for number in range(num_trials - 2)]
    even = [run for run in runs if run.throughput and len(set(run.split.shard_sizes)) == 1]
    fitting = [run for run in runs if run.throughput]
    best = max(fitting, key=lambda run: run.throughput or 0.0)
    baseline = min(even, key=lambda run: run.split.accumulation_steps, default=None)
    again = [cards.run(run.split) for run in (best, baseline) if run is not None]
    trials = tuple(
        Trial(
            number=number,
            kind="search" if number < len(runs) else "confirm",
            measurement=run,
            reason=f"k={run.split.accumulation_steps}: expected to gain 3.1 %, so it is tried",
        )
        for number, run in enumerate([*runs, *again])
    )
    config = SplitConfig(
        split=best.split,
        devices=cards.devices,
        min_headroom_bytes=(GIB // 2,) * len(cards.names),
        planned_peak_reserved_bytes=tuple(memory.peak_reserved_bytes for memory in best.memory),
        virtual_spec="virtual cards" if cards.is_modelled else None,
        is_modelled=cards.is_modelled,
        strategy=cards.strategy,
        throughput=best.throughput,
        step_time_s=best.step_time_s,
        versions={"splittune": "0.1.0", "torch": "2.9.0"},
    )
    return TuneResult(
        best=best,
        baseline=baseline,
        trials=trials,
        config=config,
        stopped="converged",
        job=job,
        modules=(
            ModuleMemory(
                name="h.*.mlp" if job != SCRIPT else SCRIPT,
                count=12,
                parameter_bytes=GIB // 3,
                activation_bytes=GIB // 8,
            ),
            ModuleMemory(name="(itself)", count=1, parameter_bytes=GIB // 6, activation_bytes=GIB // 16),
        ),
        model=ModelBytes(parameter_bytes=GIB // 2, gradient_bytes=GIB // 2),
    )


# Every kind of row, one of them with a name that would run.
ADVICE = (
    AdviceRow(remedy="memory held by others", how=How.MODELLED, finding=f"Held by {SCRIPT}.", is_limit=True),
    AdviceRow(
        remedy="another card as GPU 0",
        how=How.MODELLED,
        finding="331 samples/s where the best split without it has 300 (modelled). " * 4,
        cost="Name the cards in another order.",
        gain=1.1,
        throughput=331.0,
        accumulation_steps=2,
        shard_sizes="4+20+20+20",
        num_trials=5,
    ),
    AdviceRow(remedy=SCRIPT, how=How.FAILED, finding=SCRIPT, cost=SCRIPT),
    AdviceRow(remedy="activation checkpointing", how=How.RULE, finding="A rule.", cost="Compute."),
)

NORMAL = Cards(("RTX3090",) * 4)
MEASURED = Cards(("NVIDIA GeForce RTX 3090",) * 4, is_modelled=False)
ONE = Cards(("A100-80GB",))
EIGHT = Cards(("T4", "T4", "V100-16GB", "V100-16GB", "A100-40GB", "L4", "L4", "RTX3090"))
RANKS = Cards(tuple(f"NODE CARD {index % 3}" for index in range(64)), strategy="ddp")
HOSTILE = Cards((SCRIPT, SCRIPT, "x" * 200, "plain"))


def unfinished(folder: Path, cards: Cards = NORMAL) -> Path:
    """A search that was interrupted: the tables of half its trials."""
    result = search(cards, job=SCRIPT)
    nodes = ("host<b>",) * len(cards.names) if cards.strategy == "ddp" else ()
    return save_tables(folder, result.trials[:6], cards.devices, is_modelled=cards.is_modelled, nodes=nodes)


def failed(folder: Path, cards: Cards = NORMAL) -> Path:
    """Nothing but failures: the tables alone."""
    splits = [BatchSplit.even(global_batch_size=64, accumulation_steps=steps, num_devices=4) for steps in (16, 8)]
    trials = [
        Trial(
            number=number,
            kind="search",
            measurement=Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message="device 0: 1.00 GiB lacked"),
            reason="the smallest even split: a safe start",
        )
        for number, split in enumerate(splits)
    ]
    return save_tables(folder, trials, cards.devices, is_modelled=True)
