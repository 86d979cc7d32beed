from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.attention import (
    attention_with_dropout,
    attention_with_dropout_backward,
    fused_attention,
)
from splittune.split import BatchSplit

SIZE, HEADS, LENGTH, WIDTH, DROPOUT = 2, 4, 6, 8, 0.4
ATTENDED = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6
ATTENDED |= torch.eye(LENGTH, dtype=torch.bool)
# The number of heads of keys and values, and what else is given.
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (HEADS, {}),
    "causal": (HEADS, {"is_causal": True}),
    "scaled": (HEADS, {"scale": 0.7}),
    "a mask of booleans": (HEADS, {"attn_mask": ATTENDED}),
    "a mask of numbers": (HEADS, {"attn_mask": torch.randn(SIZE, 1, LENGTH, LENGTH)}),
    "grouped": (2, {"enable_gqa": True, "is_causal": True}),
}


class Operations(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def drawn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, requires_grad=True, **options)


def qkv(num_shared: int = HEADS, **options: Any) -> list[Tensor]:
    return [drawn(SIZE, heads, LENGTH, WIDTH, **options) for heads in (HEADS, num_shared, num_shared)]


@pytest.mark.parametrize("name", CALLS)
def test_what_dropout_leaves_is_attention_and_its_gradient_knows_the_same_mask(name: str) -> None:
    """The mask shows in a result whose values are the unit matrix; with it torch's own attention gives all the rest."""
    num_shared, options = CALLS[name]
    torch.manual_seed(0)
    query, key, value = qkv(num_shared)
    unit = torch.eye(LENGTH).expand(SIZE, num_shared, LENGTH, LENGTH)
    with fused_attention():
        torch.manual_seed(1)
        shown = functional.scaled_dot_product_attention(query, key, unit, dropout_p=DROPOUT, **options)
        torch.manual_seed(1)
        got = functional.scaled_dot_product_attention(query, key, value, dropout_p=DROPOUT, **options)
        slope = torch.randn(got.shape)
        found = torch.autograd.grad(got, (query, key, value), slope)
    weights = functional.scaled_dot_product_attention(query, key, unit, **options)
    kept = shown.detach() != 0
    assert 0.4 < kept[weights > 0].float().mean() < 0.8
    expected = (weights * kept / (1 - DROPOUT)) @ value.repeat_interleave(HEADS // num_shared, 1)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (query, key, value), slope))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_operation_each_way(dtype: torch.dtype) -> None:
    """No product, softmax or mask is seen, and the shapes without values have the strides of those with them."""
    query, key, value = qkv(dtype=dtype)
    with Operations() as seen, fused_attention():
        functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1).sum().backward()
    ours = [name for name in seen.names if name.startswith("splittune")]
    assert ours == ["splittune::attention_with_dropout", "splittune::attention_with_dropout_backward"]
    assert not {"aten::bmm", "aten::_softmax", "aten::bernoulli_"} & set(seen.names)
    with FakeTensorMode() as mode, fused_attention():
        fakes = [mode.from_tensor(each) for each in (query, key, value)]
        fake = functional.scaled_dot_product_attention(*fakes, dropout_p=0.1)
        fake.sum().backward()
    assert fake.stride() == functional.scaled_dot_product_attention(query, key, value).stride()
    assert all(each.grad is not None and each.grad.shape == each.shape for each in fakes)


def test_the_operations_are_what_their_shapes_say() -> None:
    """torch's own check of an operator: nothing is changed, and the fakes are as the tensors."""
    query, key, value = (each.detach() for each in qkv())
    given = (query, key, value, None, 0.1, True, None)
    torch.library.opcheck(attention_with_dropout, given, test_utils=("test_schema",))
    out, logsumexp, seed = attention_with_dropout(*given)
    saved = (query, key, value, None, out, logsumexp, seed, 0.1, True, None)
    for utility in ("test_schema", "test_faketensor"):
        torch.library.opcheck(attention_with_dropout_backward, (torch.ones_like(out), *saved), test_utils=utility)


@pytest.mark.parametrize(
    "call",
    [
        lambda: functional.scaled_dot_product_attention(*qkv(), dropout_p=0.0),
        lambda: functional.scaled_dot_product_attention(*qkv(dtype=torch.double), dropout_p=0.1),
        lambda: functional.scaled_dot_product_attention(*[drawn(3, 4, 8) for _ in range(3)], dropout_p=0.1),
        lambda: functional.scaled_dot_product_attention(*qkv(), drawn(LENGTH, LENGTH), dropout_p=0.1),
    ],
    ids=["no dropout", "double", "three dimensions", "a mask with a gradient"],
)
def test_everything_else_stays_as_torch_has_it(call: Any) -> None:
    """The same operations in the same order as without."""
    with Operations() as before:
        call().sum().backward()
    with Operations() as seen, fused_attention():
        call().sum().backward()
    assert seen.names == before.names


def test_kernels_that_are_switched_off_stay_so() -> None:
    """With torch told to compute in parts, virtual cards do; and once nothing is metered, torch is as it was."""
    with Operations() as seen, fused_attention(), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        functional.scaled_dot_product_attention(*qkv(), dropout_p=0.1)
    assert not any(name.startswith("splittune") for name in seen.names)
    with Operations() as after:
        functional.scaled_dot_product_attention(*qkv(), dropout_p=0.1)
    assert not any(name.startswith("splittune") for name in after.names)


@pytest.mark.parametrize("mode", ["values", "autocast"])
def test_a_long_transformers_dropout_costs_no_square_of_its_length(mode: str) -> None:
    """On a virtual card torch's own encoder layer, with the dropout that it has by default, is as small as without."""

    def peak_bytes(dropout: float) -> int:
        hardware = resolve_hardware("1xRTX3090")
        model = nn.TransformerEncoderLayer(64, 8, 64, dropout=dropout, batch_first=True)
        for part in (model.dropout, model.dropout1, model.dropout2):
            part.p = 0.0  # these keep their masks, of the size of what they drop
        batch = torch.randn(1, 512, 64)
        with hardware.metered():
            wrapped = hardware.wrap(model, BatchSplit.even(global_batch_size=1, accumulation_steps=1, num_devices=1))
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                wrapped(batch).float().sum().backward()
            return hardware.memory()[0].peak_allocated_bytes

    weights_bytes = 8 * 512 * 512 * 2  # of one head's weights each, in half precision
    assert abs(peak_bytes(0.1) - peak_bytes(0.0)) < weights_bytes / 4
