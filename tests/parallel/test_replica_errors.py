"""What a replica raises arrives as it is, and says which device raised it."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splittune.hardware import is_out_of_memory, resolve_hardware
from splittune.parallel import BalancedDataParallel, Link
from splittune.split import BatchSplit
from tests.parallel.models import Call, ThreadedLink, mlp, vectors

LINKS = pytest.mark.parametrize("link", [None, ThreadedLink(3)], ids=["one thread", "threads"])
needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")

WHERE = "in replica 1 on device cpu, a shard of 2 samples"


def wrap(module: nn.Module, *shard_sizes: int, link: Link | None = None) -> BalancedDataParallel:
    return BalancedDataParallel(
        module=module, shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes), link=link
    )


def raised_by(error: BaseException, link: Link | None = None) -> Any:
    """What the wrapper raises where the second of three replicas, of 2 samples, raises `error`."""

    def forward(module: Call, x: Tensor) -> Tensor:
        if len(x) == 2:
            raise error
        return x

    with pytest.raises(type(error)) as caught:
        wrap(Call(forward), 1, 2, 3, link=link)(torch.ones(6))
    return caught.value


class SeveralArgumentsError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class OwnWordsError(RuntimeError):
    def __str__(self) -> str:
        return "own words"


class ComposedError(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__(f"failed with {code}")
        self.code = code


@dataclass(frozen=True)
class UnchangeableError(Exception):
    text: str


class WithoutNotesError(Exception):
    """As every exception of Python 3.10."""

    @property
    def add_note(self) -> Any:
        raise AttributeError("add_note")


@LINKS
@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (ValueError, ["boom"]),
        (RuntimeError, ["CUDA error: device-side assert triggered"]),
        (torch.OutOfMemoryError, ["CUDA out of memory. Tried to allocate 2.00 GiB."]),
        (IndexError, ["index out of range in self"]),
        (StopIteration, ["boom"]),
        (ComposedError, [7]),
    ],
)
def test_a_message_names_the_device(kind: type[Exception], args: list[Any], link: Link | None) -> None:
    """The very exception arrives, its own words first, the replica and its shard behind them."""
    error = kind(*args)
    words = str(error)
    caught = raised_by(error, link)
    assert caught is error
    assert str(caught) == f"{words} ({WHERE})"


@needs_notes
@LINKS
@pytest.mark.parametrize(
    ("kind", "args", "words"),
    [
        (KeyError, ["missing"], "'missing'"),
        (SeveralArgumentsError, [7, "boom"], "(7, 'boom')"),
        (OSError, [2, "No such file"], "[Errno 2] No such file"),
        (AssertionError, [], ""),
        (ValueError, [torch.zeros(2)], "tensor([0., 0.])"),
        (OwnWordsError, ["kept"], "own words"),
        (ImportError, ["No module named 'flash_attn'"], "No module named 'flash_attn'"),
        (UnicodeDecodeError, ["utf-8", b"\xff", 0, 1, "invalid"], "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_is_no_plain_message_gets_a_note(
    kind: type[Exception], args: list[Any], words: str, link: Link | None
) -> None:
    """Arguments that mean something are left alone, and the replica is named in a note of the traceback."""
    error = kind(*args)
    before = error.args
    caught = raised_by(error, link)
    assert caught is error
    assert str(caught).startswith(words)
    assert caught.args is before
    assert caught.__notes__ == [WHERE]


def test_without_notes_the_cause_names_the_device() -> None:
    """On Python 3.10 the replica stands in the exception's cause, which the traceback prints; a cause is kept."""
    assert str(raised_by(WithoutNotesError(1, 2)).__cause__) == f"raised {WHERE}"
    error, cause = WithoutNotesError(1, 2), ValueError("first")
    error.__cause__ = cause
    assert raised_by(error).__cause__ is cause


@LINKS
def test_an_exception_that_cannot_be_changed_arrives_unchanged(link: Link | None) -> None:
    """A frozen dataclass refuses every addition: its type matters more than ours."""
    error = UnchangeableError("boom")
    assert raised_by(error, link) is error


@LINKS
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_error_passes_through(kind: type[BaseException], link: Link | None) -> None:
    """Requests to stop are nobody's bug: they pass without an addition."""
    error = kind()
    caught = raised_by(error, link)
    assert caught is error
    assert not hasattr(caught, "__notes__")


@LINKS
def test_attributes_and_causes_are_kept(link: Link | None) -> None:
    """What a handler reads from the exception is what the replica put there, and it can still be pickled."""
    error = SeveralArgumentsError(7, "boom")
    error.__cause__ = cause = ValueError("first")
    caught = raised_by(error, link)
    assert caught.code == 7
    assert caught.__cause__ is cause
    assert pickle.loads(pickle.dumps(raised_by(ValueError("boom"), link))).args == (f"boom ({WHERE})",)


@LINKS
def test_the_traceback_reaches_into_the_model(link: Link | None) -> None:
    """The line of the user's forward that failed is in the traceback, from a thread as well."""
    caught = raised_by(ValueError("boom"), link)
    names = []
    traceback = caught.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert names.count("forward") >= 2


@LINKS
@pytest.mark.parametrize("failing", [[1, 2], [0, 1, 2]], ids=str)
def test_of_several_errors_the_first_replicas_is_raised(link: Link | None, failing: list[int]) -> None:
    """Whichever thread fails first in time, the error of the first failing device is the one that is seen."""

    def forward(module: Call, x: Tensor) -> Tensor:
        index = int(x[0])
        time.sleep(0.02 * (2 - index))
        if index in failing:
            raise RuntimeError(f"failure {index}")
        return x

    with pytest.raises(RuntimeError, match=rf"failure {failing[0]} \(in replica {failing[0]}"):
        wrap(Call(forward), 1, 1, 1, link=link)(torch.arange(3))


@LINKS
def test_an_out_of_memory_error_is_recognised(link: Link | None) -> None:
    """After the device has been named, the one judge of OOM still knows it; other errors are none."""
    assert is_out_of_memory(raised_by(torch.OutOfMemoryError("CUDA out of memory."), link))
    assert is_out_of_memory(raised_by(RuntimeError("CUDA error: out of memory"), link))
    assert not is_out_of_memory(raised_by(ValueError("boom"), link))


def test_a_virtual_gpu_is_named() -> None:
    """On virtual hardware the device is the virtual GPU's index."""
    hardware = resolve_hardware("2xRTX3090")
    split = BatchSplit(global_batch_size=3, accumulation_steps=1, shard_sizes=(1, 2))
    model = hardware.wrap(Call(lambda module, x: x.view(1)), split)
    with hardware.metered(), pytest.raises(RuntimeError, match="in replica 1 on device 1, a shard of 2 samples"):
        model(torch.ones(3))


def test_a_wrapper_works_on_after_an_error() -> None:
    """A failed call leaves nothing behind that the next one trips over."""
    model = wrap(mlp(), 1, 2, link=ThreadedLink(2))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(3, 1))
    x = vectors(3)
    torch.testing.assert_close(model(x), model.unwrap()(x))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_no_replica_runs_on_after_ctrl_c() -> None:
    """KeyboardInterrupt leaves the call when every thread has ended: none changes a model that is being restored."""
    ended: list[int] = []

    def forward(module: Call, x: Tensor) -> Tensor:
        time.sleep(0.1)
        if int(x[0]) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.append(int(x[0]))
        return x

    with pytest.raises(KeyboardInterrupt):
        wrap(Call(forward), 1, 1, link=ThreadedLink(2))(torch.arange(2))
    assert sorted(ended) == [0, 1]
