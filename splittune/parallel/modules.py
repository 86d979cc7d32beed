"""The modules of a tree, for what is asked in every forward."""

from __future__ import annotations

from torch import nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """``list(root.modules())``, several times as fast: torch's own runs a generator within a generator at each level.

    Worked: of ``Sequential(a, Sequential(b, a))`` it is the outer one, a, the inner one, b.
    """
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:  # most have none
                waiting.extend(reversed(module._modules.values()))
    return list(found)
