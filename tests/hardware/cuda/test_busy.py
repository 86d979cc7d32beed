"""How long replicas run, on cards whose clocks a test moves: forwards and backwards count, waiting does not."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splittune.hardware.cuda.busy import BusyGauge
from splittune.parallel import BalancedDataParallel
from tests.hardware.cuda.fake_cuda import FakeCard, FakeCuda

FORWARD_MS, BACKWARD_MS, WAITING_MS = 100, 200, 50_000


class Takes(torch.autograd.Function):
    """The identity, which moves one card's clock forward, there and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cuda: FakeCuda, card: int) -> Tensor:
        ctx.cuda, ctx.card, ctx.samples = cuda, card, len(x)
        cuda.now_ms[card] += FORWARD_MS * len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.cuda.now_ms[ctx.card] += BACKWARD_MS * ctx.samples
        return grads[0], None, None


class Model(nn.Module):
    """`first` is the last to get a gradient; the shard's first feature tells its card."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.last, self.first = nn.Linear(2, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Takes.apply(self.first(x), self.cuda, int(x[0, 0]))
        return self.last(hidden)


class DeviceView:
    """A model on cards of which each shard knows its own, and the gauge."""

    def __init__(self, *shard_sizes: int, **options: Any) -> None:
        self.cuda = FakeCuda([FakeCard() for _ in shard_sizes])
        self.gauge = BusyGauge([torch.device("cuda", index) for index in range(len(shard_sizes))])
        self.wrapped = BalancedDataParallel(
            module=Model(self.cuda), shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes), **options
        )
        self.wrapped.gauge = self.gauge
        cards = [card for card, size in enumerate(shard_sizes) for _ in range(size)]
        self.x = torch.tensor(cards).float().unsqueeze(1).repeat(1, 2)

    def forward(self) -> Tensor:
        output = self.wrapped(self.x)
        self.cuda.now_ms = [now + WAITING_MS for now in self.cuda.now_ms]  # for the slowest, the loss, the copies
        return output

    def step(self) -> None:
        self.forward().sum().backward()
        self.wrapped.zero_grad()


@pytest.fixture
def cards(monkeypatch):
    """Makes cards, and puts them in torch.cuda's place."""

    def make(*shard_sizes: int, **options: Any) -> DeviceView:
        made = DeviceView(*shard_sizes, **options)
        for name in ("Event", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(made.cuda, name))
        return made

    return make


@pytest.mark.parametrize("shard_sizes", [(1, 3), (3, 1), (2, 0, 5), (4,), (0, 4)])
def test_forward_and_backward_count_and_waiting_does_not(cards, shard_sizes):
    """Each card's seconds are its own shard's forward and backward; an idle card's are 0; they add up over steps."""
    job = cards(*shard_sizes)
    with job.gauge.counting():
        for num_steps in range(1, 4):
            job.step()
            expected = [num_steps * size * (FORWARD_MS + BACKWARD_MS) / 1e3 for size in shard_sizes]
            assert job.gauge.busy_s() == pytest.approx(expected)


@pytest.mark.parametrize("in_window", [False, True])
def test_accumulated_micro_steps_count_too(cards, in_window):
    """Inside no_sync the copies stay, and each forward and backward counts once."""
    job = cards(1, 2)
    with job.gauge.counting():
        for _ in range(2):
            with job.wrapped.no_sync():
                job.forward().sum().backward()
            if not in_window:
                job.gauge.busy_s()
        job.step()
        assert job.gauge.busy_s() == pytest.approx((0.9, 1.8))


def test_a_loss_in_the_replica_counts(cards):
    """What a replica computes of the loss, on its own card, is its work."""
    cuda = []

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return Takes.apply(output, cuda[0], int(targets[0, 0])).mean()

    job = cards(1, 2, loss_fn=loss_fn)
    cuda.append(job.cuda)
    with job.gauge.counting():
        job.wrapped(job.x, job.x).backward()
        assert job.gauge.busy_s() == pytest.approx((0.6, 1.2))


def test_of_several_outputs_the_first_gradient_begins_the_backward(cards):
    """A model with two outputs, one of which gets its gradient late: its backward begins with the other."""
    job = cards(2)
    plain = job.wrapped.module.forward
    job.wrapped.module.forward = lambda x: (plain(x), Takes.apply(plain(x), job.cuda, 0))
    with job.gauge.counting():
        early, late = job.wrapped(job.x)
        (early.sum() + late.sum()).backward()
        assert job.gauge.busy_s() == pytest.approx((3 * 2 * (FORWARD_MS + BACKWARD_MS) / 1e3,))


def test_without_gradients_the_forward_counts(cards):
    """Under no_grad there is no backward to wait for."""
    job = cards(1, 2)
    with job.gauge.counting(), torch.no_grad():
        job.forward()
        assert job.gauge.busy_s() == pytest.approx((0.1, 0.2))


def test_the_last_parameter_is_learned(cards):
    """The first backward watches every parameter, the next ones that whose gradient came last; another model anew."""
    job = cards(1, 2)
    recorded = []
    with job.gauge.counting():
        for number in range(4):
            if number == 3:
                job.gauge.forget()
            before = job.cuda.num_recorded
            job.step()
            job.gauge.busy_s()
            recorded.append(job.cuda.num_recorded - before)
    # forward 2 events and the backward's begin, on two cards; and its end once or for each of four parameters
    assert recorded == [2 * (3 + 4), 2 * (3 + 1), 2 * (3 + 1), 2 * (3 + 4)]


def test_a_run_that_cannot_be_followed_is_unknown_once(cards):
    """A model called twice before it goes backward: None for that reading, and seconds again for the next."""
    job = cards(1, 2)
    with job.gauge.counting():
        job.step()
        before = job.gauge.busy_s()
        (job.forward() + job.forward()).sum().backward()
        assert job.gauge.busy_s() is None
        start = job.gauge.busy_s()
        job.step()
        end = job.gauge.busy_s()
    assert before == pytest.approx((0.3, 0.6))
    assert [after - s for after, s in zip(end, start, strict=True)] == pytest.approx([0.3, 0.6])


def test_nothing_is_recorded_outside(cards):
    """Outside the context training costs nothing: no event, no hook, and the reading is None."""
    job = cards(1, 2)
    with job.gauge.counting(), job.gauge.counting():
        job.step()
    recorded = job.cuda.num_recorded
    assert recorded
    job.step()
    assert job.cuda.num_recorded == recorded
    assert job.gauge.busy_s() is None
    with job.gauge.counting():
        assert job.gauge.busy_s() == (0.0, 0.0), "what was not read inside is not read later"


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_is_left_on_the_users_parameters(cards, fails):
    """On a single card the module itself runs: its parameters are as they were, also after a forward that raised."""
    job = cards(4)
    with job.gauge.counting():
        if fails:
            job.wrapped.module.last.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                job.forward()
        else:
            job.step()
        assert any(parameter._backward_hooks for parameter in job.wrapped.parameters())
    assert not any(parameter._backward_hooks for parameter in job.wrapped.parameters())


def test_gradients_are_the_same_under_the_gauge(cards):
    """Watching changes no gradient."""
    job, grads = cards(1, 3), []
    for _ in range(3):
        with job.gauge.counting():
            job.forward().square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in job.wrapped.parameters()])
        job.wrapped.zero_grad()
    job.wrapped.module(job.x).square().sum().backward()
    for counted in grads:
        torch.testing.assert_close(counted, [parameter.grad for parameter in job.wrapped.parameters()])


def test_copies_of_the_wrapper_are_not_measured(cards):
    """The gauge is the hardware's: a copy of the wrapper leaves it behind."""
    job = cards(1, 3)
    assert copy.copy(job.wrapped).gauge is None
    assert job.wrapped.gauge is job.gauge


def test_replicas_in_threads_are_told_apart(cards):
    """Forwards that run at the same time, each in its own thread, are each their card's."""
    job = cards(1, 1)
    both = threading.Barrier(2)

    def run(position: int) -> None:
        job.gauge.begin(position, nn.Linear(1, 1))
        both.wait(10)
        job.cuda.now_ms[position] += 100 * (position + 1)
        both.wait(10)
        job.gauge.end(position, None)

    with job.gauge.counting():
        threads = [threading.Thread(target=run, args=(position,)) for position in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert job.gauge.busy_s() == pytest.approx((0.1, 0.2))
