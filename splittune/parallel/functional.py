"""The wrapper as a function: one call of a module on several devices, nothing kept afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from splittune.parallel.data_parallel import BalancedDataParallel
from splittune.parallel.devices import DeviceLike, resolve_devices
from splittune.parallel.link import Link
from splittune.parallel.nesting import tensors_of
from splittune.parallel.replica_loss import LossFunction, WeightFunction
from splittune.parallel.samples import read_samples
from splittune.split import even_shards


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
    *,
    shard_sizes: Sequence[int] | None = None,
    gpu0_bsz: int | None = None,
    loss_fn: LossFunction | None = None,
    weight_fn: WeightFunction | None = None,
    link: Link | None = None,
) -> Any:
    """``module(*inputs, **module_kwargs)``, each device with its own share of the samples.

    Takes what ``torch.nn.parallel.data_parallel`` takes, and the shares besides. Parameters are
    copied out for this call alone, and its backward adds the gradients up where the module lives;
    they may be differentiated again. For more than a call, `BalancedDataParallel` copies less.

    Example: 13 samples on four devices with ``shard_sizes=(1, 4, 4, 4)`` run as 1 + 4 + 4 + 4, and
    with neither share given as 3 + 4 + 3 + 3.

    Args:
        module: its parameters must be on the first device.
        inputs: a tuple of positional arguments, or a single one; None for none.
        device_ids: CUDA ordinals or devices; None for all CUDA devices, or for the module's own
            device where there is no CUDA. A device may be named twice.
        output_device: where outputs are joined; None for the first device, -1 for the CPU.
        dim: the dimension of inputs and outputs that counts samples.
        module_kwargs: keyword arguments, split as `inputs` are.
        shard_sizes: samples for each device; fewer samples shrink every share in proportion.
        gpu0_bsz: samples for the first device, the others share the rest. With neither, the
            samples are shared evenly.
        loss_fn: see `BalancedDataParallel`; the last of `inputs` are then the targets.
        weight_fn: likewise.
        link: likewise.

    Raises:
        InvalidSplitError: the shares do not go with the devices or the samples.
        ConfigError: the module is not on the first device, or inputs have different sizes.
    """
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    kwargs = dict(module_kwargs or {})
    devices = resolve_devices(device_ids, module)
    if shard_sizes is None and gpu0_bsz is None:
        call = (args, kwargs)
        num_samples = read_samples(call, dim, is_call=True).size if tensors_of(call) else 0
        shard_sizes = even_shards(max(num_samples, len(devices)), len(devices))
    wrapper = BalancedDataParallel(
        gpu0_bsz,
        module,
        devices,
        "cpu" if output_device == -1 else output_device,
        dim,
        shard_sizes=shard_sizes,
        loss_fn=loss_fn,
        weight_fn=weight_fn,
        engine="torch",  # a window would outlive the call
        link=link,
    )
    return wrapper(*args, **kwargs)
