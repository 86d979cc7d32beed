"""The statistics of a batch out of those of its shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from splittune.parallel.batch_norm import batch_norm, pooled, refuse_single_value


def parts_of(values: Tensor, sizes: list[int]) -> Tensor:
    """``(mean, variance, count)`` of each share of a tensor of numbers of one channel."""
    rows = []
    for share in values.split(sizes):
        empty = torch.zeros((), dtype=values.dtype)
        mean, var = (share.mean(), share.var(correction=0)) if len(share) else (empty, empty)
        rows.append(torch.stack([mean, var, torch.full_like(mean, len(share))]))
    return torch.stack(rows).unsqueeze(2)


def test_the_docstrings_example() -> None:
    """Shares [1, 2, 3] and [6] are 3, 3.5 and 4 together."""
    whole, _ = pooled(parts_of(torch.tensor([1.0, 2.0, 3.0, 6.0]), [3, 1]))
    torch.testing.assert_close(whole, torch.tensor([[3.0], [3.5], [4.0]]))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.sampled_from([0.0, 1e3, -1e6]))
def test_the_whole_is_that_of_the_whole(sizes: list[int], shift: float) -> None:
    """Any shares, empty ones included; means a million times the deviation cost the variance six digits and no more."""
    values = torch.randn(sum(sizes), dtype=torch.float64) + shift
    whole, _ = pooled(parts_of(values, sizes))
    expected = torch.stack([values.mean(), values.var(correction=0), torch.tensor(len(values), dtype=torch.float64)])
    torch.testing.assert_close(whole.flatten(), expected, rtol=1e-12, atol=1e-9)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_its_gradients_are_autograds(sizes: list[int]) -> None:
    """Those of the parts, where autograd follows the arithmetic itself."""
    parts = parts_of(torch.randn(sum(sizes), dtype=torch.float64), sizes).requires_grad_()
    whole, shares = pooled(parts)
    grad = torch.randn_like(whole)
    (expected,) = torch.autograd.grad(whole[:2], parts, grad[:2])
    got = shares.gradients(grad)
    torch.testing.assert_close(got[:, :2].detach(), expected[:, :2])
    assert not got[:, 2].any()  # a count is no function of anything


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_part_is_in_float32_at_least(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """Half precision is read, and not summed in: torch's undocumented function is what it was."""
    x = (torch.randn(4, 3, 5, 5) * 2 + 30).to(dtype).contiguous(memory_format=memory_format)
    seen: list[Tensor] = []

    def pool(part: Tensor) -> Tensor:
        seen.append(part)
        return part

    layer = nn.BatchNorm2d(3).to(torch.float64 if dtype == torch.float64 else torch.float32)
    got = batch_norm(layer, x, pool)
    exact = x.double()
    expected = torch.stack(
        [exact.mean((0, 2, 3)), exact.var((0, 2, 3), correction=0), torch.full((3,), 100.0, dtype=torch.float64)]
    )
    assert seen[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-5, atol=0)
    assert (got.dtype, got.stride()) == (dtype, x.stride())


def test_what_is_not_counted_is_normalised_and_leaves_no_trace() -> None:
    """Nothing of a stand-in is in the part, nor has it a gradient by way of the statistics."""
    stand_in = torch.full((1, 2, 3), 1e30, requires_grad=True)
    whole = torch.tensor([[1.0, 2.0], [4.0, 9.0], [10.0, 10.0]])

    def pool(part: Tensor) -> Tensor:
        assert not part.any()
        return whole + part * 0

    out = batch_norm(nn.BatchNorm1d(2, affine=False, eps=0.5), stand_in, pool, is_counted=False)
    torch.testing.assert_close(out, (stand_in - whole[0, :, None]) / (whole[1, :, None] + 0.5).sqrt())
    out.sum().backward()
    torch.testing.assert_close(stand_in.grad, (1 / (whole[1, :, None] + 0.5).sqrt()).expand(1, 2, 3))


def test_one_value_has_no_variance() -> None:
    """As torch's BatchNorm says."""
    refuse_single_value(2, "all")
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1 in all"):
        refuse_single_value(1, "all")
