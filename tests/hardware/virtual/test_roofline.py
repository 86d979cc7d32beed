from __future__ import annotations

from math import hypot
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from splittune.hardware.virtual.catalog import find_gpu
from splittune.hardware.virtual.efficiency import EFFICIENCIES, KERNEL_S
from splittune.hardware.virtual.ledger import Ledger
from splittune.hardware.virtual.roofline import Work, count_flops, has_flops, kernel_time_s, work_of
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


def product(num_flops: int, num_bytes: int, is_half: bool, depth: int = 1024) -> Work:
    return Work("product", num_flops, num_bytes, is_half, depth=depth, num_columns=1024)


def test_bytes_and_flops_take_their_factors_of_the_time_at_published_peaks():
    """A 1024 x 1024 product: 60.3 us of arithmetic in float32 and 30.2 us in half precision; 13.4 and 6.7 of memory."""
    factors = EFFICIENCIES["product"]
    per_flop = factors.per_flop + factors.by_depth / 1024 + factors.by_columns / 1024 + factors.by_both / 1024**2
    whole = kernel_time_s(product(2 * 1024**3, 3 * 4 * 1024**2, is_half=False), RTX3090)
    half = kernel_time_s(product(2 * 1024**3, 3 * 2 * 1024**2, is_half=True), RTX3090)
    assert whole == pytest.approx(KERNEL_S + hypot(60.322e-6 * per_flop, 13.443e-6 * factors.per_byte), rel=1e-4)
    assert half == pytest.approx(KERNEL_S + hypot(30.246e-6 * per_flop, 6.722e-6 * factors.per_byte), rel=1e-4)


def test_what_computes_nothing_takes_the_time_of_its_bytes():
    """936 MB at 936e9 bytes/s are 1 ms, at the peak."""
    factors = EFFICIENCIES["elementwise"]
    time_s = kernel_time_s(Work("elementwise", num_flops=0, num_bytes=936_000_000), RTX3090)
    assert time_s == pytest.approx(KERNEL_S + 1e-3 * factors.per_byte)


def works_of(run) -> list[Work]:
    """What a virtual card is asked to do."""

    class Noted(TorchDispatchMode):
        works: ClassVar[list[Work]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.works.append(work_of(func, args, kwargs or {}, out, tensors(args), tensors((out,))))
            return out

    Noted.works = []
    with Noted():
        run()
    return Noted.works


def tensors(values) -> list[torch.Tensor]:
    found = []
    for value in values:
        found += (
            [value] if isinstance(value, torch.Tensor) else tensors(value) if isinstance(value, list | tuple) else []
        )
    return found


@pytest.mark.parametrize(
    ("dtype", "memory_format", "kind"),
    [
        (torch.bfloat16, torch.contiguous_format, "batch norm without cuDNN"),
        (torch.bfloat16, torch.channels_last, "batch norm"),
        (torch.float16, torch.contiguous_format, "batch norm"),
        (torch.float32, torch.contiguous_format, "batch norm"),
    ],
)
def test_batch_norm_of_bfloat16_is_a_class_of_its_own(dtype, memory_format, kind):
    """Forward and backward: one of 128 x 256 x 56 x 56 took an H100 1.58 ms both ways, with cuDNN's factor a fifth."""
    x = torch.randn(2, 4, 6, 6).to(dtype).contiguous(memory_format=memory_format).requires_grad_()
    norm = nn.BatchNorm2d(4)

    def run():
        out = norm(x)
        out.backward(torch.ones_like(out))

    assert [work.kind for work in works_of(run) if "batch norm" in work.kind] == [kind] * 2
    num_bytes = 2 * 128 * 256 * 56 * 56
    both = [Work(kind, 0, times * num_bytes) for times in (2, 3)]
    modelled_s = sum(kernel_time_s(work, find_gpu("H100-80GB")) for work in both)
    assert (modelled_s > 1.1e-3) == (kind == "batch norm without cuDNN")


X, IMAGES = torch.ones(4, 8), torch.ones(2, 4, 6, 6)


@pytest.mark.parametrize(
    ("run", "work"),
    [
        (lambda: X + X, Work("elementwise", 0, 2 * 128)),  # the same tensor twice is read once
        (lambda: X + torch.ones(8).expand(4, 8), Work("elementwise", 0, 128 + 32 + 128)),  # expanded: its 8 numbers
        (lambda: X.clone().relu_(), Work("elementwise", 0, 128 + 128)),  # in place: read and written
        (lambda: X.clone().zero_(), Work("elementwise", 0, 128)),  # written only
        (lambda: torch.full_like(X, 2.0), Work("elementwise", 0, 128)),
        (lambda: X.sum(0), Work("reduction", 0, 128 + 32)),
        (lambda: X.softmax(-1), Work("softmax", 0, 128 + 128)),
        (lambda: X.to(torch.float16), Work("copy", 0, 128 + 64)),
        (lambda: X.t().contiguous(), Work("transposition", 0, 128 + 128)),
        (lambda: X + torch.ones(8, 4).t(), Work("transposition", 0, 3 * 128)),
        (lambda: X[torch.tensor([0, 1])], Work("indexing", 0, 128 + 16 + 64, most_bytes=3 * 64)),  # rows of a whole
        (lambda: torch._foreach_add_([X.clone(), X.clone()], 1.0), Work("update", 0, 2 * 128 + 2 * 128)),
        (lambda: X @ X.t(), Work("product", 2 * 4 * 8 * 4, 2 * 128 + 64, depth=8, num_columns=4)),
        (
            lambda: functional.conv2d(IMAGES, torch.ones(6, 4, 3, 3)),
            Work("convolution", 2 * 2 * 16 * 6 * 36, 1152 + 864 + 768, depth=36, num_columns=6),
        ),
        (
            lambda: functional.conv2d(IMAGES, torch.ones(6, 2, 3, 3), groups=2),
            Work("grouped convolution", 2 * 2 * 16 * 6 * 18, 1152 + 432 + 768, depth=18, num_columns=3),
        ),
        (
            lambda: functional.conv2d(IMAGES, torch.ones(4, 1, 3, 3), groups=4),
            Work("depthwise convolution", 2 * 2 * 16 * 4 * 9, 1152 + 144 + 512, depth=9, num_columns=1),
        ),
    ],
)
def test_the_work_of_an_operation_is_worked_by_hand(run, work):
    """Class, FLOPs, bytes read and written, depth and columns of the last operation."""
    assert works_of(run)[-1] == work


def busy_s(run) -> float:
    """Seconds for which `run` keeps a virtual RTX 3090 busy."""
    ledger = Ledger([RTX3090], [GIB])
    with ledger, ledger.on(0):
        return run(ledger.timeline)


def test_operands_in_half_precision_have_half_precisions_peak():
    """A product of 1024 x 1024 matrices takes half the arithmetic and half the memory of float32 in bfloat16."""

    def multiply(timeline, dtype):
        x = torch.ones(1024, 1024, dtype=dtype)
        before = timeline.busy_s[0]
        x @ torch.ones_like(x)
        return timeline.busy_s[0] - before

    ones = kernel_time_s(Work("elementwise", 0, 4 * 1024**2), RTX3090)  # ones_like, written
    half_ones = kernel_time_s(Work("elementwise", 0, 2 * 1024**2), RTX3090)
    whole = kernel_time_s(product(2 * 1024**3, 3 * 4 * 1024**2, is_half=False), RTX3090)
    half = kernel_time_s(product(2 * 1024**3, 3 * 2 * 1024**2, is_half=True), RTX3090)
    assert busy_s(lambda timeline: multiply(timeline, torch.float32)) == pytest.approx(ones + whole)
    assert busy_s(lambda timeline: multiply(timeline, torch.bfloat16)) == pytest.approx(half_ones + half)


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
