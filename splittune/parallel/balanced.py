"""BalancedDataParallel: nn.DataParallel with a share of the batch for every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from splittune.errors import ConfigError, DeviceError, InvalidSplitError
from splittune.parallel.link import Link, TorchLink
from splittune.parallel.nesting import batch_size_of, map_tensors, slice_arguments, tensors_of
from splittune.parallel.outputs import combine_outputs
from splittune.parallel.replicas import ReplicaCall, keep_buffer_updates, replicate, run_replicas
from splittune.parallel.transfer import send
from splittune.split import even_shards, fit_shards, shards_with_gpu0

DeviceLike = int | str | torch.device


class BalancedDataParallel(nn.Module):
    """Runs `module` on several devices at once, each with its own share of the micro-batch.

    Give GPU 0's share, ``BalancedDataParallel(4, model)``, and the others share the rest as evenly as integers allow;
    or every device's, ``BalancedDataParallel(module=model, shard_sizes=(4, 20, 20, 20))``. Every sample goes to
    exactly one device, in order, and outputs come back in order, on `output_device`. Gradients arrive in the module's
    own parameters and are those of the whole micro-batch on one device, BatchNorm aside: each replica normalises by its
    own shard, and running statistics are those of the first device that had samples.

    Shares are honoured or refused, never changed in silence:

    - with `shard_sizes`, a smaller micro-batch shrinks every shard in proportion (`split.fit_shards`), a larger one is
      refused;
    - with `gpu0_bsz`, GPU 0 takes exactly that of the largest micro-batch trained on so far, and a smaller one shrinks
      the shares in proportion. A first training micro-batch smaller than `gpu0_bsz` is refused; under ``eval()`` or
      ``no_grad()`` it is shared evenly instead, GPU 0 getting less than its share.

    Args:
        gpu0_bsz: samples for the first device, 0 or more; None when `shard_sizes` is given.
        module: its parameters must be on the first device when it is called.
        device_ids: CUDA ordinals or devices, the first is 'GPU 0'; None for all CUDA devices, or for the module's own
            device where there is no CUDA. A device may be named twice.
        output_device: where outputs are joined; None for the first device.
        dim: the dimension of inputs and outputs that counts samples.
        shard_sizes: samples for each device, for the largest micro-batch.
        link: how tensors travel; None for torch's own devices.

    Of arguments that are no tensors, a list or tuple with one string, number or None for each sample is split as tensors
    are, save for a tuple of numbers, a size say; everything else reaches every replica as it is.
    A 0-dim output is a mean over samples and is averaged weighted by shard size; see `outputs.combine_outputs`.
    Limits are nn.DataParallel's: replicas other than the first are shallow copies, so Python attributes they assign
    are lost, and in-place updates of parameters inside forward are too.
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
        link: Link | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module is {module!r}: expected an nn.Module. "
                "The order is BalancedDataParallel(gpu0_bsz, module), or name it: module=..., shard_sizes=..."
            )
        self.module = module
        self.dim = dim
        self.device_ids = _resolve_devices(device_ids, module)
        self.output_device = self.device_ids[0] if output_device is None else _as_device(output_device)
        self.gpu0_bsz, self.shard_sizes = _check_shares(gpu0_bsz, shard_sizes, len(self.device_ids))
        self._link = link
        self._largest_trained = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        link, output_place = self._route()
        call = _Call(inputs, kwargs)
        # with nothing to split there is one call, on the first device
        batch_size = batch_size_of(call, self.dim) if tensors_of(call) else 0
        shards = self._shards_of(batch_size)
        active = [position for position, shard in enumerate(shards) if shard] or [0]
        calls = self._calls(call, active, shards, link)
        outputs = run_replicas(calls, link)
        if active[0] != 0:
            keep_buffer_updates(self.module, calls[0].module, link)
        if self._trains():
            self._largest_trained = max(self._largest_trained, batch_size)
        del calls  # without gradients nothing else holds the replicas and their inputs
        return combine_outputs(outputs, [shards[position] for position in active], link, output_place, self.dim)

    def to_output(self, tree: Any) -> Any:
        """`tree` with every tensor on the output device, where the outputs are: for targets."""
        link, place = self._route()
        return map_tensors(lambda tensor: send(tensor, link, place), tree)

    def unwrap(self) -> nn.Module:
        """The module that was wrapped: the same object, with its parameters."""
        return self.module

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's, for keys with or without the wrapper's ``module.`` prefix."""
        own = set(self.state_dict(keep_vars=True))
        prefixed = {f"module.{key}" for key in state_dict}
        if len(own & prefixed) > len(own & set(state_dict)):
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def extra_repr(self) -> str:
        shares = f"gpu0_bsz={self.gpu0_bsz}" if self.shard_sizes is None else f"shard_sizes={self.shard_sizes}"
        return f"{shares}, devices={[self._name_of(position) for position in range(len(self.device_ids))]}"

    def _shards_of(self, batch_size: int) -> tuple[int, ...]:
        """Samples for each device: the one place where a micro-batch meets the shares."""
        if self.shard_sizes is not None:
            return fit_shards(batch_size, self.shard_sizes)
        assert self.gpu0_bsz is not None
        num_devices = len(self.device_ids)
        if batch_size == 0:
            return (0,) * num_devices
        if batch_size <= self._largest_trained:
            return fit_shards(batch_size, shards_with_gpu0(self._largest_trained, num_devices, self.gpu0_bsz))
        if batch_size >= self.gpu0_bsz:
            return shards_with_gpu0(batch_size, num_devices, self.gpu0_bsz)
        if self._trains():
            raise InvalidSplitError(
                f"gpu0_bsz={self.gpu0_bsz} exceeds the first micro-batch, of {batch_size} samples, by "
                f"{self.gpu0_bsz - batch_size}. Use gpu0_bsz <= {batch_size}, or a larger batch."
            )
        return even_shards(batch_size, num_devices)

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _route(self) -> tuple[Link, Any]:
        """The link for this call, and the place of the output device."""
        if self._link is not None:
            return self._link, self._link.place(0)
        devices = self.device_ids
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != devices[0]:
                raise ConfigError(
                    f"{name} of the module is on {tensor.device}: expected {devices[0]}, the first of {list(devices)}. "
                    f"Move the module there first: module.to('{devices[0]}')."
                )
        return TorchLink([*devices, self.output_device]), self.output_device

    def _calls(self, call: _Call, active: Sequence[int], shards: Sequence[int], link: Link) -> list[ReplicaCall]:
        """Each active device's module, the module itself on the first device, and its part of the arguments."""
        replicas = replicate(self.module, link, [position for position in active if position != 0])
        modules = [self.module, *replicas] if active[0] == 0 else replicas
        calls = []
        for position, module in zip(active, modules, strict=True):
            start, size, place = sum(shards[:position]), shards[position], link.place(position)
            cut = slice_arguments(*call, start, start + size, self.dim, sum(shards))
            args, kwargs = map_tensors(partial(send, link=link, place=place), cut)
            where = f"replica {position} on device {self._name_of(position)}, a shard of {size} samples"
            calls.append(ReplicaCall(position=position, module=module, args=args, kwargs=kwargs, where=where))
        return calls

    def _name_of(self, position: int) -> str:
        return str(self.device_ids[position]) if self._link is None else str(self._link.place(position))


class _Call(NamedTuple):
    """What `forward` was called with; the names stand in messages: ``.kwargs['mask'] has 7``."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


def _as_device(device: DeviceLike) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else _as_reported(torch.device(device))


def _as_reported(device: torch.device) -> torch.device:
    """As tensors report it, since ``cuda`` and ``cuda:0`` do not compare equal: ``cuda`` is the current card."""
    if device.type == "cpu":
        return torch.device("cpu")  # there is one
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _resolve_devices(device_ids: Sequence[DeviceLike] | None, module: nn.Module) -> tuple[torch.device, ...]:
    if device_ids is not None:
        devices = tuple(_as_device(device) for device in device_ids)
        if not devices:
            raise DeviceError("device_ids is empty: expected at least one device, e.g. device_ids=[0, 1].")
        return devices
    if torch.cuda.is_available():
        return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    first = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    return (first,)


def _check_shares(
    gpu0_bsz: int | None, shard_sizes: Sequence[int] | None, num_devices: int
) -> tuple[int | None, tuple[int, ...] | None]:
    if (gpu0_bsz is None) == (shard_sizes is None):
        raise InvalidSplitError(
            f"got gpu0_bsz={gpu0_bsz} and shard_sizes={shard_sizes}: expected one of them. "
            "gpu0_bsz gives GPU 0's share, shard_sizes every device's."
        )
    if shard_sizes is None:
        if not isinstance(gpu0_bsz, int) or isinstance(gpu0_bsz, bool) or gpu0_bsz < 0:
            raise InvalidSplitError(f"gpu0_bsz is {gpu0_bsz!r}: expected an integer of at least 0, GPU 0's samples.")
        if gpu0_bsz == 0 and num_devices == 1:
            raise InvalidSplitError("gpu0_bsz=0 on one device leaves the whole batch to nobody: use a larger share.")
        return gpu0_bsz, None
    sizes: tuple[Any, ...] = tuple(shard_sizes)
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in sizes) or sum(sizes) == 0:
        raise InvalidSplitError(f"shard_sizes is {sizes}: expected integers of at least 0, not all 0.")
    if len(sizes) != num_devices:
        raise InvalidSplitError(
            f"shard_sizes={sizes} has {len(sizes)} shares for {num_devices} devices: expected one for each device."
        )
    return None, sizes
