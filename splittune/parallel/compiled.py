"""Compiled modules: told apart from others, and compiled again around a replica of the original.

``torch.compile(module)`` gives a module around the original, whose attributes it passes on, so
torch's own replication would empty the original. ``module.compile()`` leaves a compiled call in the
module, which a plain copy would run on the original. Code that was compiled is found again by what
is called and with what, not by whose parameters: replicas of one module share it.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from splittune.parallel.modules import modules_of

# torch's own limit, 8, is for one device: beyond it a function runs uncompiled from then on. Each
# device counts as another version, and so do sizes, gradients on or off, and training or not.
RECOMPILES_PER_DEVICE = 8

_CALL_IMPL = "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` gave."""
    return isinstance(module, _loaded("OptimizedModule"))


def holds_compiled(root: nn.Module) -> bool:
    """Whether it or a part of it was compiled, in either way."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(is_compiled(module) or module.__dict__.get(_CALL_IMPL) is not None for module in modules_of(root))


def original_of(module: nn.Module) -> nn.Module:
    """The module that a compiled one was made from.

    Raises:
        TypeError: this torch makes compiled modules in another way. Nothing has been touched.
    """
    return _recipe_of(module)[1]


def compiled_as(module: nn.Module, original: nn.Module) -> nn.Module:
    """`original`, a replica of `original_of(module)`, compiled as `module` is, hooks and all."""
    cls, _, context = _recipe_of(module)
    again: nn.Module = cls(original, context)
    again.__dict__.update({name: value for name, value in module.__dict__.items() if "hook" in name})
    return again


def compile_call(replica: nn.Module) -> None:
    """Have a replica whose original was compiled in place run compiled code, of its own.

    Where this torch does not tell how the original was compiled, it runs as written.
    """
    compiled = replica.__dict__.get(_CALL_IMPL)
    if compiled is None:
        return
    context = _context_of(compiled)
    replica.__dict__[_CALL_IMPL] = None if context is None else _OwnCall(context(type(replica)._call_impl), replica)


def refuse_unknown(modules: Sequence[nn.Module]) -> None:
    """Raise where a module cannot be replicated, before anything of it is touched.

    Raises:
        TypeError: it is a TorchScript module, or compiled by a torch that does it in another way.
    """
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{type(module).__name__} is a TorchScript module, which cannot be replicated: expected an nn.Module. "
                "Wrap the nn.Module it was scripted from."
            )
        if is_compiled(module):
            _recipe_of(module)


def as_written() -> AbstractContextManager[Any]:
    """Inside, compiled modules run as they were written: for who must see every operation."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and loading the compiler takes seconds
    # Not only for the operations' sake: a function that the compiler meets under a dispatch mode is
    # left uncompiled for good, and one of ``fullgraph=True`` raises.
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def room_for(num_devices: int) -> Iterator[None]:
    """Inside, functions may be compiled for so many devices before torch leaves them be."""
    config = torch._dynamo.config
    limit = max(config.recompile_limit, RECOMPILES_PER_DEVICE * num_devices)
    with config.patch(recompile_limit=limit), warnings.catch_warnings():
        # The compiler looks at it of whatever it is given. With torch's engine replicas' parameters
        # are no leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor")
        yield


class _OwnCall:
    """A compiled `nn.Module._call_impl` for one module, which it does not keep alive."""

    def __init__(self, compiled: Callable[..., Any], module: nn.Module) -> None:
        self._compiled, self._module = compiled, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(self._module(), *args, **kwargs)


def _recipe_of(module: nn.Module) -> tuple[Callable[..., Any], nn.Module, Any]:
    """A compiled module's class, its original and how that was compiled: its pickled form."""
    recipe: Any = module.__reduce__()
    if isinstance(recipe, tuple) and len(recipe) == 2 and isinstance(recipe[1], tuple) and len(recipe[1]) == 2:
        cls, (original, context) = recipe
        if callable(cls) and isinstance(original, nn.Module):
            return cls, original, context
    raise TypeError(
        f"this torch ({torch.__version__}) makes compiled modules in a way that is not known here: got "
        f"{type(module).__name__}.__reduce__() = {recipe!r}, expected (class, (module, context)). Wrap the module that "
        "was given to torch.compile, and compile after wrapping."
    )


def _context_of(compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """How a function was compiled. Private: test_compiled.py says so should it change."""
    for cell in getattr(compiled, "__closure__", None) or ():
        if isinstance(cell.cell_contents, _loaded("_TorchDynamoContext")):
            context: Callable[..., Any] = cell.cell_contents
            return context
    return None


def _loaded(name: str) -> Any:
    """A class of the compiler's; none where it was never loaded, and so nothing is compiled."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), name, ())
