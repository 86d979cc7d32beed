"""The measured training steps, and which of them are of one family."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).with_name("timm-train-amp-rtx3090.csv")
LADDER = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""The batch sizes that were tried, the largest first (README.md)."""

# Built then with batch norms that activate in place and keep half as much for the gradient, with ordinary ones now.
# What they need today says nothing of the card, and they are judged all the same.
BUILT_OTHERWISE = ("tresnet",)
_NAMED_ALIKE = (
    *("xcit", "cait", "volo", "crossvit", "levit", "convit", "twins", "nest", "visformer", "poolformer", "convnext"),
    *("convmixer", "edgenext", "mobilevit", "regnet", "repvgg", "vgg", "dpn", "hrnet"),
)
# By the start of a model's name, the first that matches: one lineage of architectures, whoever trained it.
_FAMILIES = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("efficientnet", r"(tf_)?(efficientnet|mobilenetv|spnasnet|hardcorenas|fbnet|rexnet)"),
        ("resnetv2", r"resnetv2"),
        ("byoanet", r"(halonet|sehalonet|botnet|sebotnet|lamhalobotnet|bat_resnext)"),
        ("csp", r"cs"),
        (
            "resnet",
            r"((gluon_|tv_|ssl_|swsl_|legacy_|wide_)?(se|sk|eca|gc)?(resnet|resnext|net\d)|res2ne|tresnet|selecsls)",
        ),
        ("vit", r"(vit_|deit)"),
        ("swin", r"swin"),
        ("mlp", r"(gmlp|resmlp)"),
        ("inception", r"(tf_|gluon_|adv_)?inception"),
        ("xception", r"(gluon_)?xception"),
        ("nasnet", r"p?nasnet"),
        ("densenet", r"(tv_)?densenet"),
        ("pit", r"pit_"),
        ("coat", r"coat_"),
        *((name, name) for name in _NAMED_ALIKE),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One row: a training step on an RTX 3090."""

    model: str
    batch_size: int
    image_size: int
    step_s: float

    @property
    def family(self) -> str:
        return family_of(self.model)

    @property
    def next_batch_size(self) -> int | None:
        """The next larger size of the ladder; None above 512."""
        place = LADDER.index(self.batch_size)
        return LADDER[place - 1] if place else None


def read_measured(path: Path = DATA) -> list[MeasuredStep]:
    """Every row, in the file's order."""
    with path.open(newline="") as file:
        return [
            MeasuredStep(
                model=row["model"],
                batch_size=int(row["train_batch_size"]),
                image_size=int(row["train_img_size"]),
                step_s=float(row["train_step_time"]) / 1e3,
            )
            for row in csv.DictReader(file)
        ]


def family_of(model: str) -> str:
    """``"tf_mobilenetv3_small_075"`` is of the efficientnets.

    Raises:
        ValueError: no family has such names; it belongs in the list.
    """
    for family, pattern in _FAMILIES:
        if pattern.match(model):
            return family
    raise ValueError(f"model {model!r} is of no family known here: add it to _FAMILIES in {Path(__file__).name}.")
