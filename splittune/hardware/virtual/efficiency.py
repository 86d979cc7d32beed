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

A grouped convolution has several channels in a group, a depthwise one has one; group norm counts as layer norm, and as
a transposition every copy or elementwise operation whose tensors are laid out in different orders.
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


# Of one kernel, whatever it does.
KERNEL_S = 3.6e-6

EFFICIENCIES: dict[Kind, Efficiency] = {
    "convolution": Efficiency(per_byte=1.39, per_flop=1.06, by_depth=39, by_columns=26, by_both=29_500),
    "grouped convolution": Efficiency(per_byte=1.6, per_flop=1.3, by_depth=42, by_columns=47, by_both=1_200),
    "depthwise convolution": Efficiency(per_byte=1.7, per_flop=29),
    "product": Efficiency(per_byte=1.5, per_flop=0.9, by_depth=44, by_columns=48, by_both=1_400),
    "batched product": Efficiency(per_byte=1.6, per_flop=1.3, by_depth=42, by_columns=42, by_both=1_100),
    "attention": Efficiency(per_byte=1.6, per_flop=1.5),
    "batch norm": Efficiency(per_byte=1.41),
    "layer norm": Efficiency(per_byte=1.28),
    "softmax": Efficiency(per_byte=1.43),
    "pooling": Efficiency(per_byte=1.52),
    "reduction": Efficiency(per_byte=1.33),
    "indexing": Efficiency(per_byte=1.43),
    "copy": Efficiency(per_byte=1.18),
    "transposition": Efficiency(per_byte=2.0),
    "elementwise": Efficiency(per_byte=1.11),
    "update": Efficiency(per_byte=1.11),
}
