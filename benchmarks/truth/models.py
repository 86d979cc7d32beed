"""timm's models, built without weights and without torchvision."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import nn

MISSING_TIMM = "benchmarks.truth builds timm's models: pip install --no-deps timm huggingface_hub safetensors pyyaml"


def load_timm() -> ModuleType:
    """timm, with a stand-in for torchvision where that is not installed.

    timm imports torchvision for data sets and for names of classes, and a model's training step uses nothing of it.

    Raises:
        ModuleNotFoundError: timm is not installed; the message says how to.
    """
    if importlib.util.find_spec("timm") is None:
        raise ModuleNotFoundError(MISSING_TIMM)
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_StandIns())
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(enable=False)  # attention as the measured steps had it: product, softmax, product
    return timm


def architecture_of(name: str) -> str | None:
    """The name that timm has today for what it had under `name`; None where it has it no more.

    Weights do not change a step: ``"tf_efficientnet_b0_ap"`` and ``"tf_efficientnet_b0"`` are one architecture.
    """
    timm = load_timm()
    from timm.models._registry import _deprecated_models  # the one list of what was renamed to what

    known = set(timm.list_models(include_tags=False))
    if name in known:
        return name
    renamed = str(_deprecated_models.get(name, "")).partition(".")[0]
    return renamed if renamed in known else None


def build(architecture: str, image_size: int) -> nn.Module:
    """The model, in training mode, for square images of `image_size` pixels a side."""
    timm = load_timm()
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(architecture)
    is_fixed = config is not None and config.fixed_input_size and config.input_size[-1] != image_size
    model: nn.Module = timm.create_model(architecture, **({"img_size": image_size} if is_fixed else {}))
    return model.train()


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and what is in it: modules of which every name is an empty class."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has no code."""


class _Empty(type):
    """A class without content; of its attributes, members of an enumeration say, only the names are known."""

    def __getattr__(cls, name: str) -> str:
        return _named(name)


def _empty_class(name: str) -> type:
    return _Empty(_named(name), (), {})


def _named(name: str) -> str:
    if name.startswith("__"):
        raise AttributeError(name)
    return name
