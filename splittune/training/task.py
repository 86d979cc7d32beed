"""TrainingTask: the user's job, one optimizer step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from splittune.checks import as_int
from splittune.errors import ConfigError, add_note
from splittune.hardware import Hardware
from splittune.parallel.base import SplitModule
from splittune.training.call import Forward, ModelCall, call_for
from splittune.training.loss import infer_loss
from splittune.training.reach import Reached, reach
from splittune.training.snapshot import Snapshot

logger = logging.getLogger(__name__)

OptimizerLike = optim.Optimizer | Callable[[Any], optim.Optimizer]
StepFunction = Callable[[nn.Module, Any], Tensor]
_WRAPPERS = (SplitModule, nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass(slots=True)
class TrainingTask:
    """What is to be trained: everything a trial needs to run one of the job's optimizer steps.

    Raises:
        ConfigError: the model is none, is wrapped already, has no trainable parameter or an uninitialised one, the
            optimizer does not hold its parameters, none is given for sparse gradients, both `loss_fn` and
            `step_fn` are given, or an option is of the wrong kind.
    """

    model: nn.Module
    loader: Iterable[Any]
    """Gives batches; can be iterated over again. Only iterated, never changed."""
    loss_fn: Callable[..., Tensor] | None = None
    """``loss_fn(output, targets)``, a mean over samples; None to infer it (`loss.infer_loss`)."""
    optimizer: OptimizerLike | None = None
    """An instance, or a callable from parameters to one; None for AdamW."""
    step_fn: StepFunction | None = None
    """``step_fn(model, batch) -> loss`` in place of calling the model and `loss_fn`; the model it
    gets is the wrapper."""
    autocast_dtype: torch.dtype | None = None
    """The dtype of torch.autocast around forward and loss; None for none."""
    global_batch_size: int | None = None
    """Samples behind one optimizer step; None for the loader's batch size."""
    grad_scaler: torch.amp.GradScaler | None = None
    """Scales the loss, and takes the optimizer's steps, as ``scaler.scale(loss).backward();
    scaler.step(optimizer)`` does."""
    other_state: Sequence[object] = ()
    """What else training changes or needs, ``(discriminator, its_optimizer, ema)``: modules,
    optimizers, schedulers, scalers, any object with attributes. What `loss_fn` and `step_fn` close
    over, are bound to or name is found without."""
    _said: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _forward: Forward | None = field(default=None, init=False, repr=False, compare=False)
    _reached: Reached | None = field(default=None, init=False, repr=False, compare=False)
    """What `place_others` has found, since the latest snapshot."""
    _loss_parameter: str | None = field(default=None, init=False, repr=False, compare=False)
    """Under what name the model is given the targets, once it is known that it computes the loss from them."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"model is {self.model!r}: expected a torch.nn.Module.")
        self._check_wrapping()
        parameters = list(self.model.parameters())
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise ConfigError("the model has uninitialised (lazy) parameters: run one forward pass before tuning.")
        if any(parameter.is_meta for parameter in parameters):
            raise ConfigError("the model has parameters on the meta device, without values: materialise them first.")
        if not any(parameter.requires_grad for parameter in parameters):
            raise ConfigError(
                f"{type(self.model).__name__} has no trainable parameter ({len(parameters)} in all, none with "
                "requires_grad): expected at least one. There is nothing to train, so nothing to tune."
            )
        self._check_places()
        if self.loss_fn is not None and self.step_fn is not None:
            raise ConfigError("got loss_fn and step_fn: expected one of them. step_fn returns the loss itself.")
        self._check_options()
        self._check_optimizer()

    def snapshot(self, *, at_once: bool = True) -> Snapshot:
        """The job as it is now, with what its functions reach and what `other_state` names: see `Snapshot`."""
        optimizer = self.optimizer if isinstance(self.optimizer, optim.Optimizer) else None
        factory = None if optimizer is not None else self.optimizer
        self._reached = None
        functions = (self.loss_fn, self.step_fn, factory, self.grad_scaler)
        return Snapshot(self.model, optimizer, self.loader, others=functions, told=self.other_state, at_once=at_once)

    def place_others(self, hardware: Hardware) -> None:
        """Have `hardware` account for the job's further models and optimizers as it does for the model's.

        Those are what `loss_fn`, `step_fn` and `other_state` reach: a discriminator, a teacher. On
        real devices they are where the user put them; on virtual ones they are taken to live on GPU
        0, with the outputs, which is said.
        """
        if self._reached is None:
            self._reached = reach((self.loss_fn, self.step_fn, *self.other_state))
        own = set(self.model.modules())
        others = [module for module in self._reached.modules if module not in own]
        with_tensors = [module for module in others if _has_own_tensors(module)]
        for module in with_tensors:
            hardware.adopt(module)
        for optimizer in self._reached.optimizers:
            if optimizer is not self.optimizer:
                hardware.prepare_optimizer(optimizer)
        if with_tensors and hardware.is_modelled:
            inner = {child for module in others for child in module.children()}
            names = ", ".join(sorted({type(module).__name__ for module in others if module not in inner}))
            self._say_once(f"what the step uses beside the model ({names}) is taken to live on virtual GPU 0.")

    def make_optimizer(self) -> optim.Optimizer:
        """The user's own instance, or a new one from the factory (AdamW by default) over the trainable parameters."""
        if isinstance(self.optimizer, optim.Optimizer):
            return _with_plain_step(self.optimizer)
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self.optimizer is None:
            self._say_once("no optimizer was given: AdamW is assumed. Its state is twice the parameters' size.")
            return optim.AdamW(trainable)
        try:
            made = self.optimizer(trainable)
        except Exception as error:
            add_note(error, "splittune: the job's optimizer callable raised this, given the trainable parameters.")
            raise
        if not isinstance(made, optim.Optimizer):
            raise ConfigError(
                f"the optimizer callable returned a {type(made).__name__}: expected a torch.optim.Optimizer. "
                "Pass a function of the parameters, e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
            )
        return _with_plain_step(made)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as it is run backward: times the gradient scaler's scale, where the task has one."""
        if self.grad_scaler is None:
            if self.autocast_dtype is torch.float16:
                self._say_once(
                    "autocast_dtype is torch.float16 and no grad_scaler was given: small gradients become 0, and what "
                    "a scaler costs is not measured. Give grad_scaler=torch.amp.GradScaler()."
                )
            return loss
        if not self.grad_scaler.is_enabled():
            self._say_once("grad_scaler is disabled, as torch does where its device is not there: nothing is scaled.")
        scaled: Tensor = self.grad_scaler.scale(loss)
        return scaled

    def update(self, optimizer: optim.Optimizer) -> None:
        """One step of the optimizer, through the gradient scaler where the task has one, which may skip it."""
        if self.grad_scaler is None:
            optimizer.step()
        else:
            self.grad_scaler.step(optimizer)
            self.grad_scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def loss_of(self, model: SplitModule, batch: Any) -> tuple[Tensor, Any]:
        """The loss of one micro-batch, under the task's autocast, and what a loop has in its variables besides.

        Raises:
            ConfigError: `step_fn` computed it past `model`, so that no device but one had any part in it.
        """
        with self._autocast(model):
            if self.step_fn is not None:
                return _loss_through(model, self.step_fn, batch), None
            found = self._usual_loss(model, batch)
            if found is None:  # it has just turned out that the model wants the targets
                found = self._usual_loss(model, batch)
            assert found is not None, "that turns out once"
            return found

    def _usual_loss(self, model: SplitModule, batch: Any) -> tuple[Tensor, Any] | None:
        """What `loss_of` gives for a job without `step_fn`; None if the model turns out to want the targets."""
        call = self._call_for(batch)
        if model.computes_loss:
            return model(*call.args, call.targets, **call.kwargs), None
        output = model(*call.args, **call.kwargs)
        targets = model.to_output(call.targets)
        if self.loss_fn is not None:
            return self.loss_fn(output, targets), (output, targets)
        try:
            loss, origin = infer_loss(output, targets)
        except ConfigError:
            if self._can_give_targets(call):
                return None
            raise
        self._say_once(f"no loss_fn was given: the loss is {origin}.")
        return loss, (output, targets)

    def _call_for(self, batch: Any) -> ModelCall:
        """The batch as the model takes it; what was inferred is said."""
        if self._forward is None:
            self._forward = Forward(self.model)
        call = call_for(batch, has_loss_fn=self.loss_fn is not None, forward=self._forward)
        for said in call.said:
            self._say_once(f"{said}.")
        return call if self._loss_parameter is None else call.with_targets_as(self._loss_parameter)

    def _can_give_targets(self, call: ModelCall) -> bool:
        """Whether the model may compute the loss itself, given the targets; from now on it is given them."""
        name = None if self._forward is None or call.targets is None else self._forward.loss_parameter()
        if name is None or name in call.kwargs or self._loss_parameter is not None:
            return False
        self._loss_parameter = name
        self._say_once(f"no loss_fn was given: {self._forward} is given the targets as {name}=, and computes the loss.")
        return True

    def loss_in_replica(self, batch: Any) -> Callable[[Any, Any], Tensor]:
        """The job's loss as each replica can compute it from its own output and targets.

        Raises:
            ConfigError: the loss is not computed from an output and targets, so there is nothing to move.
        """
        targets = None if self.step_fn is not None else self._call_for(batch).targets
        if self.step_fn is not None or not isinstance(targets, Tensor):
            what = "step_fn computes the loss" if self.step_fn is not None else "batches hold no targets"
            raise ConfigError(
                f"the loss cannot be placed in the replicas: {what}. Expected batches (inputs, targets), with loss_fn "
                'or one to be inferred. Use loss_placement="output"; a model that returns its own loss computes it '
                "there already."
            )
        if self.loss_fn is not None and not isinstance(self.loss_fn, nn.Module):
            own = set(self.model.modules())
            found = (each for each in reach([self.loss_fn]).modules if each not in own and _has_own_tensors(each))
            used = {type(module).__name__ for module in found}
            if used:
                raise ConfigError(
                    f"the loss cannot be placed in the replicas: loss_fn uses {', '.join(sorted(used))}, which lives "
                    "on one device. Expected a function without tensors of its own, or a loss that is an nn.Module, "
                    'which is copied to every device. Pass the module itself, or use loss_placement="output".'
                )
        return self.loss_fn or (lambda output, targets: infer_loss(output, targets)[0])

    def _autocast(self, model: SplitModule) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(model.devices[0].type, dtype=self.autocast_dtype)

    def _check_wrapping(self) -> None:
        """A replica is made of the module as the user wrote it."""
        if isinstance(self.model, _WRAPPERS):
            raise ConfigError(
                f"model is wrapped in {type(self.model).__name__}: expected the module itself, which the tuner wraps "
                "for every split it tries. Pass model.module."
            )
        if isinstance(getattr(self.model, "_orig_mod", None), _WRAPPERS):  # what torch.compile returns holds it there
            raise ConfigError(
                "model is a compiled wrapper: expected the module itself, compiled or not, which the tuner wraps for "
                "every split it tries. Pass torch.compile(model.module)."
            )
        if isinstance(self.model, torch.jit.ScriptModule):
            raise ConfigError(
                f"model is a TorchScript module, {type(self.model).__name__}, which cannot be replicated: expected the "
                "nn.Module it was scripted from. Pass that."
            )

    def _check_places(self) -> None:
        first: dict[torch.device, str] = {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            first.setdefault(tensor.device, name)
        if len(first) > 1:
            listed = " and ".join(f"{name} on {device}" for device, name in first.items())
            raise ConfigError(
                f"the model lives on {len(first)} devices, {listed}: expected one, for every device gets a copy of all "
                f"of it. Move it there, model.to({str(next(iter(first)))!r}); a model that is too large for one device "
                "cannot be tuned."
            )

    def _check_options(self) -> None:
        for name in ("loss_fn", "step_fn"):
            function: object = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(f"{name} is {function!r}: expected a function, such as torch.nn.functional.mse_loss.")
        size: object = self.global_batch_size
        number = as_int(size)
        if size is not None and (number is None or number < 1):
            raise ConfigError(
                f"global_batch_size is {size!r}: expected an integer of at least 1, the samples behind one optimizer "
                "step. Leave it out for the loader's batch size."
            )
        self.global_batch_size = number
        self._check_grad_scaler()
        self._check_other_state()
        dtype: object = self.autocast_dtype
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError(f"autocast_dtype is {dtype!r}: expected a torch.dtype, such as torch.bfloat16.")

    def _check_grad_scaler(self) -> None:
        scaler: object = self.grad_scaler
        if scaler is None:
            return
        if not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigError(f"grad_scaler is {scaler!r}: expected a torch.amp.GradScaler.")
        scale = scaler.get_scale()
        if not 0 < scale < float("inf"):
            raise ConfigError(
                f"grad_scaler has a scale of {scale}: expected a finite number above 0, such as 65536.0. Gradients "
                "times it say nothing, and every step would be skipped. Make a new torch.amp.GradScaler(), or load "
                "another state."
            )

    def _check_other_state(self) -> None:
        given: object = self.other_state
        if isinstance(given, nn.Module) or not isinstance(given, list | tuple):
            raise ConfigError(
                f"other_state is a {type(given).__name__}: expected a tuple of objects, such as "
                "(discriminator, optimizer_d)."
            )
        for index, thing in enumerate(given):
            if not (isinstance(thing, Tensor | dict | list | tuple | torch.Generator) or hasattr(thing, "__dict__")):
                raise ConfigError(
                    f"other_state[{index}] is {thing!r}, which has nothing to put back: expected a module, an "
                    "optimizer or another object whose state training changes. Leave it out."
                )

    def _check_optimizer(self) -> None:
        if self.optimizer is None:
            self._check_adamw_will_do()
            return
        if not isinstance(self.optimizer, optim.Optimizer):
            if not callable(self.optimizer):
                raise ConfigError(
                    f"optimizer is {self.optimizer!r}: expected a torch.optim.Optimizer or a callable that makes one."
                )
            return
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if not any(id(p) in held for p in self.model.parameters() if p.requires_grad):
            raise ConfigError(
                "the optimizer holds none of the model's trainable parameters: expected one made from "
                "model.parameters(). Was the model copied or wrapped after the optimizer was made?"
            )

    def _check_adamw_will_do(self) -> None:
        for name, module in self.model.named_modules():
            is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            if is_embedding and module.sparse and module.weight.requires_grad:
                raise ConfigError(
                    f"no optimizer was given, and AdamW, which is then assumed, takes no sparse gradients, as those of "
                    f"{name or 'the model'!r} are (sparse=True): expected an optimizer that does. Give the job's own, "
                    "such as optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
                )

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.info(message)


def _has_own_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _loss_through(model: nn.Module, step_fn: StepFunction, batch: Any) -> Tensor:
    """What `step_fn` returns, if it called `model` for it, with gradients where they are recorded.

    Raises:
        ConfigError: it gave a loss and did not.
    """
    called: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *_: called.append(torch.is_grad_enabled()))
    try:
        returned: Any = step_fn(model, batch)  # whatever it promised
    finally:
        hook.remove()
    if isinstance(returned, Tensor) and torch.is_grad_enabled() and not any(called):
        how = "called it under no_grad() only" if called else "never called it"
        raise ConfigError(
            f"step_fn gave a loss and {how}, the model it was given: expected model(...) in it, for that is what "
            "spreads the batch over the devices. model.module, model.forward() and a model from outside step_fn run on "
            "one device, and nothing is measured. Call the model itself; where the step is a method of your module, "
            "such as training_step, tune a module whose forward() is that method."
        )
    loss: Tensor = returned
    return loss


def _with_plain_step(optimizer: optim.Optimizer) -> optim.Optimizer:
    """`optimizer`, unless its step asks for the loss again."""
    if isinstance(optimizer, optim.LBFGS):
        raise ConfigError(
            "the optimizer is LBFGS, which evaluates the loss as often as it likes within one step: expected one whose "
            "step() needs no closure, such as AdamW or SGD. Tune with one of those."
        )
    return optimizer
