"""The README's picture of the idea: every card's memory under the even and under the tuned split, from a real search.

    python -m benchmarks.picture [--out benchmarks/results/split.png]

GPT-2, as ``splittune demo`` plans it, on four virtual cards, on the first of which another program leaves little.
Memory is accounted and time is modelled; the bars are the peaks of the baseline and of the best, in the parts that the
trials tell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from splittune import Measurement, TuneResult
from splittune.demo import GPT2_DEVICES, gpt2
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.options import SearchOptions
from splittune.report import memory_parts
from splittune.report.progress import SilentCallback
from splittune.runners.replay import Scripts
from splittune.runners.shapes import ShapeRunner
from splittune.tuner import tune
from splittune.units import GIB

# Okabe and Ito's colours, which people with any colour vision tell apart.
PARTS = (
    ("parameters, gradients, optimizer state", "#0072B2"),
    ("its share of the batch", "#56B4E9"),
    ("outputs and loss of the whole batch", "#E69F00"),
    ("the allocator's reserve", "#999999"),
)


def parts_gib(result: TuneResult, measurement: Measurement) -> list[list[float]]:
    """For each card its parts in GiB, in the order of `PARTS`; they sum to its peak of reserved memory."""
    rows = []
    for memory, parts in zip(measurement.memory, memory_parts(result.trials, measurement), strict=True):
        if parts.fixed_bytes is None or parts.per_share_bytes is None or parts.whole_batch_bytes is None:
            raise SystemExit("the search had too few trials to tell the parts of a peak: nothing to draw.")
        reserve = memory.peak_reserved_bytes - parts.peak_bytes
        sizes = (parts.fixed_bytes, parts.per_share_bytes, parts.whole_batch_bytes, reserve)
        rows.append([size / GIB for size in sizes])
    return rows


def draw(result: TuneResult, path: Path) -> None:
    """Two panels of one bar a card, on one scale: what the cards leave for this job."""
    import matplotlib.pyplot as plt

    assert result.baseline is not None, "the even split fits here"
    figure, panels = plt.subplots(2, 1, figsize=(8.4, 4.6), sharex=True)
    for axes, name, measurement in zip(panels, ("Even", "Tuned"), (result.baseline, result.best), strict=True):
        split = measurement.split
        rooms = [(memory.total_bytes - memory.outside_bytes) / GIB for memory in measurement.memory]
        for card, row in enumerate(parts_gib(result, measurement)):
            left = 0.0
            for (label, colour), size in zip(PARTS, row, strict=True):
                axes.barh(card, size, left=left, color=colour, label=label if card == 0 else None)
                left += size
            axes.barh(card, rooms[card] - left, left=left, fill=False, edgecolor="0.6", linewidth=0.8)
        samples = [f"GPU {card}: {share} of {split.micro_batch_size}" for card, share in enumerate(split.shard_sizes)]
        axes.set_yticks(range(split.num_devices), samples)
        axes.invert_yaxis()
        faster = "" if name == "Even" else f", {result.speedup:.2f} x the samples/s (modelled)"
        steps = f"{split.accumulation_steps} accumulation step{'s' * (split.accumulation_steps > 1)}"
        axes.set_title(f"{name}: batch of {split.global_batch_size} in {steps}{faster}", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_xlabel("GiB at the peak; the outline is what other programs leave")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Tune, draw, and print what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/split.png"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cards = resolve_hardware(GPT2_DEVICES)
    assert isinstance(cards, VirtualHardware)
    result = tune(ShapeRunner(gpt2(), cards, Scripts()), SearchOptions(), SilentCallback())
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(result, arguments.out)
    print(f"{arguments.out}: {result.config.summary()}, {result.speedup:.2f} x the even split")


if __name__ == "__main__":
    main()
