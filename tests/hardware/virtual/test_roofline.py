from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from splittune.hardware.virtual.catalog import find_gpu
from splittune.hardware.virtual.ledger import Ledger
from splittune.hardware.virtual.roofline import Work, count_flops, has_flops, kernel_time_s
from splittune.units import GIB

RTX3090 = find_gpu("RTX3090")  # 35.6e12 FLOP/s in float32, 71e12 in half precision, 936e9 bytes/s


class Counter(TorchDispatchMode):
    """FLOPs of every operation inside, by its name."""

    def __init__(self):
        super().__init__()
        self.flops = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        flops = count_flops(func, args, kwargs or {}, out)
        assert has_flops(func) or flops == 0
        if flops:
            self.flops[func._schema.name] = self.flops.get(func._schema.name, 0) + flops
        return out


def flops_of(run) -> dict[str, int]:
    counter = Counter()
    with counter:
        run()
    return counter.flops


def test_a_matrix_product_is_two_flops_a_multiply_add():
    """(3, 5) by (5, 7) is 2 x 3 x 5 x 7, whichever operation does it, in place of an output too."""
    a, b, bias = torch.ones(3, 5), torch.ones(5, 7), torch.ones(7)
    assert flops_of(lambda: a @ b) == {"aten::mm": 210}
    assert flops_of(lambda: torch.addmm(bias, a, b)) == {"aten::addmm": 210}
    assert flops_of(lambda: torch.mm(a, b, out=torch.empty(0))) == {"aten::mm": 210}
    assert flops_of(lambda: torch.bmm(a.expand(4, 3, 5), b.expand(4, 5, 7))) == {"aten::bmm": 840}


def test_a_linear_layer_costs_three_products_forward_and_backward():
    """Forward, the input's gradient and the weight's: 2 x 3 x 5 x 7 each."""
    layer, x = nn.Linear(5, 7), torch.ones(3, 5, requires_grad=True)
    assert flops_of(lambda: layer(x).sum().backward()) == {"aten::addmm": 210, "aten::mm": 420}


def test_a_convolution_is_counted_forward_and_backward():
    """2 samples, 3 to 4 channels, 3 x 3 over 6 x 6 outputs: 2 x 2 x 36 x 4 x 27, and twice that backward."""
    layer, x = nn.Conv2d(3, 4, 3, padding=1, bias=False), torch.ones(2, 3, 6, 6, requires_grad=True)
    forward = 2 * 2 * 36 * 4 * 27
    assert flops_of(lambda: layer(x).sum().backward()) == {
        "aten::convolution": forward,
        "aten::convolution_backward": 2 * forward,
    }


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_groups_of_a_convolution_do_their_own_channels_alone(groups, transposed):
    """64 channels over 8 x 8 in g groups: every position meets 64 / g channels, in both gradients as in the forward."""
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(64, 64, 3, padding=1, groups=groups, bias=False)
    x = torch.ones(2, 64, 8, 8, requires_grad=True)
    forward = 2 * 2 * 64 * 9 * 64 * (64 // groups)
    assert flops_of(lambda: layer(x).sum().backward()) == {
        "aten::convolution": forward,
        "aten::convolution_backward": 2 * forward,
    }
    frozen = {"aten::convolution": forward, "aten::convolution_backward": forward}
    assert flops_of(lambda: layer(x.detach()).sum().backward()) == frozen


def test_attention_is_counted_forward_and_backward():
    """2 products of 2 x 4 heads x 6 x 6 x 8 forward, and 5 backward: that of the scores is made again."""
    query = torch.ones(1, 4, 6, 8, requires_grad=True)
    product = 2 * 4 * 6 * 6 * 8
    flops = flops_of(lambda: functional.scaled_dot_product_attention(query, query, query).sum().backward())
    assert flops == {
        "aten::_scaled_dot_product_flash_attention_for_cpu": 2 * product,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 5 * product,
    }


def test_what_torch_has_no_formula_for_has_no_flops():
    """Elementwise work, normalisation and reductions are bound by their bytes."""
    x = torch.ones(4, 8)
    assert flops_of(lambda: functional.layer_norm(x.relu() + x, (8,)).softmax(-1).sum()) == {}


@pytest.mark.parametrize(
    ("num_flops", "num_bytes", "is_half", "time_s"),
    [
        (2 * 1024**3, 12_582_912, False, 2 * 1024**3 / 35.6e12),  # 60 us of arithmetic beside 13 us of memory
        (2 * 1024**3, 6_291_456, True, 2 * 1024**3 / 71e12),
        (2 * 1024**3, 936_000_000, False, 1e-3),  # 1 ms of memory
        (0, 936_000_000, True, 1e-3),
        (0, 0, False, 0.0),
    ],
)
def test_the_slower_of_arithmetic_and_memory_decides(num_flops, num_bytes, is_half, time_s):
    """Half precision has its own peak; what computes nothing takes the time of its bytes."""
    assert kernel_time_s(Work(num_flops, num_bytes, is_half), RTX3090) == pytest.approx(time_s)


def busy_s(run) -> float:
    """Seconds for which `run` keeps a virtual RTX 3090 busy."""
    ledger = Ledger([RTX3090], [GIB])
    with ledger, ledger.on(0):
        return run(ledger.timeline)


def test_operands_in_half_precision_have_half_precisions_peak():
    """A product of 1024 x 1024 matrices takes 60 us in float32 and 30 us in bfloat16."""

    def product(timeline, dtype):
        x = torch.ones(1024, 1024, dtype=dtype)
        before = timeline.busy_s[0]
        x @ x
        return timeline.busy_s[0] - before

    assert busy_s(lambda timeline: product(timeline, torch.float32)) == pytest.approx(2 * 1024**3 / 35.6e12)
    assert busy_s(lambda timeline: product(timeline, torch.bfloat16)) == pytest.approx(2 * 1024**3 / 71e12)


def test_heads_that_share_keys_and_values_do_as_much_work():
    """Grouped attention, eight heads over two of keys and values, counts as attention of eight heads of its own."""

    def attend(num_groups):
        query = torch.randn(1, 8, 64, 32, requires_grad=True)
        key, value = (torch.randn(1, num_groups, 64, 32, requires_grad=True) for _ in range(2))
        with Counter() as counter:
            functional.scaled_dot_product_attention(query, key, value, enable_gqa=True).sum().backward()
        return {name: flops for name, flops in counter.flops.items() if "scaled_dot_product" in name}

    assert len(attend(8)) == 2  # forward and backward
    assert attend(2) == attend(8)


def test_work_on_what_a_subclass_wraps_is_timed():
    """A jagged batch of 600 and 400 rows takes a linear layer as long as a dense one of 1000 rows."""
    layer = nn.Linear(512, 512)

    def apply(timeline, *num_rows):
        batches = [torch.ones(num, 512) for num in num_rows]
        x = batches[0] if len(batches) == 1 else torch.nested.nested_tensor(batches, layout=torch.jagged)
        before = timeline.busy_s[0]
        layer(x).relu()
        return timeline.busy_s[0] - before

    expected = busy_s(lambda timeline: apply(timeline, 1000))
    assert busy_s(lambda timeline: apply(timeline, 600, 400)) == pytest.approx(expected, rel=0.01)


def test_torch_still_keeps_its_formulas_where_they_are_read():
    """torch's registry of FLOP formulas is public by name only: if it moves, this says so before a user finds out."""
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    for packet in (
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.convolution,
        aten.convolution_backward,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward,
    ):
        assert packet in flop_registry, f"torch {torch.__version__} has no FLOP formula for {packet}: see roofline.py"
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"):
        assert hasattr(aten, name), f"torch {torch.__version__} has no aten::{name}: see _SAME_FLOPS_AS in roofline.py"
