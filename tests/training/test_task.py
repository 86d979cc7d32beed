"""TrainingTask: which jobs are accepted, how one step of them runs, and what is assumed where nothing was said."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from splittune.errors import ConfigError
from splittune.training import TrainingTask
from tests.training.job import BATCH, make_model, step_of, task, two_steps, wrapped
from tests.training.state import state_of


def on_two_devices() -> nn.Module:
    model = nn.Linear(4, 2)
    model.register_buffer("table", torch.zeros(3, device="meta"))
    return model


# jobs that are refused


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: task(model=None), "model is None: expected a torch.nn.Module"),
        (lambda: task(model=functional.relu), "model is <function relu"),
        (lambda: task(model=nn.ReLU()), r"ReLU has no trainable parameter \(0 in all"),
        (
            lambda: task(model=make_model(trainable=False)),
            r"Sequential has no trainable parameter \(4 in all, none with requires_grad\)",
        ),
        (lambda: task(model=nn.LazyLinear(3)), r"uninitialised \(lazy\).*run one forward pass"),
        (lambda: task(model=nn.DataParallel(make_model())), "wrapped in DataParallel.*Pass model.module"),
        (lambda: task(model=wrapped(make_model())), "wrapped in BalancedDataParallel.*Pass model.module"),
        (
            lambda: task(model=nn.Sequential(OrderedDict(_orig_mod=wrapped(make_model())))),
            r"compiled wrapper.*Pass torch\.compile\(model\.module\)",
        ),
        (lambda: task(model=nn.Linear(4, 2, device="meta")), "meta device, without values"),
        (
            lambda: task(model=on_two_devices()),
            r"lives on 2 devices, weight on cpu and table on meta: expected one.*model.to\('cpu'\)",
        ),
        (lambda: task(loss_fn=functional.mse_loss, step_fn=lambda model, batch: 0), "got loss_fn and step_fn"),
        (lambda: task(loss_fn="mse"), "loss_fn is 'mse': expected a function"),
        (lambda: task(step_fn=3), "step_fn is 3: expected a function"),
        (lambda: task(optimizer="adam"), "optimizer is 'adam': expected a torch.optim.Optimizer or a callable"),
        (
            lambda: task(optimizer=optim.SGD(make_model().parameters(), lr=1)),
            "holds none of the model's trainable parameters.*copied or wrapped",
        ),
        (lambda: task(global_batch_size=0), "global_batch_size is 0: expected an integer of at least 1"),
        (lambda: task(global_batch_size=-4), "global_batch_size is -4"),
        (lambda: task(global_batch_size=True), "global_batch_size is True"),
        (lambda: task(global_batch_size=2.5), "global_batch_size is 2.5"),
        (lambda: task(grad_scaler=65536.0), r"grad_scaler is 65536.0: expected a torch.amp.GradScaler"),
        (
            lambda: task(grad_scaler=torch.amp.GradScaler("cpu", init_scale=0.0)),
            r"grad_scaler has a scale of 0\.0: expected a finite number above 0, such as 65536.*Make a new",
        ),
        (lambda: task(grad_scaler=torch.amp.GradScaler("cpu", init_scale=float("nan"))), "a scale of nan"),
        (lambda: task(other_state=make_model()), r"other_state is a Sequential: expected a tuple of objects"),
        (
            lambda: task(other_state=(make_model(), 3)),
            r"other_state\[1\] is 3, which has nothing to put back.*Leave it out",
        ),
        (lambda: task(autocast_dtype="bf16"), "autocast_dtype is 'bf16': expected a torch.dtype"),
    ],
)
def test_a_job_that_cannot_be_tuned_is_refused(make: Callable[[], TrainingTask], match: str) -> None:
    """A job that makes no sense is refused when it is put together, by what is wrong with it."""
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_a_scripted_model_is_refused() -> None:
    """TorchScript modules cannot be replicated, and are refused before anything is run."""
    with pytest.raises(ConfigError, match=r"TorchScript module.*scripted from"):
        task(model=torch.jit.script(make_model()))


# the optimizer


def test_an_instance_is_the_optimizer() -> None:
    """The user's own optimizer is used, not a copy of it."""
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    assert task(model=model, optimizer=optimizer).make_optimizer() is optimizer


def test_a_factory_gets_the_trainable_parameters() -> None:
    """A callable is given the parameters that train, and makes a new optimizer every time."""
    model = make_model()
    model[0].requires_grad_(False)
    job = task(model=model, optimizer=lambda parameters: optim.SGD(parameters, lr=0.1))
    first, second = job.make_optimizer(), job.make_optimizer()
    assert first is not second
    assert [id(p) for p in first.param_groups[0]["params"]] == [id(p) for p in model[2].parameters()]


def test_a_factory_that_makes_no_optimizer_is_refused() -> None:
    """What the callable returns must be an optimizer."""
    with pytest.raises(ConfigError, match=r"returned a list: expected a torch.optim.Optimizer.*lambda"):
        task(optimizer=list).make_optimizer()


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    """LBFGS runs the model within its step, which cannot be measured apart: an instance or a factory is refused."""
    model = make_model()
    for optimizer in (optim.LBFGS, optim.LBFGS(model.parameters())):
        with pytest.raises(ConfigError, match=r"LBFGS.*no closure, such as AdamW"):
            task(model=model, optimizer=optimizer).make_optimizer()


def test_adamw_is_assumed_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without an optimizer AdamW is assumed, and the user is told so once."""
    job = task()
    with caplog.at_level(logging.INFO, logger="splittune"):
        made = [job.make_optimizer() for _ in range(3)]
    assert all(type(optimizer) is optim.AdamW for optimizer in made)
    assert caplog.text.count("AdamW is assumed") == 1


def test_adamw_is_not_assumed_for_sparse_gradients() -> None:
    """A job with sparse gradients needs an optimizer that takes them, and is told where they are."""
    model = nn.Sequential(OrderedDict(words=nn.Embedding(5, 4, sparse=True), last=nn.Linear(4, 2)))
    with pytest.raises(ConfigError, match=r"no optimizer was given.*'words' are.*optimizer=lambda"):
        task(model=model)
    task(model=model, optimizer=lambda parameters: optim.SGD(parameters, lr=0.1))
    task(model=model.requires_grad_(False).append(nn.Linear(2, 2)))


# the loss


def test_the_inferred_loss_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """What was inferred for the loss is logged once, however many trials there are."""
    job = task()
    with caplog.at_level(logging.INFO, logger="splittune"):
        for _ in range(2):
            step_of(job, two_steps()).whole()
    assert caplog.text.count("mean squared error") == 1


def test_a_loss_function_gets_output_and_targets() -> None:
    """loss_fn is called as loss_fn(output, targets) with the joined output of all replicas."""
    job = task(loss_fn=lambda output, targets: (output - targets).abs().mean())
    loss, _ = job.loss_of(wrapped(job.model), BATCH)
    torch.testing.assert_close(loss, (job.model(BATCH[0]) - BATCH[1]).abs().mean())


def test_a_step_function_replaces_model_call_and_loss() -> None:
    """step_fn gets the wrapper and the batch as the loader nests it; its loss is the loss."""
    seen = []

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append((model, batch))
        return model(batch["x"]).mean()

    batch = {"x": BATCH[0], "unused": BATCH[1]}
    job = TrainingTask(make_model(), [batch], step_fn=step_fn)
    model = wrapped(job.model)
    loss, _ = job.loss_of(model, batch)
    assert seen == [(model, batch)]
    torch.testing.assert_close(loss, job.model(BATCH[0]).mean())


@pytest.mark.parametrize(
    ("loss_fn", "match"),
    [
        (lambda output, targets: output - targets, r"shape \(3, 2\): expected a scalar"),
        (lambda output, targets: output.mean() * float("nan"), "loss of nan: expected a finite number"),
        (lambda output, targets: output.detach().mean(), "without gradient"),
        (lambda output, targets: output.mean().item(), "float: expected a tensor"),
    ],
    ids=["not a scalar", "not finite", "no gradient", "no tensor"],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss_fn: Callable[..., Any], match: str) -> None:
    """A loss that is no finite scalar with a gradient is refused at the first micro-step."""
    with pytest.raises(ConfigError, match=f"^the job gave a.*{match}"):
        step_of(task(loss_fn=loss_fn), two_steps()).micro_step()


def test_what_step_fn_returns_is_checked_by_its_name() -> None:
    """A step_fn that forgets to return its loss is named in the message."""
    with pytest.raises(ConfigError, match="step_fn gave a NoneType"):
        step_of(task(step_fn=lambda model, batch: None), two_steps()).micro_step()


PAST_THE_WRAPPER: dict[str, tuple[Callable[[nn.Module], Callable[..., Tensor]], str]] = {
    "model.module": (lambda bare: lambda model, batch: model.module(batch[0]).mean(), "never called it"),
    "closure": (lambda bare: lambda model, batch: bare(batch[0]).mean(), "never called it"),
    "forward": (lambda bare: lambda model, batch: model.forward(batch[0]).mean(), "never called it"),
    "no_grad": (
        lambda bare: lambda model, batch: (torch.no_grad()(model)(batch[0]) - bare(batch[0])).mean(),
        r"called it under no_grad\(\) only",
    ),
}


@pytest.mark.parametrize("how", PAST_THE_WRAPPER)
def test_a_step_past_the_wrapper_is_refused(how: str) -> None:
    """A step that runs the bare model measures nothing: it is refused with the way on, and no hook stays."""
    make, words = PAST_THE_WRAPPER[how]
    bare = make_model()
    job = task(model=bare, step_fn=make(bare))
    model = wrapped(bare)
    with pytest.raises(
        ConfigError, match=rf"step_fn gave a loss and {words}.*expected model\(\.\.\.\) in it.*forward\(\)"
    ):
        job.loss_of(model, BATCH)
    assert not model._forward_pre_hooks


def test_what_is_evaluated_need_not_be_trained() -> None:
    """Without gradients nothing is said of which model a step calls, and a step may call it more than once."""
    job = task(step_fn=lambda model, batch: model(batch[0]).mean() - model(batch[0]).mean())
    with torch.no_grad():
        assert job.loss_of(wrapped(job.model), BATCH)[0] == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_forward_and_loss_run_under_autocast(dtype: torch.dtype | None) -> None:
    """With an autocast dtype the forward pass computes in it, in every replica; the parameters stay as they are."""
    seen = []

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
        return functional.mse_loss(output, targets)

    job = task(loss_fn=loss_fn, autocast_dtype=dtype)
    step_of(job, two_steps()).whole()
    assert set(seen) == {(dtype or torch.float32, dtype is not None)}
    assert not torch.is_autocast_enabled("cpu")
    assert all(parameter.dtype == torch.float32 for parameter in job.model.parameters())


# the snapshot


class MarginLoss(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return functional.mse_loss(output * self.scale, targets)


@pytest.mark.parametrize("is_method", [False, True], ids=["module", "method"])
def test_a_loss_that_is_a_module_is_part_of_the_snapshot(is_method: bool) -> None:
    """Parameters and buffers of the loss are the job's too, and are put back."""
    model, loss = make_model(), MarginLoss()
    optimizer = optim.AdamW([*model.parameters(), *loss.parameters()])
    job = task(model=model, loss_fn=loss.forward if is_method else loss, optimizer=optimizer)
    before = state_of(model, optimizer), state_of(loss)
    snapshot = job.snapshot()
    step_of(job, two_steps()).whole()
    assert (state_of(model, optimizer), state_of(loss)) != before
    snapshot.restore()
    snapshot.restore_gradients()
    assert (state_of(model, optimizer), state_of(loss)) == before


def test_a_factory_leaves_nothing_to_restore_but_the_model() -> None:
    """With an optimizer that is made for each trial, the snapshot holds the model alone."""
    job = task()
    before = state_of(job.model)
    snapshot = job.snapshot()
    step_of(job, two_steps()).whole()
    snapshot.restore()
    assert state_of(job.model) == before


def test_a_loss_that_uses_a_module_stays_where_that_is() -> None:
    """A function around a module has it on one device: in the replicas it is refused, and the module itself is not."""
    loss = MarginLoss()
    with pytest.raises(ConfigError, match=r"in the replicas: loss_fn uses MarginLoss.*Pass the module itself"):
        task(loss_fn=lambda output, targets: 2 * loss(output, targets)).loss_in_replica(BATCH)
    assert task(loss_fn=loss).loss_in_replica(BATCH) is loss
    plain = nn.MSELoss()  # without tensors it is the same everywhere
    assert task(loss_fn=plain.forward).loss_in_replica(BATCH) == plain.forward
