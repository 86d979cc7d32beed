"""How much of a card's published peaks each class of operations reaches, as fitted on measured training steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "convolution",
    "grouped convolution",
    "depthwise convolution",
    "product",
    "batched product",
    "attention",
    "batch norm",
    "batch norm without cuDNN",
    "layer norm",
    "softmax",
    "pooling",
    "reduction",
    "indexing",
    "copy",
    "transposition",
    "elementwise",
    "update",
]
"""Classes of operations.

Of bfloat16 torch does batch norm without cuDNN, with a block of threads for each channel. A grouped convolution has
several channels in a group, a depthwise one has one; group norm counts as layer norm, and as a transposition every copy
or elementwise operation whose tensors are laid out in different orders.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Time of one class of operations, as multiples of what its bytes and FLOPs would take at published peaks.

    Sums of few terms (`depth`, the channels of a group times the kernel's area in a convolution) and products of few
    columns use a part of the cores alone: a FLOP takes per_flop + by_depth / depth + by_columns / columns +
    by_both / (depth x columns) of its time at the peak.
    """

    per_byte: float
    per_flop: float = 1.0
    by_depth: float = 0.0
    by_columns: float = 0.0
    by_both: float = 0.0
    overlaps: bool = False
    """Whether bytes move while FLOPs are done: the times combine as the sides of a right angle; else they add."""


# Fitted by `python -m benchmarks.truth --fit` to training steps that the timm project measured on an RTX 3090 (torch
# 1.12, autocast to float16, NCHW; benchmarks/truth/README.md), and carried to other cards by their published peaks.
KERNEL_S = 4.23e-06
"""Of one kernel, whatever it does."""

# Not measured there: batch norm of bfloat16, which is from a step of ResNet-50 on an H100 (torch 2.11, NCHW), where it
# took 31.3 ms for 14.2 GB; attention in one kernel, taken to be as efficient as batched products, and updates of many
# parameters in one kernel, taken to be as efficient as elementwise ones.
EFFICIENCIES: dict[Kind, Efficiency] = {
    "convolution": Efficiency(per_byte=1.65, per_flop=1.04, by_depth=42.9, by_columns=5.29, by_both=32000),
    "grouped convolution": Efficiency(per_byte=1.57, per_flop=1.91, by_depth=41.6, by_columns=58.9, by_both=2180),
    "depthwise convolution": Efficiency(per_byte=2.57, per_flop=14.5),
    "product": Efficiency(per_byte=2.64, per_flop=0.892, by_depth=28.6, by_columns=22.2, overlaps=True),
    "batched product": Efficiency(per_byte=1.41, per_flop=1.07, by_depth=44.6, by_columns=51.8, overlaps=True),
    "attention": Efficiency(per_byte=1.41, per_flop=1.07, by_depth=44.6, by_columns=51.8, overlaps=True),
    "batch norm": Efficiency(per_byte=1.53),
    "batch norm without cuDNN": Efficiency(per_byte=7.3),
    "layer norm": Efficiency(per_byte=1.44),
    "softmax": Efficiency(per_byte=2.57),
    "pooling": Efficiency(per_byte=2.29),
    "reduction": Efficiency(per_byte=1.05),
    "indexing": Efficiency(per_byte=1.4),
    "copy": Efficiency(per_byte=1.05),
    "transposition": Efficiency(per_byte=2.87),
    "elementwise": Efficiency(per_byte=1.05),
    "update": Efficiency(per_byte=1.05),
}

# Of the step time, on families of models that took no part in the fit (benchmarks/results/truth.csv): what is printed
# beside modelled times. One card, an RTX 3090; other cards follow by their published peaks.
MEDIAN_TIME_ERROR = 0.05
P90_TIME_ERROR = 0.143
TIME_ERROR_SOURCE = "559 models measured by the timm project on an RTX 3090"
