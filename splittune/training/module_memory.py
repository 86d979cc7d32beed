"""What each module of a job holds: its parameters, and the activations that its forward keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

# Names are told to this depth, as "transformer.h.*.mlp". A choice: below are the layers of a block.
_DEPTH = 4
# Modules that are told of, those that hold most. A choice.
_MOST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """Modules of one name, those of a list together: ``transformer.h.*.mlp`` are twelve of GPT-2.

    Worked: twelve with 18 MiB of parameters each have `parameter_bytes` of 216 MiB.
    """

    name: str
    count: int
    parameter_bytes: int
    """Parameters and buffers of all of them; one that several share counts where it comes first."""
    activation_bytes: int | None = None
    """What their forward keeps for the backward, of one sample; None where the step was not looked at."""


def parameters_by_module(model: nn.Module) -> tuple[ModuleMemory, ...]:
    """Sizes alone: nothing runs."""
    return grouped(model, {})


def grouped(model: nn.Module, kept: Mapping[str, int]) -> tuple[ModuleMemory, ...]:
    """By what modules hold, most first; what is below `_MOST` together as ``(others)``."""
    members: dict[str, set[str]] = {}
    parameters: dict[str, int] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        new = [one for one in own if id(one) not in seen]
        seen.update(map(id, new))
        parameters[name] = sum(one.nbytes for one in new)
    sizes: dict[str, int] = {}
    activations: dict[str, int] = {}
    for name in dict.fromkeys((*parameters, *kept)):
        pattern = _pattern_of(name)
        if not parameters.get(name) and not kept.get(name):
            continue
        members.setdefault(pattern, set()).add(".".join(name.split(".")[:_DEPTH]))
        sizes[pattern] = sizes.get(pattern, 0) + parameters.get(name, 0)
        activations[pattern] = activations.get(pattern, 0) + kept.get(name, 0)
    order = sorted(members, key=lambda pattern: -(sizes[pattern] + activations[pattern]))
    found = [
        ModuleMemory(
            name=pattern,
            count=len(members[pattern]),
            parameter_bytes=sizes[pattern],
            activation_bytes=activations[pattern] if kept else None,
        )
        for pattern in order
    ]
    if len(found) <= _MOST:
        return tuple(found)
    rest = found[_MOST - 1 :]
    others = ModuleMemory(
        name="(others)",
        count=sum(one.count for one in rest),
        parameter_bytes=sum(one.parameter_bytes for one in rest),
        activation_bytes=sum(one.activation_bytes or 0 for one in rest) if kept else None,
    )
    return (*found[: _MOST - 1], others)


def _pattern_of(name: str) -> str:
    """``"h.3.mlp.fc"`` as ``"h.*.mlp.fc"``, to `_DEPTH`; the model's own as ``"(itself)"``."""
    parts = name.split(".")[:_DEPTH]
    return ".".join("*" if re.fullmatch(r"\d+", part) else part for part in parts) or "(itself)"
