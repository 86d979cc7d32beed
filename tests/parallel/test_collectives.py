"""Copies to several places and sums from several places, whatever the tensors, wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.hardware import VirtualLink
from splittune.parallel import TorchLink, collectives
from splittune.parallel.collectives import Part, add_from_afar, copy_to_each
from splittune.parallel.sums import Sums
from tests.parallel.models import CPU

MIB = 2**20
HOME = 0


class Places(TorchLink):
    """Places 0, 1, 2, ... that are all the CPU: every tensor knows where it is, and hops are checked and noted.

    A hop arrives when its end is waited for, and not before, as on a card that is slow.
    """

    def __init__(self) -> None:
        super().__init__([CPU])
        self.hops: list[tuple[int, int, int]] = []
        self._marks: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def place(self, position: int) -> Any:
        return position

    def place_of(self, tensor: Tensor) -> Any:
        return HOME

    def copy(self, tensor: Tensor, place: Any) -> Tensor:
        return tensor.clone()

    def empty(self, shape: Any, like: Tensor, place: Any) -> Tensor:
        return torch.full(tuple(shape), 111, dtype=like.dtype)  # whatever was there

    def hop(self, source: Tensor, start: Any, target: Tensor, end: Any) -> Any:
        assert start != end
        assert source.shape == target.shape
        assert source.dtype == target.dtype
        self.hops.append((start, end, source.numel()))
        mark = len(self.hops)
        self._marks[start, mark] = self._marks[end, mark] = (source, source.clone(), target)
        return mark

    def wait(self, place: Any, mark: Any) -> None:
        found = self._marks.pop((place, mark), None)
        if found is None:
            return
        source, then, target = found
        if place == self.hops[mark - 1][0]:
            assert torch.equal(source, then), "written while a hop still read it"
        else:
            target.copy_(then)

    def nccl(self, places: Any) -> None:
        """None: these are no cards of CUDA's."""

    def on(self, place: Any) -> Any:
        return super().on(CPU)

    def has_landed(self) -> bool:
        """Whether both ends have waited for every hop."""
        return not self._marks


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """Some of each kind: empty ones, scalars, ones larger than a bucket, transposed, channels last, expanded."""
    found = []
    for number in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["vector", "scalar", "matrix", "transposed", "images", "expanded", "half"]))
        size = draw(st.integers(0, 40))
        made = {
            "vector": torch.arange(size, dtype=torch.float64),
            "scalar": torch.tensor(float(size)),
            "matrix": torch.arange(3.0 * size).reshape(size, 3),
            "transposed": torch.arange(5.0 * (size + 1)).reshape(size + 1, 5).t(),
            "images": torch.arange(2 * 3 * 4.0).reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
            "expanded": torch.tensor([1.0, 2.0]).reshape(1, 2).expand(3, 2),
            "half": torch.arange(size, dtype=torch.float16),
        }[kind]
        found.append(made + number if kind != "expanded" else made)
    return found


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 64 bytes, so that a few numbers fill several and large tensors are cut."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 64)
    monkeypatch.setattr(collectives, "ALIGNMENT_BYTES", 16)


@pytest.mark.usefixtures("small_buckets")
@settings(deadline=None)
@given(originals=tensors(), positions=st.lists(st.integers(0, 4), max_size=6))
def test_every_place_gets_every_tensor(originals: list[Tensor], positions: list[int]) -> None:
    """Values, dtype and strides arrive at any places, home and repeated ones included; nobody shares memory."""
    link = Places()
    copies = copy_to_each(originals, link, positions)
    assert link.has_landed()
    assert len(copies) == len(positions)
    for own in copies:
        for copied, original in zip(own, originals, strict=True):
            assert torch.equal(copied, original)
            assert copied.dtype == original.dtype
            assert copied.data_ptr() != original.data_ptr() or not original.numel()
    storages = [copied.untyped_storage().data_ptr() for own in copies for copied in own[:1] if copied.numel()]
    assert len(set(storages)) == len(storages)


@st.composite
def gradients(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor | None], list[tuple[int, list[Tensor | None]]]]:
    """Tensors, what home has of their gradients, and what each part at another place has: none, dense or sparse."""
    originals = [tensor for tensor in draw(tensors()) if tensor.dtype != torch.float16]

    def one(original: Tensor) -> Tensor | None:
        kind = draw(st.sampled_from(["none", "dense", "dense", "dense", "sparse", "contiguous"]))
        if kind == "none":
            return None
        values = torch.full_like(original, float(draw(st.integers(1, 9))))
        if kind == "contiguous":
            return values.contiguous()
        return values.to_sparse() if kind == "sparse" and original.dim() == 2 else values

    home = [one(original) for original in originals]
    places = draw(st.lists(st.integers(1, 4), max_size=5))
    return originals, home, [(place, [one(original) for original in originals]) for place in places]


@pytest.mark.usefixtures("small_buckets")
@settings(deadline=None)
@given(drawn=gradients(), home_is_ours=st.booleans())
def test_every_gradient_is_added_once(drawn: Any, home_is_ours: bool) -> None:
    """Whoever has a gradient, and in whatever form: the sums are right, what was handed over is not changed or kept."""
    originals, home, parts = drawn
    expected: list[Tensor | None] = []
    for index in range(len(originals)):
        everybodys = [grads[index] for grads in (home, *(grads for _, grads in parts))]
        present = [grad for grad in everybodys if grad is not None]
        expected.append(torch.stack([grad.to_dense() for grad in present]).sum(0) if present else None)
    before = [None if grad is None else grad.clone() for grad in home]
    link, totals = Places(), Sums(len(originals))
    totals.add(range(len(originals)), home, are_ours=home_is_ours)
    add_from_afar([Part(*part) for part in parts], link, HOME, totals, range(len(originals)))
    assert link.has_landed()
    for total, right in zip(totals.values, expected, strict=True):
        assert (total is None) == (right is None)
        assert total is None or (right is not None and torch.equal(total.to_dense(), right))
    assert all(grad is None for _, grads in parts for grad in grads)
    if not home_is_ours:
        for grad, was in zip(home, before, strict=True):
            assert grad is None or (was is not None and torch.equal(grad.to_dense(), was.to_dense()))


def test_the_worked_number() -> None:
    """With 3 on card 1 and 4 on card 2, card 1 sends 7; card 2's link carries its own alone."""
    link, totals = Places(), Sums(1)
    sent: list[float] = []
    hop = link.hop

    def noted(source: Tensor, *rest: Any) -> Any:
        sent.append(source.item())
        return hop(source, *rest)

    link.hop = noted  # type: ignore[method-assign,assignment]
    add_from_afar([Part(1, [torch.tensor([3.0])]), Part(2, [torch.tensor([4.0])])], link, HOME, totals, [0])
    assert sent == [4, 7]
    assert totals.values[0] is not None
    assert totals.values[0].tolist() == [7]


@pytest.mark.usefixtures("small_buckets")
def test_a_large_tensor_is_cut() -> None:
    """40 floats in buckets of 64 bytes are stretches of 16, 16 and 8 on each link, out and home."""
    link, totals = Places(), Sums(1)
    copy_to_each([torch.arange(40.0)], link, [1, 2])
    out = [(0, 1), (1, 2)]
    assert link.hops == [(*way, length) for length in (16, 16, 8) for way in out]
    link.hops.clear()
    add_from_afar([Part(1, [torch.ones(40)]), Part(2, [torch.ones(40)])], link, HOME, totals, [0])
    assert link.hops == [(*way, length) for length in (16, 16, 8) for way in ((2, 1), (1, 0))]


def test_a_place_without_memory_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a card has no room for its copies, what other cards are sent is waited for all the same."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 64)
    link, made = Places(), Places.empty

    def empty(shape: Any, like: Tensor, place: Any) -> Tensor:
        if place == 2 and len(link.hops) >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 bytes.")
        return made(link, shape, like, place)

    link.empty = empty  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        copy_to_each(
            [torch.ones(3, 4).to(dtype) for dtype in (torch.float32, torch.float64, torch.int32)], link, [1, 2]
        )
    assert link.hops
    assert link.has_landed()
    hops = len(link.hops)
    with pytest.raises(torch.OutOfMemoryError):
        add_from_afar([Part(1, [torch.ones(40)]), Part(2, [torch.ones(40)])], link, HOME, Sums(1), [0])
    assert len(link.hops) == hops
    assert link.has_landed()


# modelled


def cards(num_cards: int) -> tuple[VirtualHardware, VirtualLink]:
    hardware = resolve_hardware(f"{num_cards}xRTX3090")
    assert isinstance(hardware, VirtualHardware)
    return hardware, VirtualLink(hardware)


@pytest.fixture(params=["NCCL", "hops"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA's cards, and as on cards that have no NCCL."""
    if request.param == "hops":
        monkeypatch.setattr(VirtualLink, "nccl", lambda *_: None)


def seconds_of(num_cards: int) -> tuple[float, float]:
    """Modelled: 160 MiB in 5 MiB tensors out to all other cards, and as much home from each."""
    hardware, link = cards(num_cards)
    with hardware.metered():
        sizes = [5 * MIB // 4] * 32
        with link.on(0):
            originals = [torch.zeros(size) for size in sizes]
        begun_s = hardware.clock()
        copies = copy_to_each(originals, link, range(1, num_cards))
        copied_s = hardware.clock()
        totals = Sums(len(sizes))
        parts = [Part(place, list(own)) for place, own in enumerate(copies, start=1)]
        add_from_afar(parts, link, 0, totals, range(len(sizes)))
        return copied_s - begun_s, hardware.clock() - copied_s


@pytest.mark.usefixtures("way")
def test_eight_cards_take_little_longer_than_two() -> None:
    """A bucket passes on while the next one comes: 16 buckets over 7 links take the time of 22, not of 112."""
    for two, eight in zip(seconds_of(2), seconds_of(8), strict=True):
        assert eight < 1.6 * two


@pytest.mark.usefixtures("way")
def test_little_memory_is_held_on_the_way() -> None:
    """Beside what stays there: out, home has two buckets more at most; home, a card has two and the first one three."""
    hardware, link = cards(3)
    with hardware.metered():
        with link.on(0):
            originals = [torch.zeros(5 * MIB // 4) for _ in range(12)]
        held = hardware.allocated_bytes()
        hardware.reset_peaks()
        copies = copy_to_each(originals, link, [1, 2])
        peaks = [memory.peak_allocated_bytes for memory in hardware.memory()]
        assert peaks[0] - held[0] <= 2 * 10 * MIB
        assert peaks[1:] == list(hardware.allocated_bytes()[1:])
        totals = Sums(len(originals))
        with link.on(0):
            totals.add(range(12), [torch.zeros_like(original) for original in originals], are_ours=True)
        held = hardware.allocated_bytes()
        hardware.reset_peaks()
        add_from_afar([Part(1, [*copies[0]]), Part(2, [*copies[1]])], link, 0, totals, range(12))
        peaks = [memory.peak_allocated_bytes for memory in hardware.memory()]
    assert peaks[0] - held[0] <= 3 * 10 * MIB
    assert peaks[1] - held[1] <= 2 * 10 * MIB
    assert peaks[2] - held[2] <= 2 * 10 * MIB
