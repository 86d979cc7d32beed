"""Transfers: what travels together, what arrives, and which way gradients come back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from splittune.parallel import Link, TorchLink
from splittune.parallel.link import _make_context, buckets_of, flatten, strides_as, unflatten
from splittune.parallel.transfer import broadcast, copy_to_each, gather, send
from tests.parallel.models import CPU, ThreadedLink

MIB = 2**20


def floats(num_mib: int) -> Tensor:
    return torch.empty(num_mib * MIB // 4)


class Recorded(TorchLink):
    """A link between two places that are both the CPU; notes what it copied."""

    def __init__(self) -> None:
        super().__init__([CPU, CPU])
        self.copied: list[int] = []

    def place(self, position: int) -> Any:
        return position

    def place_of(self, tensor: Tensor) -> Any:
        return getattr(tensor, "place", 0)

    def copy(self, tensor: Tensor, place: Any) -> Tensor:
        self.copied.append(tensor.numel())
        arrived = tensor.clone()
        arrived.place = place
        return arrived

    def empty(self, shape: Any, like: Tensor, place: Any) -> Tensor:
        made = torch.empty_strided(tuple(shape), strides_as(like, shape), dtype=like.dtype)
        made.place = place
        return made

    def hop(self, source: Tensor, start: Any, target: Tensor, end: Any) -> Any:
        assert start != end
        self.copied.append(source.numel())
        target.copy_(source)

    def nccl(self, places: Any) -> None:
        """As between cards that are not CUDA's."""

    def on(self, place: Any) -> Any:
        return super().on(CPU)


# buckets


def test_buckets_example() -> None:
    """The docstring's worked number: 6, 3 and 6 MiB with a limit of 10 MiB are two copies."""
    assert buckets_of([floats(6), floats(3), floats(6)], limit_bytes=10 * MIB) == [[0, 1], [2]]


def test_what_cannot_be_joined_travels_alone() -> None:
    """Other dtypes have buckets of their own; strides, layouts, subclasses and large tensors go one by one."""

    class Own(Tensor):
        pass

    tensors = [
        torch.ones(2),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, 3)[:, :2],
        torch.ones(2).to_sparse(),
        torch.ones(2).as_subclass(Own),
        floats(1),
        nn.Parameter(torch.ones(2)),
        torch.ones(0),
    ]
    assert buckets_of(tensors, limit_bytes=MIB) == [[0, 6, 7], [1], [2], [3], [4], [5]]


SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16])


@given(parts=st.lists(st.tuples(SHAPES, DTYPES), max_size=8), limit=st.sampled_from([0, 16, 64, 10**6]))
def test_every_tensor_arrives_once(parts: list[tuple[list[int], torch.dtype]], limit: int) -> None:
    """Any mixture of shapes, 0-dim and empty ones included, is grouped without loss and comes apart again."""
    tensors = [torch.randn(shape).to(dtype) for shape, dtype in parts]
    buckets = buckets_of(tensors, limit_bytes=limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    for bucket in buckets:
        members = [tensors[index] for index in bucket]
        assert len(bucket) == 1 or sum(member.nbytes for member in members) <= limit
        for arrived, sent in zip(unflatten(flatten(members), members), members, strict=True):
            assert arrived.dtype == sent.dtype
            assert torch.equal(arrived, sent)


STORED = st.sampled_from([[0, 1, 2, 3], [0, 2, 3, 1], [3, 2, 1, 0], [1, 0, 3, 2]])


@given(parts=st.lists(st.tuples(st.tuples(*[st.integers(1, 3)] * 4), STORED, DTYPES), min_size=2, max_size=6))
def test_what_travels_together_keeps_its_format_and_is_aligned(parts: Any) -> None:
    """However dimensions are stored, channels last say, tensors of a dtype are one copy; each begins at 256 bytes."""
    tensors = []
    for shape, order, dtype in parts:
        stored = torch.randn([shape[place] for place in order]).to(dtype)
        tensors.append(stored.permute([order.index(place) for place in range(4)]))
    buckets = buckets_of(tensors)
    assert len(buckets) == len({tensor.dtype for tensor in tensors})
    for bucket in buckets:
        members = [tensors[index] for index in bucket]
        flat = flatten(members)
        for arrived, sent in zip(unflatten(flat, members), members, strict=True):
            assert torch.equal(arrived, sent)
            assert arrived.stride() == sent.stride()
            if len(members) > 1:
                assert (arrived.data_ptr() - flat.data_ptr()) % 256 == 0


def test_copies_of_a_bucket_may_be_changed_one_by_one() -> None:
    """Tensors that travelled together are independent: in-place changes show in no other, nor in the original."""
    originals = [torch.zeros(2), torch.zeros(3)]
    ((left, right),) = copy_to_each(originals, TorchLink([CPU, CPU]), [1])
    left.add_(1)
    assert (left.tolist(), right.tolist(), originals[0].tolist()) == ([1, 1], [0, 0, 0], [0, 0])
    assert left._version == 1
    assert right._version == 0


def test_strides_example() -> None:
    """The docstring's worked number: images stored channels last, more of them."""
    like = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert strides_as(like, (5, 3, 4, 4)) == (48, 1, 12, 3)
    assert strides_as(torch.empty(2, 3).expand(2, 2, 3), (5, 2, 3)) == (6, 3, 1)


@pytest.mark.parametrize("formats", [(torch.channels_last,) * 2, (torch.contiguous_format, torch.channels_last)])
def test_joined_images_have_the_format_of_their_parts(formats: tuple[torch.memory_format, ...]) -> None:
    """As torch.cat's result: channels last if all of them are, and so is what backward sends back."""
    chunks = [torch.randn(2, 3, 4, 4).to(memory_format=each).requires_grad_() for each in formats]
    joined = gather(chunks, Recorded(), 1, 0)
    assert torch.equal(joined, torch.cat(chunks))
    assert joined.stride() == torch.cat(chunks).stride()
    joined.square().sum().backward()
    assert all(chunk.grad.stride() == chunk.stride() for chunk in chunks)


# send


def test_a_tensor_that_is_there_is_not_copied() -> None:
    """Sending to where a tensor lives gives the tensor itself."""
    link, x = Recorded(), torch.ones(2, requires_grad=True)
    assert send(x, link, 0) is x
    assert link.copied == []


def test_a_sent_tensors_gradient_is_sent_back() -> None:
    """The copy's gradient arrives where the tensor lives, and can be differentiated itself."""
    link, x = Recorded(), torch.tensor([2.0, 3.0], requires_grad=True)
    (slope,) = torch.autograd.grad((send(x, link, 1) ** 3).sum(), x, create_graph=True)
    slope.sum().backward()
    assert x.grad.tolist() == [12, 18]
    assert link.copied[:2] == [2, 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_gradients(mode: Any) -> None:
    """A tensor sent without gradients is a plain copy."""
    with mode():
        assert not send(torch.ones(2, requires_grad=True), Recorded(), 1).requires_grad


# gather


def test_gathered_parts_lie_in_order() -> None:
    """Chunks of any sizes, none included, are joined along the dimension; one chunk alone is sent."""
    link = Recorded()
    chunks = [torch.ones(2, 1), torch.ones(2, 0), torch.zeros(2, 3)]
    assert gather(chunks, link, 0, 1).tolist() == [[1, 0, 0, 0]] * 2
    assert gather(chunks[:1], link, 0, 1) is chunks[0]


def test_a_parts_gradient_is_copied_only_where_it_must_travel() -> None:
    """The gradient of a chunk that was on the output's device is a part of the output's, not a copy."""
    link = Recorded()
    here, there = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2)
    there.place = 1
    there.requires_grad_()
    gather([here, there], link, 0, 0).square().sum().backward()
    assert here.grad.tolist() == [[2, 2]]
    assert link.copied == [6]


def test_what_needs_no_gradient_gets_none() -> None:
    """A chunk that is a constant costs no transfer in the backward pass."""
    link = Recorded()
    constant, learned = torch.ones(3), torch.ones(2)
    constant.place = learned.place = 1
    gather([constant, learned.requires_grad_()], link, 0, 0).sum().backward()
    assert link.copied == [2]


# broadcast


@pytest.mark.parametrize(
    "link", [Recorded(), TorchLink([CPU] * 4), ThreadedLink(4)], ids=lambda link: type(link).__name__
)
def test_broadcast_gradients_are_added_up(link: Link) -> None:
    """Gradients of all copies are summed; a copy that was not used adds nothing, an unused tensor gets none."""
    used, unused, partly = (torch.ones(size, requires_grad=True) for size in (2, 3, 4))
    copies = broadcast([used, unused, partly], link, [1, 2, 3])
    loss = sum((index + 1) * copy[0].sum() for index, copy in enumerate(copies)) + copies[1][2].sum()
    loss.backward()
    assert used.grad.tolist() == [6, 6]
    assert unused.grad is None
    assert partly.grad.tolist() == [1] * 4


def test_constants_are_broadcast_as_constants() -> None:
    """Copies of a frozen parameter need no gradient, those beside it do."""
    ((frozen, learned),) = broadcast([torch.ones(2), torch.ones(2, requires_grad=True)], Recorded(), [1])
    assert not frozen.requires_grad
    assert learned.requires_grad


def test_parameters_travel_in_buckets() -> None:
    """A hundred small parameters, every 256 bytes one, are one copy to another device, and their gradients one back."""
    link = Recorded()
    parameters = [torch.ones(3, requires_grad=True) for _ in range(100)]
    copies = broadcast(parameters, link, [0, 1])
    assert link.copied == [99 * 64 + 3]
    torch.stack([copy for on_device in copies for copy in on_device]).square().sum().backward()
    assert link.copied == [99 * 64 + 3] * 2
    assert all(parameter.grad.tolist() == [4, 4, 4] for parameter in parameters)


def test_sparse_and_dense_gradients_of_one_tensor_add_up() -> None:
    """Whichever device has the sparse one, and in whichever order, the sum is right."""
    for first in (True, False):
        table = torch.zeros(4, 2, requires_grad=True)
        ((left,), (right,)) = broadcast([table], Recorded(), [1, 1])
        rows = torch.tensor([1, 1, 3])
        sparse, dense = (left, right) if first else (right, left)
        loss = nn.functional.embedding(rows, sparse, sparse=True).sum() + dense.sum()
        loss.backward()
        assert table.grad.to_dense().tolist() == [[1, 1], [3, 3], [1, 1], [2, 2]]


def test_broadcasting_nothing_gives_nothing() -> None:
    """A module without parameters has replicas without parameters."""
    assert broadcast([], Recorded(), [1, 2]) == [[], []]


def test_each_thread_is_given_a_context_of_each_card_once() -> None:
    """A card's runtime is called before a thread's first replica there, and not again: a graph may be captured then."""
    asked: list[tuple[str, int]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def query(self) -> None:
            asked.append((self.name, threading.get_ident()))

    def replicas() -> None:
        for name in ("cuda:0", "cuda:1", "cuda:0"):
            _make_context(torch.device(name), Stream(name))

    threads = [threading.Thread(target=replicas) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert [name for name, _ in asked] == ["cuda:0", "cuda:1"] * 2
