"""What modules hold: parameters once, lists together, the largest first."""

from __future__ import annotations

from torch import nn

from splittune.training.module_memory import ModuleMemory, grouped, parameters_by_module


class Tied(nn.Module):
    """Two blocks of 4 x 4 floats, an embedding of 8 x 4, and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_parameters_are_told_by_module_each_once() -> None:
    """A weight that two share is the first one's; blocks of a list are one line."""
    assert parameters_by_module(Tied()) == (
        ModuleMemory(name="embed", count=1, parameter_bytes=128),
        ModuleMemory(name="blocks.*", count=2, parameter_bytes=128),
    )


def test_small_modules_are_told_together() -> None:
    """Twelve lines at most; nothing is left out of the sum."""
    model = nn.ModuleDict({f"layer{i}": nn.Linear(1, i + 1, bias=False) for i in range(20)})
    found = parameters_by_module(model)
    assert len(found) == 12
    assert found[-1].name == "(others)"
    assert found[-1].count == 9
    assert sum(one.parameter_bytes for one in found) == sum(p.nbytes for p in model.parameters())


def test_what_is_kept_outside_of_modules_has_a_line() -> None:
    """The loss, and the model's own forward."""
    found = grouped(Tied(), {"(outside)": 1000, "": 500, "blocks.1": 10})
    assert [(one.name, one.parameter_bytes, one.activation_bytes) for one in found] == [
        ("(outside)", 0, 1000),
        ("(itself)", 0, 500),
        ("blocks.*", 128, 10),
        ("embed", 128, 0),
    ]
