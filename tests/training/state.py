"""Everything of a job that must be as it was found, as plain values: two of these are equal bit for
bit or not at all."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim


def state_of(model: nn.Module, optimizer: optim.Optimizer | None = None, loader: Iterable[Any] = ()) -> dict[str, Any]:
    """Which objects there are, and their bits. Compare what was taken before with what is there after."""
    sampler = getattr(loader, "sampler", None)
    generators = [getattr(owner, "generator", None) for owner in (loader, sampler)]
    return {
        "modules": {
            name: (id(module), {key: frozen(value) for key, value in vars(module).items() if key[0] != "_"})
            for name, module in model.named_modules()
        },
        "parameters": {name: full(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)},
        "buffers": {name: full(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)},
        "optimizer": None if optimizer is None else optimizer_state(optimizer),
        "torch": bits(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": frozen(np.random.get_state()),  # noqa: NPY002 - the global generator is what must not move
        "generators": [None if generator is None else bits(generator.get_state()) for generator in generators],
    }


def optimizer_state(optimizer: optim.Optimizer) -> Any:
    scalars = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float | None)}
    groups = [(id(group), list(group), frozen(group)) for group in optimizer.param_groups]
    state = {id(parameter): frozen(entry) for parameter, entry in optimizer.state.items()}
    return id(optimizer.state), id(optimizer.param_groups), scalars, groups, state, id(vars(optimizer).get("step"))


def full(tensor: Tensor) -> Any:
    grad = tensor.grad if tensor.is_leaf else None
    described = (id(tensor), tensor.requires_grad, tensor.is_leaf, tensor.stride(), bits(tensor))
    return (*described, None if grad is None else (id(grad), bits(grad)))


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Equal for equal bits, of NaN and -0.0 too."""
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    return tensor.dtype, tuple(tensor.shape), dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), bits(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return id(value), {key: frozen(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(entry) for entry in value]
    return value if isinstance(value, bool | int | float | str | None) else id(value)
