"""NCCL among devices that stand in for cards: its functions are played by copies on the streams they are given."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack

import pytest
import torch

from splittune.cards import module_of
from splittune.errors import DeviceError
from splittune.parallel import BalancedDataParallel, TorchLink, nccl
from tests.parallel.models import MODELS, assert_same, train, whole_batch
from tests.standin import devices

pytestmark = pytest.mark.standin

standin = module_of(torch.device("standin", 0)) if devices.is_registered() else None
CARDS = [torch.device("standin", index) for index in range(4)]


class Played:
    """`torch.cuda.nccl`, as far as it is used: each card's part runs on its stream, once all have come to it."""

    def __init__(self):
        self.calls = []

    def broadcast(self, inputs, root=0, streams=None, comms=None):
        self._check("broadcast", inputs, streams)
        self._copy(inputs[root], streams[root], inputs[1:], streams[1:])

    def reduce(self, inputs, output=None, root=0, op=0, streams=None, comms=None):
        self._check("reduce", inputs, streams)
        assert output is inputs[root]
        for other, stream in zip(inputs[1:], streams[1:], strict=True):
            with module_of(output.device).stream(streams[root]):
                arrived = torch.empty_like(output)
            self._copy(other, stream, [arrived], [streams[root]])
            with module_of(output.device).stream(streams[root]):
                output += arrived

    def _copy(self, source, from_stream, targets, streams):
        for target, stream in zip(targets, streams, strict=True):
            with module_of(target.device).stream(stream), module_of(source.device).stream(from_stream):
                target.copy_(source, non_blocking=True)

    def _check(self, name, inputs, streams):
        assert len({tensor.device for tensor in inputs}) == len(inputs) == len(streams)
        assert len({(tensor.numel(), tensor.dtype) for tensor in inputs}) == 1
        assert all(tensor.is_contiguous() for tensor in inputs)
        assert [stream.device for stream in streams] == [tensor.device for tensor in inputs]
        self.calls.append((name, inputs[0].numel()))


@pytest.fixture
def played(monkeypatch):
    """Stand-ins are cards of the kind that NCCL serves, for one test."""
    monkeypatch.setattr(nccl, "KIND", "standin")
    monkeypatch.setattr(torch.cuda, "nccl", functions := Played())
    nccl.is_nccl_usable.cache_clear()
    yield functions
    nccl.is_nccl_usable.cache_clear()


def wrapped(model, *shard_sizes, **options):
    names = [f"standin:{index}" for index in range(len(shard_sizes))]
    return BalancedDataParallel(module=model, shard_sizes=shard_sizes, device_ids=names, **options)


@pytest.mark.parametrize("engine", ["window", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_nccl_are_those_of_one_device(played, name, engine):
    """Parameters out and gradients home, sparse and unused ones among them, in order."""
    build, draw_inputs = MODELS[name]
    model, batch = build().to(CARDS[0]), draw_inputs(16).to(CARDS[0])
    expected = whole_batch(model, batch)
    wrapper = wrapped(model, 2, 3, 2, 1, engine=engine)
    with devices.order_checked() as reports:
        for _ in range(2):
            assert_same(train(wrapper, batch, [8, 6, 2]), expected, tolerance=5e-5)
    assert reports == []
    names = [called for called, _ in played.calls]
    assert names[:2] == ["broadcast", "reduce"]  # the first try
    assert names.count("broadcast") > 1
    assert names.count("reduce") > 1


def test_only_the_cards_in_use_take_part(played):
    """Without samples on card 0 or 2, theirs is a sum of cards 1 and 3 at card 0, and one try for this set of cards."""
    model, batch = torch.nn.Linear(3, 2).to(CARDS[0]), torch.ones(8, 3, device=CARDS[0])
    expected = whole_batch(model, batch)
    wrapper = wrapped(model, 0, 4, 0, 4)
    for _ in range(3):
        assert_same(train(wrapper, batch, [8]), expected)
    assert [name for name, _ in played.calls] == ["broadcast", "reduce"] * 4
    assert played.calls[0] == ("broadcast", 4)  # bytes of one float


@pytest.mark.parametrize("fault", ["initialises", "lies", "is missing"])
def test_where_nccl_fails_that_is_said_once_and_copies_serve(played, monkeypatch, fault):
    """An NCCL that cannot be initialised, gives wrong sums or is not there: one warning, and the same gradients."""

    def fail(*_args, **_kwargs):
        raise RuntimeError("NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)")

    if fault == "initialises":
        played.broadcast = fail
    elif fault == "lies":
        played.reduce = lambda *_args, **_kwargs: None
    else:
        monkeypatch.delattr(torch.cuda, "nccl")
    model, batch = torch.nn.Linear(3, 2).to(CARDS[0]), torch.ones(8, 3, device=CARDS[0])
    expected = whole_batch(model, batch)
    wrapper = wrapped(model, 2, 2, 2, 2)
    said = {
        "initialises": "unhandled system error",
        "lies": "its sum of a one from each of 4 cards is 1",
        "is missing": "no attribute 'nccl'",
    }[fault]
    with pytest.warns(RuntimeWarning, match=said) as warned:
        assert_same(train(wrapper, batch, [8]), expected)
    assert len(warned) == 1
    assert "ordinary copies" in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert_same(train(wrapped(model, 2, 2, 2, 2), batch, [8]), expected)


def test_a_card_named_twice_is_not_for_nccl(played):
    """NCCL refuses such a set: it is not asked, and nothing is said."""
    model, batch = torch.nn.Linear(3, 2).to(CARDS[0]), torch.ones(8, 3, device=CARDS[0])
    expected = whole_batch(model, batch)
    names = ["standin:0", "standin:1", "standin:0"]
    wrapper = BalancedDataParallel(module=model, shard_sizes=(2, 3, 3), device_ids=names)
    link = TorchLink([torch.device(name) for name in names])
    assert link.nccl([CARDS[0], CARDS[1], CARDS[0]]) is None
    assert link.nccl([CARDS[0]]) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(wrapper, batch, [8]), expected)


def test_integers_and_half_floats_travel(played):
    """A broadcast is of bytes, whatever they mean; what NCCL cannot add goes by copies."""
    link = TorchLink(CARDS)
    able = link.nccl(CARDS)
    assert able is not None
    assert able.can_add(torch.bfloat16)
    assert not able.can_add(torch.complex64)
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64):
        source = torch.ones(5, dtype=dtype, device=CARDS[0])
        targets = [torch.zeros(5, dtype=dtype, device=card) for card in CARDS[1:]]
        able.broadcast([source, *targets])
        for target in targets:
            assert torch.equal(target.cpu(), source.cpu())


def test_an_nccl_that_hangs_is_an_error(played, monkeypatch):
    """As between cards that cannot read one another's memory: what to set is said, and nobody waits for ever."""
    monkeypatch.setattr(nccl, "FIRST_TRY_LIMIT_S", 0.2)

    def hang(inputs, **_kwargs):
        with module_of(CARDS[0]).device(CARDS[0]):
            devices.sleep(0, 600.0)

    played.broadcast = hang
    model, batch = torch.nn.Linear(3, 2).to(CARDS[0]), torch.ones(8, 3, device=CARDS[0])
    wrapper = wrapped(model, 2, 2, 2, 2)
    try:
        with pytest.raises(DeviceError, match=r"standin:0, standin:1, .*within 0\.2 s.*NCCL_P2P_DISABLE=1"):
            wrapper(batch)
    finally:
        devices.forget_delays()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("engine", ["window", "torch"])
def test_sums_by_nccl_are_in_order_on_a_callers_own_streams(played, engine):
    """Also where autograd's thread of another card asks for them, whose current streams are others."""
    with ExitStack() as stack:
        for card in CARDS:
            stack.enter_context(standin.stream(standin.Stream(card)))
        stack.enter_context(standin.device(CARDS[0]))
        model, batch = torch.nn.Linear(3, 2).to(CARDS[0]), torch.ones(8, 3, device=CARDS[0])
        expected = whole_batch(model, batch)
        with devices.order_checked() as reports:
            wrapper = wrapped(model, 2, 2, 2, 2, engine=engine)
            for _ in range(2):
                assert_same(train(wrapper, batch, [8]), expected)
            for card in CARDS:
                standin.synchronize(card)
    assert reports == []


def test_threads_take_turns(played):
    """Two wrappers in one loss: autograd's threads of two cards may both come to NCCL, and one waits for the other."""
    inside, most = [], []
    reduce = played.reduce

    def noted(*args, **kwargs):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)  # so that another thread would come in, if it could
        reduce(*args, **kwargs)
        inside.pop()

    played.reduce = noted
    model, other = (torch.nn.Linear(3, 2).to(CARDS[0]) for _ in range(2))
    batch = torch.ones(8, 3, device=CARDS[0])
    left, right = wrapped(model, 4, 0, 4, engine="torch"), wrapped(other, 2, 3, 3, engine="torch")
    for _ in range(5):
        (left(batch).sum() + right(batch).sum()).backward()
    assert len(most) > 10
    assert set(most) == {1}


def test_two_evaluations_on_two_sets_of_streams_are_in_order():
    """Copies that are still arriving on one set of streams are not read on another."""
    model, batch = torch.nn.Linear(3, 2).to(CARDS[0]), torch.ones(8, 3, device=CARDS[0])
    wrapper = wrapped(model, 2, 2, 2, 2)
    for card in CARDS:
        standin.synchronize(card)
    outputs = []
    with devices.order_checked() as reports, torch.no_grad():
        for _ in range(2):
            with ExitStack() as stack:
                sides = [standin.Stream(card) for card in CARDS]
                for side in sides:
                    stack.enter_context(standin.stream(side))
                stack.enter_context(standin.device(CARDS[0]))
                outputs.append(wrapper(batch))
        for card in CARDS:
            standin.synchronize(card)
    assert reports == []
    assert torch.equal(*(output.cpu() for output in outputs))
