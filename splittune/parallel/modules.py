"""The modules of a tree, for what is asked in every forward."""

from __future__ import annotations

from torch import nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """``list(root.modules())``, several times as fast: torch's own runs a generator within a generator at each level.

    Worked: of ``Sequential(a, Sequential(b, a))`` it is the outer one, a, the inner one, b.
    """
    found: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting.extend(child for child in reversed(module._modules.values()) if child is not None)
    return list(found)
