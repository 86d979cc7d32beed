"""Jobs of several models and of mixed precision, as people write them, each with all that training changes in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.training.state import bits, frozen, optimizer_state, state_of

BATCH_SIZE = 8


class Trap:
    """Raises at one of the steps, once all that the step changes has been changed."""

    def __init__(self) -> None:
        self.calls_left, self.error = 0, RuntimeError("unset")

    def set(self, calls: int, error: BaseException) -> None:
        self.calls_left, self.error = calls, error  # type: ignore[assignment]

    def pass_by(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise self.error


@dataclass(kw_only=True)
class Workload:
    """A job, and what must be as it was found."""

    model: nn.Module
    loader: list[Any]
    options: dict[str, Any]
    """Of `TrainingTask` and `autotune`."""
    trap: Trap
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[optim.Optimizer] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    """Schedulers, scalers and the like, by their attributes; tensors by their bits."""
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    """Of a training loop, where the task has no step_fn."""

    def fingerprint(self) -> Any:
        modules = [state_of(module) for module in (self.model, *self.modules)]
        optimizers = [optimizer_state(optimizer) for optimizer in self.optimizers]
        return modules, optimizers, [_frozen_object(other) for other in self.others]

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        loss_of = self.options.get("step_fn") or self.loss
        assert loss_of is not None
        return loss_of(model, batch)  # type: ignore[no-any-return]


def _frozen_object(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return id(thing), bits(thing)
    if isinstance(thing, torch.Generator):
        return bits(thing.get_state())
    return frozen(thing if isinstance(thing, dict | list) else vars(thing))


def images() -> Tensor:
    return torch.randn(BATCH_SIZE, 1, 6, 6)


def discriminator(channels: int = 1) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Flatten(), nn.Linear(64, 1))
    net[1].eval()
    return net


def in_training(optimizer: optim.Optimizer, net: nn.Module, x: Tensor) -> None:
    """A step behind it, and gradients that wait for the next."""
    for _ in range(2):
        net(x).square().mean().backward()
        if not optimizer.state:
            optimizer.step()
            optimizer.zero_grad()


def gan() -> Workload:
    """Two models and two optimizers in a closure, noise from a generator of its own."""
    trap, noise = Trap(), torch.Generator().manual_seed(5)
    generator = nn.Sequential(nn.Linear(4, 36), nn.Tanh(), nn.Unflatten(1, (1, 6, 6)))
    critic = discriminator()
    optimizer_g, optimizer_d = optim.Adam(generator.parameters(), 1e-2), optim.Adam(critic.parameters(), 1e-2)
    in_training(optimizer_d, critic, images())
    in_training(optimizer_g, generator, torch.randn(3, 4))

    def step(model: nn.Module, batch: Any) -> Tensor:
        real = batch
        fake = model(torch.randn(len(real), 4, generator=noise))
        optimizer_d.zero_grad()
        loss = functional.softplus(-critic(real)).mean() + functional.softplus(critic(fake.detach())).mean()
        loss.backward()
        optimizer_d.step()
        trap.pass_by()
        return functional.softplus(-critic(fake)).mean()

    return Workload(
        model=generator,
        loader=[images()],
        options={"step_fn": step, "optimizer": optimizer_g},
        trap=trap,
        modules=[critic],
        optimizers=[optimizer_g, optimizer_d],
        others=[noise],
    )


class SegmentationTrainer:
    """A segmenter against a discriminator, with a schedule, a scaler, an average of the weights and one of the loss."""

    def __init__(self, trap: Trap) -> None:
        self.trap = trap
        self.segmenter = nn.Conv2d(1, 2, 3, padding=1)
        self.nets = {"critic": discriminator(2)}
        self.optimizer = optim.SGD(self.nets["critic"].parameters(), lr=0.1, momentum=0.9)
        in_training(self.optimizer, self.nets["critic"], torch.randn(BATCH_SIZE, 2, 6, 6))
        self.schedule = optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.average = optim.swa_utils.AveragedModel(self.segmenter)
        self.mean_loss = torch.zeros(())
        self.shadow = {name: value.clone() for name, value in self.segmenter.state_dict().items()}

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        probabilities = model(x).softmax(1)
        truth, critic = functional.one_hot(y, 2).permute(0, 3, 1, 2).float(), self.nets["critic"]
        self.optimizer.zero_grad()
        loss = functional.softplus(-critic(truth)).mean() + functional.softplus(critic(probabilities.detach())).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.segmenter)
        with torch.no_grad():
            self.mean_loss = 0.9 * self.mean_loss + 0.1 * loss.detach()  # a new tensor under the old name
            for name, value in self.segmenter.state_dict().items():
                self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value
        self.trap.pass_by()
        return functional.nll_loss(probabilities.log(), y) + 0.1 * functional.softplus(-critic(probabilities)).mean()


def segmenter() -> Workload:
    """A bound method; its object holds a dict of nets, a scheduler, a scaler and averages."""
    trap = Trap()
    trainer = SegmentationTrainer(trap)
    return Workload(
        model=trainer.segmenter,
        loader=[(images(), torch.randint(2, (BATCH_SIZE, 6, 6)))],
        options={"step_fn": trainer.step, "optimizer": partial(optim.SGD, lr=0.1)},
        trap=trap,
        modules=[trainer.nets["critic"], trainer.average],
        optimizers=[trainer.optimizer],
        others=[trainer.schedule, trainer.scaler, trainer.mean_loss, trainer.shadow, trainer.__dict__],
    )


def distil(teacher: nn.Module, centre: list[Tensor], trap: Trap, model: nn.Module, batch: Any) -> Tensor:
    x, _ = batch
    with torch.no_grad():
        wanted = teacher(x) - centre[0]
        centre[0].mul_(0.9).add_(0.1 * wanted.mean(0))
        for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.mul_(0.99).add_(0.01 * theirs)
    trap.pass_by()
    return functional.mse_loss(model(x), wanted)


def teacher() -> Workload:
    """Self-distillation: a partial's arguments are the teacher, which follows the student, and a running centre."""
    trap, centre = Trap(), [torch.zeros(3)]
    student, tutor = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2))
    tutor.requires_grad_(False).eval()
    return Workload(
        model=student,
        loader=[(torch.randn(BATCH_SIZE, 6), torch.zeros(BATCH_SIZE))],
        options={"step_fn": partial(distil, tutor, centre, trap), "optimizer": partial(optim.SGD, lr=0.1)},
        trap=trap,
        modules=[tutor],
        others=[centre[0]],
    )


class Classifier(nn.Module):
    """Two blocks, whose activations are kept or made again."""

    def __init__(self, *, checkpointed: bool = False, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)
        )
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def _classifier(*, checkpointed: bool = False, **options: Any) -> Workload:
    trap, model = Trap(), Classifier(checkpointed=checkpointed)
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    in_training(optimizer, model, torch.randn(BATCH_SIZE, 16))

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        trap.pass_by()
        return functional.cross_entropy(output, targets)

    return Workload(
        model=model,
        loader=[(torch.randn(BATCH_SIZE, 16), torch.randint(16, (BATCH_SIZE,)))],
        options={"loss_fn": loss_fn, "optimizer": optimizer, **options},
        trap=trap,
        optimizers=[optimizer],
        others=[options["grad_scaler"]] if "grad_scaler" in options else [],
        loss=lambda model, batch: loss_fn(model(batch[0]), batch[1]),
    )


def float16() -> Workload:
    """float16 with a scaler whose first scale is too large, so that steps are skipped."""
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    return _classifier(autocast_dtype=torch.float16, grad_scaler=grad_scaler)


def float16_in_mid_training() -> Workload:
    """A scaler that has been used: its scale is a tensor already."""
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    grad_scaler.scale(torch.ones(()))
    return _classifier(autocast_dtype=torch.float16, grad_scaler=grad_scaler)


def bfloat16() -> Workload:
    """bfloat16 needs no scaler."""
    return _classifier(autocast_dtype=torch.bfloat16)


def checkpointed() -> Workload:
    """Activations are made again in the backward pass."""
    return _classifier(checkpointed=True)


class Ema:
    """An average that nothing but `other_state` tells of, without a state_dict()."""

    def __init__(self, model: nn.Module) -> None:
        self.num_updates, self.values = 0, [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        self.num_updates += 1
        self.values = [0.9 * old + 0.1 * new.detach() for old, new in zip(self.values, model.parameters(), strict=True)]


def told() -> Workload:
    """State that a registry of an installed package might hold, so that nothing leads to it but
    what the task is told."""
    workload = _classifier()
    ema, key = Ema(workload.model), len(_Lookup.held)
    lookup = _Lookup(key)
    _Lookup.held[key] = ema
    trap, model = workload.trap, workload.model

    def step(wrapped: nn.Module, batch: Any) -> Tensor:
        lookup.update(model)
        trap.pass_by()
        return functional.cross_entropy(wrapped(batch[0]), batch[1])

    optimizer = workload.options["optimizer"]
    workload.options = {"step_fn": step, "optimizer": optimizer, "other_state": (ema,)}
    workload.others = [ema]
    return workload


class _Lookup(str):
    """A string, by which nothing is reached."""

    __slots__ = ()
    held: dict[int, Any] = {}  # noqa: RUF012

    def __new__(cls, key: int) -> _Lookup:
        return super().__new__(cls, str(key))

    def update(self, model: nn.Module) -> None:
        self.held[int(self)].update(model)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gan": gan,
    "segmenter": segmenter,
    "teacher": teacher,
    "float16": float16,
    "float16 in mid-training": float16_in_mid_training,
    "bfloat16": bfloat16,
    "checkpointed": checkpointed,
    "told": told,
}


def make(name: str) -> Workload:
    """The same job each time."""
    torch.manual_seed(0)
    return WORKLOADS[name]()
