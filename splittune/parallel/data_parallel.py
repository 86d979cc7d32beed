"""BalancedDataParallel: nn.DataParallel with a share of the batch for every device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch import nn

from splittune.cards import is_card
from splittune.errors import ConfigError
from splittune.parallel.base import SplitModule
from splittune.parallel.caches import is_cache
from splittune.parallel.compiled import refuse_unknown
from splittune.parallel.devices import DeviceLike, as_device, resolve_devices
from splittune.parallel.link import Link, TorchLink
from splittune.parallel.modules import modules_of
from splittune.parallel.nesting import leaves_of, map_tensors, tensors_of
from splittune.parallel.outputs import Joiner, all_tensors_of
from splittune.parallel.replica_loss import LossFunction, ReplicaLoss, WeightFunction
from splittune.parallel.replica_norms import refuse_unsynchronisable, seat_replicas
from splittune.parallel.replicas import (
    ReplicaCall,
    ReplicaGauge,
    keep_buffer_updates,
    min_shard_size_of,
    replicate,
    run_replicas,
)
from splittune.parallel.samples import Samples, read_samples, slice_arguments
from splittune.parallel.threads import ReplicaThreads
from splittune.parallel.transfer import send
from splittune.parallel.window.engine import Replicas, WindowEngine
from splittune.split.shards import checked_shares, shards_for

Engine = Literal["window", "torch"]


# mypy is told to let `output_device` be a torch.device, where nn.DataParallel has its number: whoever
# moves tensors there takes either.
class BalancedDataParallel(SplitModule, nn.DataParallel[nn.Module]):  # type: ignore[misc]
    """Runs `module` on several devices at once, each with its own share of the micro-batch.

    Give GPU 0's share, ``BalancedDataParallel(4, model)``, and the others share the rest as evenly
    as integers allow; or every device's,
    ``BalancedDataParallel(module=model, shard_sizes=(4, 20, 20, 20))``. Every sample goes to
    exactly one device, in order, and outputs come back in order, on `output_device`. Gradients
    arrive in the module's own parameters and are those of the whole micro-batch on one device.
    Unless `sync_batch_norm` is given, BatchNorm is aside: each replica normalises by its own shard,
    and running statistics are those of the first device that had samples.

    Shares are honoured or refused, never changed in silence:

    - a smaller micro-batch trains a module with BatchNorm on fewer devices rather than on a single
      sample anywhere;
    - with `shard_sizes`, a smaller micro-batch shrinks every shard in proportion
      (`split.fit_shards`), a larger one is refused, save for up to `eval_batch_size` samples under
      ``no_grad()``, which grow every shard in proportion;
    - with `gpu0_bsz`, GPU 0 takes exactly that of the largest micro-batch trained on so far, and a
      smaller one shrinks the shares in proportion. A first training micro-batch smaller than
      `gpu0_bsz` is refused; under ``eval()`` or ``no_grad()`` it is shared evenly instead, GPU 0
      getting less than its share.

    Args:
        gpu0_bsz: samples for the first device, 0 or more; None when `shard_sizes` is given.
        module: its parameters must be on the first device when it is called.
        device_ids: numbers of cards, or devices; the first is 'GPU 0'. None for all cards, or for
            the module's own device where there is none. A device may be named twice.
        output_device: where outputs are joined; None for the first device.
        dim: the dimension of inputs and outputs that counts samples.
        shard_sizes: samples for each device, for the largest micro-batch.
        loss_fn: computes the loss in each replica, on its own device: call
            ``model(inputs, targets)``, ``model(targets, **inputs)`` or ``model(**batch)``, and get
            the loss of the whole micro-batch. No output is gathered; see `ReplicaLoss.arranged`.
        weight_fn: ``weight_fn(targets)``, what the loss is a mean over where that is not samples:
            the number of tokens.
        engine: "window" copies parameters out, and adds gradients up, once for each window of
            accumulated micro-batches (`WindowEngine`); "torch" does both at every micro-batch, as
            nn.DataParallel does.
        link: how tensors travel; None for torch's own devices.
        eval_batch_size: with `shard_sizes`, samples that are taken at once where no gradients are
            recorded.
        sync_batch_norm: BatchNorm normalises by the whole micro-batch, as on one device; not in a
            checkpoint, nor compiled, nor twice differentiable. See `replica_norms`.

    Of arguments that are no tensors, a list or tuple with one string, number or None for each
    sample is split as tensors are, save for a tuple of numbers, a size say; so are lists of one
    tensor or dict a sample, as `read_samples` tells them. ``num_items_in_batch``, a count, becomes
    each replica's part of it. Everything else reaches every replica as it is.

    A 0-dim output is a mean over samples and is averaged weighted by shard size; see
    `outputs.Joiner`, also for what is refused. A key-value cache is left out where gradients are
    recorded, unless the call was given one. Limits are nn.DataParallel's: replicas are shallow
    copies, so Python attributes that forward assigns are lost, and in-place updates of parameters
    inside forward are too, and of the calling thread's contexts replicas on cards see grad mode,
    inference mode and autocast alone: not `torch.autograd.graph.save_on_cpu`, not
    `torch.set_default_device`, no context variables. Enter those inside forward. On a single device
    the module itself runs.

    A compiled module, whether by ``torch.compile(model)``, by compiled children or by
    ``model.compile()``, is replicated from its originals and runs compiled on every device. Compile
    the model, or call ``wrapped.compile()``, rather than compile around the wrapper.

    It is an nn.DataParallel by type, for code that asks before it saves or unwraps: `module`,
    `device_ids`, `dim`, `output_device` and the keys of its state are there. Of that class it runs
    nothing: `scatter`, `replicate`, `parallel_apply` and `gather` are refused, called or
    overridden.
    """

    def __init__(
        self,
        gpu0_bsz: int | None = None,
        module: nn.Module | None = None,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        shard_sizes: Sequence[int] | None = None,
        loss_fn: LossFunction | None = None,
        weight_fn: WeightFunction | None = None,
        engine: Engine = "window",
        link: Link | None = None,
        eval_batch_size: int | None = None,
        sync_batch_norm: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # nn.DataParallel's own would look for CUDA devices, and move the module
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module is {module!r}: expected an nn.Module. "
                "The order is BalancedDataParallel(gpu0_bsz, module), or name it: module=..., shard_sizes=..."
            )
        self.module = module
        self.dim = dim
        self.devices = resolve_devices(device_ids, module)
        self.device_ids: list[Any] = [device.index if is_card(device) else device for device in self.devices]
        self.src_device_obj = self.devices[0]
        self.output_device = self.devices[0] if output_device is None else as_device(output_device)
        self.gpu0_bsz, self.shard_sizes = checked_shares(gpu0_bsz, shard_sizes, len(self.devices))
        if len(self.devices) > 1:
            refuse_unknown(modules_of(module))
        if engine not in get_args(Engine):
            raise ConfigError(f"engine is {engine!r}: expected one of {get_args(Engine)}.")
        if weight_fn is not None and loss_fn is None:
            raise ConfigError("weight_fn is given without loss_fn: it says how the replicas' losses are averaged.")
        if sync_batch_norm:
            refuse_unsynchronisable(module, engine)
        self.engine, self.sync_batch_norm = engine, sync_batch_norm
        self.eval_batch_size = eval_batch_size
        # held by a plain object: a loss that is a module must not appear in the wrapper's
        # state_dict
        self._loss = None if loss_fn is None else ReplicaLoss(loss_fn, weight_fn)
        self._link = link
        self.gauge: ReplicaGauge | None = None  # hardware that measures sets its own
        self._largest_trained = 0
        self.lists_samples: bool | None = None  # whether batches hold lists of samples, once one has told
        self._window: WindowEngine | None = None
        self._syncs = True
        self._threads = ReplicaThreads()
        self._turn = threading.RLock()
        if link is not None:
            link.adopt(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._take_turn()
        try:
            return self._forward(inputs, kwargs)
        finally:
            self._turn.release()

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        link, output_place = self._route()
        call = _Call(inputs, kwargs) if self._loss is None else _Call(*self._loss.arranged(inputs, kwargs))
        samples = self._samples_of(call)
        shards = self._shards_of(samples.size)
        active = [position for position, shard in enumerate(shards) if shard] or [0]
        replicas = self._copy_out(active, link)
        gradients = None if replicas is None else replicas.gradients
        calls = self._calls(call, self._modules_on(active, link, replicas), shards, samples, link)
        del replicas
        weights = [each.weight for each in calls]
        # on one device the user's own module runs, and needs nobody
        meeting = seat_replicas(calls, link) if self.sync_batch_norm and len(self.devices) > 1 else None
        outputs = run_replicas(calls, link, self._threads if len(self.devices) > 1 else None, self.gauge, meeting)
        if calls[0].module is not self.module:
            keep_buffer_updates(self.module, calls[0].module, link)
        if self._trains():
            self._largest_trained = max(self._largest_trained, samples.size)
        del calls  # without gradients nothing else holds the replicas and their inputs
        joiner = Joiner(
            shards=[shards[position] for position in active],
            weights=weights,
            link=link,
            place=output_place,
            dim=self.dim,
            are_listed=samples.are_listed,
            keeps_caches=not torch.is_grad_enabled() or any(is_cache(leaf) for _, leaf in leaves_of(call)),
        )
        output = joiner.join(outputs)
        if self._window is not None and gradients is not None:
            self._window.watch(all_tensors_of(output), gradients)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside leave their gradients with the replicas; the next brings all home.

        As in DistributedDataParallel: run the last micro-batch of an optimizer step outside.
        `accumulate` and ``SplitConfig.micro_batches(batch, model)`` do it for you.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @property
    def computes_loss(self) -> bool:
        """Whether calling it gives the loss: it was made with a `loss_fn`."""
        return self._loss is not None

    def weight_of(self, batch: Any, num_samples: int) -> float:
        """How much a batch of the loader counts: its samples, or what `weight_fn` says of it."""
        return float(num_samples) if self._loss is None else self._loss.weight_of_batch(batch, num_samples)

    def to_output(self, tree: Any) -> Any:
        """`tree` with every tensor on the output device, where the outputs are: for targets."""
        link, place = self._route()
        return map_tensors(lambda tensor: send(tensor, link, place), tree)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As nn.Module's, in place: compiles the wrapped module, and with it every replica."""
        self.module.compile(*args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"scatter() was called: {_UNUSED}")

    def replicate(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"replicate() was called: {_UNUSED}")

    def parallel_apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"parallel_apply() was called: {_UNUSED}")

    def gather(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"gather() was called: {_UNUSED}")

    def extra_repr(self) -> str:
        shares = f"gpu0_bsz={self.gpu0_bsz}" if self.shard_sizes is None else f"shard_sizes={self.shard_sizes}"
        return f"{shares}, devices={[self._name_of(position) for position in range(len(self.devices))]}"

    def _samples_of(self, call: _Call) -> Samples:
        if not tensors_of(call):
            return Samples(0, are_listed=False)  # with nothing to split there is one call, on the first device
        expected = (sum(self.shard_sizes) if self.shard_sizes else self._largest_trained) or None
        samples = read_samples(call, self.dim, expected=expected, listed=self.lists_samples, is_call=True)
        if samples.is_certain:
            self.lists_samples = samples.are_listed
        return samples

    def _shards_of(self, batch_size: int) -> tuple[int, ...]:
        """Samples for each device, as things stand."""
        return shards_for(
            batch_size,
            num_devices=len(self.devices),
            gpu0_bsz=self.gpu0_bsz,
            shard_sizes=self.shard_sizes,
            largest_trained=self._largest_trained,
            eval_batch_size=self.eval_batch_size,
            trains=self._trains(),
            records=torch.is_grad_enabled(),
            min_shard_size=1 if self.sync_batch_norm else min_shard_size_of(self.module),
        )

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _take_turn(self) -> None:
        """Callers take turns: the threads and the window are one."""
        if self._threads.is_inside:
            raise RuntimeError(
                "the wrapper was called by one of its own replicas: expected the module's own parts in there. Call "
                "self, not the wrapper around it."
            )
        if not self._turn.acquire(blocking=not torch.is_grad_enabled()):
            raise RuntimeError(
                "the wrapper was called from two threads at once, with gradients recorded: expected one at a time, for "
                "both would add to the same gradients. Give each thread a wrapper and a module of its own; under "
                "torch.no_grad() callers wait for one another."
            )

    def _route(self) -> tuple[Link, Any]:
        """The link for this call, and the place of the output device."""
        if self._link is not None:
            return self._link, self._link.place(0)
        devices, home = self.devices, self.devices[0]
        for module in modules_of(self.module):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.device != home:
                    named = (*self.module.named_parameters(), *self.module.named_buffers())
                    name = next(name for name, each in named if each is tensor)
                    raise ConfigError(
                        f"{name} of the module is on {tensor.device}: expected {home}, the first of {list(devices)}. "
                        f"Move the module there first: module.to('{home}')."
                    )
        return TorchLink([*devices, self.output_device]), self.output_device

    def _calls(
        self, call: _Call, modules: Mapping[int, nn.Module], shards: Sequence[int], samples: Samples, link: Link
    ) -> list[ReplicaCall]:
        """Each active device's module, and its part of the arguments."""
        losses = {} if self._loss is None else self._loss.on(list(modules), link)
        calls = []
        for position, module in modules.items():
            start, size, place = sum(shards[:position]), shards[position], link.place(position)
            cut = slice_arguments(*call, start, start + size, self.dim, samples)
            weight = float(size)
            if self._loss is not None:
                weight = self._loss.weight_of(cut[0][-1], size)
            args, kwargs = map_tensors(partial(send, link=link, place=place), cut)
            where = f"replica {position} on device {self._name_of(position)}, a shard of {size} samples"
            calls.append(
                ReplicaCall(
                    position=position,
                    module=module,
                    args=args,
                    kwargs=kwargs,
                    weight=weight,
                    loss_fn=losses.get(position),
                    where=where,
                )
            )
        return calls

    def _copy_out(self, active: Sequence[int], link: Link) -> Replicas | None:
        """The window's for this forward; None on a single device and with torch's engine."""
        if len(self.devices) == 1 or self.engine != "window":
            return None
        if self._window is None:
            self._window = WindowEngine(self.module)
        return self._window.copy_out(active, link, last=self._syncs)

    def _modules_on(self, active: Sequence[int], link: Link, replicas: Replicas | None) -> dict[int, nn.Module]:
        """The module to run at each active position."""
        if replicas is not None:
            return {position: replicas.trees[position] for position in active}
        elsewhere = [position for position in active if position != 0]
        modules = dict(zip(elsewhere, replicate(self.module, link, elsewhere), strict=True))
        return {0: self.module, **modules} if active[0] == 0 else modules

    def __getstate__(self) -> dict[str, Any]:
        # copies and pickles begin with no window: what the replicas hold belongs to this wrapper's
        # graphs
        own = {"_window": None, "gauge": None, "_threads": None, "_turn": None}
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._threads, self._turn = ReplicaThreads(), threading.RLock()
        if self._link is not None:
            self._link.adopt(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("scatter", "replicate", "parallel_apply", "gather"):
            if name in cls.__dict__:
                raise TypeError(f"{cls.__name__} overrides {name}(): {_UNUSED}")

    def _name_of(self, position: int) -> str:
        return str(self.devices[position]) if self._link is None else str(self._link.place(position))


# Of the steps of nn.DataParallel.forward(), which people override there.
_UNUSED = (
    "expected none, BalancedDataParallel never calls it. What is split is said by shard_sizes and dim, how tensors "
    "travel by link; for other than that, override forward(), or use nn.DataParallel."
)


class _Call(NamedTuple):
    """What `forward` was called with; the names stand in messages: ``.kwargs['mask'] has 7``."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
