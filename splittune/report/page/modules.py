"""The picture of what each module of the model holds."""

from __future__ import annotations

from collections.abc import Sequence

from splittune.report.page.markup import Markup, join
from splittune.report.page.picture import Picture, box, cut, words
from splittune.report.page.tables import table
from splittune.report.words import count_of
from splittune.training.module_memory import ModuleMemory
from splittune.units import format_bytes

_ROW = 40


def modules_picture(modules: Sequence[ModuleMemory], samples: int) -> Picture:
    """A bar for each: parameters, and the activations of `samples` samples, the largest share."""
    modules = sorted(modules, key=lambda module: -sum(_sizes(module, samples)))
    scale = max(sum(_sizes(module, samples)) for module in modules) or 1
    drawn = []
    for place, module in enumerate(modules):
        y, (parameters, activations) = place * _ROW, _sizes(module, samples)
        drawn += [
            words(cut(_named(module), 34), 0, y + 12),
            words(format_bytes(parameters + activations), 1, y + 12, "e s"),
            box(0, parameters / scale, y + 17, 12, "parameters", f"parameters: {format_bytes(parameters)}"),
            box(
                parameters / scale,
                activations / scale,
                y + 17,
                12,
                "share",
                f"activations: {format_bytes(activations)}",
            ),
        ]
    has_activations = any(module.activation_bytes is not None for module in modules)
    kept = (
        f"Parameters, and what the forward of {samples} samples, the largest share, keeps for the backward "
        "(accounted); what an operation needs for a moment comes on top."
        if has_activations
        else "Parameters: sizes of the model."
    )
    return Picture(
        title="Which modules hold it",
        sentence=kept,
        content=join(drawn),
        height=len(modules) * _ROW - 8,
        key=(("parameters", "parameters"), *((("share", "activations"),) if has_activations else ())),
    )


def modules_table(modules: Sequence[ModuleMemory], samples: int) -> Markup:
    """A row for each."""
    heads = [("module", "w"), ("parameters", "n"), ("1 sample", "n"), (count_of(samples, "sample"), "n")]
    rows = []
    for module in modules:
        each = module.activation_bytes
        sizes = ["", ""] if each is None else [format_bytes(each), format_bytes(each * samples)]
        rows.append(([_named(module), format_bytes(module.parameter_bytes), *sizes], False))
    told = (
        "Parameters, and what is kept for the backward of samples, without what inner modules keep; modules of a list"
    )
    return table(f"{told} together.", heads, rows, is_wide=False)


def _sizes(module: ModuleMemory, samples: int) -> tuple[int, int]:
    return module.parameter_bytes, (module.activation_bytes or 0) * samples


def _named(module: ModuleMemory) -> str:
    return module.name if module.count == 1 else f"{module.name} ({module.count})"
