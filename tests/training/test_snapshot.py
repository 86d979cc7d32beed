"""A job is put back as it was found, bit by bit, whatever a trial did to it."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from splittune.training import Snapshot
from splittune.training.reach import MAX_OBJECTS
from tests.training.state import state_of

Loader = DataLoader[tuple[Tensor, ...]]


class Everything(nn.Module):
    """Shared and frozen parameters, BatchNorm, dropout, an RNN, odd buffers, and attributes that forward assigns."""

    position_ids: Tensor
    steps: Tensor
    noise: Tensor
    empty: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        self.frozen.requires_grad_(False)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("position_ids", torch.arange(4).expand(3, -1))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("noise", torch.tensor([float("nan"), -0.0]), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("absent", None)
        self.register_buffer("adjacency", torch.eye(4).to_sparse())
        self.num_calls = 0
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.steps = self.steps + 1  # a new tensor under the old name
        x = self.dropout(self.norm(self.tied(self.first(x))))
        x = self.frozen(x) + self.rnn(x.unsqueeze(1))[0].squeeze(1)
        self.latest = x
        return x.square().mean()


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW([{"params": list(parameters), "lr": torch.tensor(1e-3)}], betas=(0.9, 0.99), amsgrad=True)


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


Job = tuple[Everything, optim.Optimizer, Loader]


def job(make_optimizer: Callable[[Any], optim.Optimizer] = sgd, num_steps: int = 2) -> Job:
    """A job in mid-training: state in the optimizer, gradients on the parameters, the loader's generator advanced."""
    torch.manual_seed(0)
    model = Everything()
    optimizer = make_optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
    data, order = TensorDataset(torch.randn(12, 4)), torch.Generator().manual_seed(3)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
    for _ in range(num_steps):
        train(model, optimizer, loader)
    model(torch.randn(4, 4)).backward()
    return model, optimizer, loader


def train(model: nn.Module, optimizer: optim.Optimizer, loader: Loader) -> None:
    optimizer.zero_grad()
    model(next(iter(loader))[0]).backward()
    optimizer.step()


def restore(snapshot: Snapshot) -> None:
    snapshot.restore()
    snapshot.restore_gradients()


# what a trial may do


def draw(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    torch.rand(3), random.random(), list(loader)
    np.random.rand(2)  # noqa: NPY002 - the global generator


def fresh_optimizer(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    train(model, optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad), loader)


def reload_state(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    optimizer.load_state_dict(optimizer.state_dict())  # new dicts, new tensors
    train(model, optimizer, loader)


def change_options(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    group = optimizer.param_groups[0]
    group["lr"] = group["lr"].mul_(2) if isinstance(group["lr"], Tensor) else 7.0
    group["foreach"], group["added"] = True, 1
    del group["maximize"]
    group["params"].reverse()


def add_group(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    if not any(model.frozen[0].weight is held for group in optimizer.param_groups for held in group["params"]):
        optimizer.add_param_group({"params": [model.frozen[0].weight]})


def flip(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    model.train(not model.training)
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def move(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    """As to another device and dtype: new storages, new buffers."""
    model.double()


def overwrite(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), model.steps, model.noise, model.norm.running_mean):
            tensor.fill_(9)
        model.adjacency.mul_(3)
        model.first.weight.data = model.first.weight.data.t()
    model.position_ids = model.position_ids + 1


def reassign(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    model.first.weight = nn.Parameter(torch.zeros(4, 4))
    model.steps = torch.tensor(99)
    model.register_buffer("late", torch.zeros(1))
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    model.add_module("lazy", nn.Linear(2, 2))
    del model.empty
    model.latest, model.remark = None, "left behind"


def keep_history(model: Everything, optimizer: optim.Optimizer, loader: Loader) -> None:
    """A buffer updated in place with something that has a gradient becomes a part of the graph."""
    model.noise = torch.zeros(2) if model.noise.dtype != torch.float32 else model.noise
    model.noise.mul_(torch.ones(2, requires_grad=True))


MUTATIONS = (
    train,
    draw,
    fresh_optimizer,
    reload_state,
    change_options,
    add_group,
    flip,
    overwrite,
    reassign,
    keep_history,
    move,
)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "watching"])
@pytest.mark.parametrize("make_optimizer", [adamw, sgd], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_whatever_a_trial_does_is_undone(
    mutate: Callable[..., None], make_optimizer: Callable[[Any], optim.Optimizer], at_once: bool
) -> None:
    """Everything a trial may do to the job is undone, to the bits and to which object is where."""
    model, optimizer, loader = job(make_optimizer)
    before = state_of(model, optimizer, loader)
    snapshot = Snapshot(model, optimizer, loader, at_once=at_once)
    with snapshot.watching():
        mutate(model, optimizer, loader)
    restore(snapshot)
    assert state_of(model, optimizer, loader) == before


@given(
    rounds=st.lists(st.lists(st.sampled_from(MUTATIONS), max_size=3, unique=True), max_size=3), at_once=st.booleans()
)
def test_a_snapshot_may_be_restored_any_number_of_times(rounds: list[list[Callable[..., None]]], at_once: bool) -> None:
    """After any number of trials that do anything in any order, each restore gives the same job."""
    model, optimizer, loader = job(adamw, num_steps=1)
    before = state_of(model, optimizer, loader)
    snapshot = Snapshot(model, optimizer, loader, at_once=at_once)
    for mutations in [*rounds, []]:
        for mutate in mutations:
            # a trial that fails half-way is one more thing to undo
            with suppress(RuntimeError, AttributeError), snapshot.watching():
                mutate(model, optimizer, loader)
        snapshot.restore()
    snapshot.restore_gradients()
    assert state_of(model, optimizer, loader) == before


# gradients


def test_gradients_are_taken_off_meanwhile() -> None:
    """While trials run the user's gradients take no device memory, and a trial's own are not mixed with them."""
    model, optimizer, loader = job()
    snapshot = Snapshot(model, optimizer, loader)
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, optimizer, loader)
    snapshot.restore()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_come_back_as_the_same_tensors() -> None:
    """A gradient on the host is the very tensor that was there; a parameter without one gets none."""
    model, optimizer, loader = job()
    grads = [parameter.grad for parameter in model.parameters()]
    snapshot = Snapshot(model, optimizer, loader)
    train(model, optimizer, loader)
    restore(snapshot)
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))
    assert model.frozen[0].weight.grad is None


def test_hooks_are_those_that_were_there() -> None:
    """What a trial's forward installs is gone, what it takes away is back, in the order they were in."""
    model, _, loader = job()
    fired: list[str] = []
    kept = model.first.register_forward_hook(lambda *_: fired.append("first"))
    model.first.register_forward_hook(lambda *_: fired.append("second"))
    snapshot = Snapshot(model, None, loader)
    kept.remove()
    model.first.register_forward_hook(lambda *_: fired.append("the trial's"))
    model.norm.register_full_backward_hook(lambda *_: fired.append("the trial's"))
    restore(snapshot)
    model(torch.randn(4, 4)).backward()
    assert fired == ["first", "second"]


def test_a_config_that_a_first_forward_completes_is_as_it_was() -> None:
    """What a module's config notes of a trial is forgotten: of the labels' kind, say."""
    model, _, loader = job()
    model.config = SimpleNamespace(kind=None, layers=[1, 2])
    model.first.config = SimpleNamespace  # a class is nobody's to put back
    layers = model.config.layers
    snapshot = Snapshot(model, None, loader)
    model.config.kind, model.config.layers, model.config.late = "classes", [3], True
    restore(snapshot)
    assert vars(model.config) == {"kind": None, "layers": [1, 2]}
    assert model.config.layers is layers


def test_what_a_user_hangs_on_a_module_keeps_what_happened() -> None:
    """A counter or a logger of the user's own is no state of the job: it tells of the trial afterwards."""
    model, _, loader = job()
    model.seen = SimpleNamespace(batches=0)
    snapshot = Snapshot(model, None, loader)
    model.seen.batches = 3
    restore(snapshot)
    assert model.seen.batches == 3


def test_a_sparse_gradient_comes_back() -> None:
    """An embedding's sparse gradient is put back too."""
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1, 3])).sum().backward()
    before = state_of(model)
    snapshot = Snapshot(model)
    model(torch.tensor([0])).sum().backward()
    restore(snapshot)
    assert state_of(model) == before


# what belongs to the job besides the model


def test_parameters_outside_the_model_are_the_optimizers() -> None:
    """A second model that only the optimizer knows of, a discriminator say, is put back with its gradients."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = sgd([*model.parameters(), *other.parameters()])
    other(model(torch.ones(1, 2))).sum().backward()
    before = state_of(model, optimizer), state_of(other)
    snapshot = Snapshot(model, optimizer)
    other(model(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    restore(snapshot)
    assert (state_of(model, optimizer), state_of(other)) == before


def test_other_modules_of_the_job_are_put_back() -> None:
    """A loss with parameters and buffers of its own is put back where it is named."""
    model, loss = nn.Linear(2, 2), nn.BatchNorm1d(2)
    before = state_of(model), state_of(loss)
    snapshot = Snapshot(model, others=[loss])
    loss(model(torch.randn(4, 2))).sum().backward()
    restore(snapshot)
    assert (state_of(model), state_of(loss)) == before


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_never_notices() -> None:
    """A learning rate scheduler that wraps the optimizer's step goes on as if no trial had been."""
    learning_rates = []
    for with_trial in (False, True):
        model, optimizer, loader = job(sgd, num_steps=0)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        if with_trial:
            before = state_of(model, optimizer, loader)
            snapshot = Snapshot(model, optimizer, loader)
            train(model, optimizer, loader)
            restore(snapshot)
            assert state_of(model, optimizer, loader) == before
        optimizer.step()
        scheduler.step()
        learning_rates.append(optimizer.param_groups[0]["lr"])
    assert learning_rates == [0.05, 0.05]


def test_lists_of_tensors_in_the_optimizers_state_come_back() -> None:
    """State other than plain tensors, the history LBFGS keeps in lists, is put back too."""
    model = nn.Linear(3, 1)
    optimizer = optim.LBFGS(model.parameters(), max_iter=3)
    optimizer.step(partial(closure, model, optimizer))
    before = state_of(model, optimizer)
    snapshot = Snapshot(model, optimizer)
    for _ in range(2):
        optimizer.step(partial(closure, model, optimizer))
    restore(snapshot)
    assert state_of(model, optimizer) == before


def closure(model: nn.Module, optimizer: optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.arange(6.0).reshape(2, 3)).square().sum()
    loss.backward()
    return loss.item()


# the loader


def test_training_sees_the_batches_it_would_have_seen() -> None:
    """The next epoch has the same order and the same augmentations, with a generator of the loader's or without."""
    for generator in (None, torch.Generator().manual_seed(1)):
        data = TensorDataset(torch.arange(8.0))
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        snapshot = Snapshot(nn.Linear(1, 1), loader=loader)
        expected = [batch.tolist() for (batch,) in loader]
        snapshot.restore()
        assert [batch.tolist() for (batch,) in loader] == expected


def test_workers_that_were_started_do_not_stay() -> None:
    """A loader that keeps its workers has none afterwards, as before: they would go on from where trials left them."""
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2, num_workers=1, persistent_workers=True)
    snapshot = Snapshot(nn.Linear(1, 1), loader=loader)
    next(iter(loader))
    assert loader._iterator is not None
    snapshot.restore()
    assert loader._iterator is None


# what a step reaches besides


def test_containers_that_hold_state_are_as_they_were() -> None:
    """A pool of images, a queue and a dict of averages hold the tensors they held, with their
    values; plain lists stay."""
    pool, queue, averages = [torch.zeros(2)], deque([torch.ones(2)], maxlen=3), {"a": torch.ones(1)}
    history: list[float] = []
    kept = [*pool, *queue, *averages.values()]

    def step() -> None:
        pool.append(pool.pop().add_(1) * 2)
        queue.extend([torch.zeros(2)] * 3)
        averages.update(a=averages["a"].mul_(3) + 1, b=torch.zeros(1))
        history.append(1.0)

    snapshot = Snapshot(nn.Linear(1, 1), others=[step])
    for _ in range(2):
        step()
        restore(snapshot)
        left = [*pool, *queue, *averages.values()]
        assert [id(tensor) for tensor in left] == [id(tensor) for tensor in kept]
        assert [tensor.tolist() for tensor in left] == [[0, 0], [1, 1], [1]]
    assert history == [1.0, 1.0]


def test_what_is_told_is_kept_by_value() -> None:
    """An object that is named has its numbers, lists and tensors put back, whatever it is."""

    class Counter:
        def __init__(self) -> None:
            self.num, self.seen, self.total = 1, [1, 2], torch.zeros(2)

    counter = Counter()
    seen, total = counter.seen, counter.total
    snapshot = Snapshot(nn.Linear(1, 1), told=[counter])
    counter.num, counter.total = 5, counter.total.add_(1) * 2
    counter.seen.append(3)
    restore(snapshot)
    assert (counter.num, counter.seen, counter.total.tolist()) == (1, [1, 2], [0, 0])
    assert counter.seen is seen
    assert counter.total is total


def test_data_that_nobody_writes_to_is_not_written_to(tmp_path: Path) -> None:
    """A tensor over a file that is mapped read-only is reached, and restoring leaves it alone: a
    write would end the process."""
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(64)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of memory that is not writable
        data = torch.from_numpy(np.memmap(path, mode="r"))

    def step() -> Tensor:
        return data

    snapshot = Snapshot(nn.Linear(1, 1), others=[step])
    restore(snapshot)
    assert data.tolist() == list(range(64))


def test_more_than_can_be_looked_at_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Where the walk over what a step reaches is not complete the user hears of it, and of the way to say it."""
    many = [[number] for number in range(MAX_OBJECTS)]
    Snapshot(nn.Linear(1, 1), others=[lambda: many])
    assert "other_state=(discriminator, ...)" in caplog.text
