"""Where trials run in this process: job and devices are left as they were found, whatever happens and whenever."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from splittune.hardware import resolve_hardware
from splittune.options import SearchOptions
from splittune.report.progress import SilentCallback
from splittune.runners.in_process import InProcessRunner
from splittune.signals import deferred
from splittune.training import Snapshot
from splittune.training import saved as saved_module
from splittune.training.task import TrainingTask
from splittune.tuner import tune
from tests.faults.trapped import DEVICES, Job, Trap

Tried = Callable[[str, str, str, str], None]
STICKY = "CUDA error: device-side assert triggered"


class SpoiltHardware:
    """Virtual devices that answer nothing once `is_spoilt`."""

    def __init__(self) -> None:
        self.hardware: Any = resolve_hardware(DEVICES)
        self.is_spoilt = False
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        if self.is_spoilt:
            self.num_asked += 1
            raise RuntimeError(f"{STICKY}: asked for {name}")
        return getattr(self.hardware, name)


def runner_of(job: Job, hardware: Any) -> InProcessRunner:
    return InProcessRunner(TrainingTask(job.model, job.loader, loss_fn=job.loss_fn, optimizer=job.optimizer), hardware)


def test_after_an_error_that_spoils_the_devices_nothing_is_asked_of_them(tried: Tried) -> None:
    """The CUDA error itself arrives, not one of the clean-up, and what is on the host is as it was found."""
    hardware: Any = SpoiltHardware()

    def spoil() -> RuntimeError:
        hardware.is_spoilt = True
        return RuntimeError(STICKY)

    trap = Trap("forward", 7, spoil)
    job = Job(trap)
    found, asked = job.fingerprint(), []
    runner = runner_of(job, hardware)
    close = runner.close

    def close_and_count() -> None:
        asked.append(hardware.num_asked)
        close()
        asked.append(hardware.num_asked)

    runner.close = close_and_count  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        tune(runner, SearchOptions(), SilentCallback())
    assert caught.value is trap.raised
    assert asked[0] == asked[1], "closing asks the devices nothing"
    assert job.fingerprint() == found
    tried("CUDA error that sticks", "in a trial in this process", "the error itself", "the host's state bit-identical")


def test_an_error_that_shows_only_at_the_end_is_raised_once_the_host_is_restored(tried: Tried) -> None:
    """A kernel that failed unnoticed is told of when the devices are emptied; the job is as it was all the same."""
    hardware, job = SpoiltHardware(), Job(Trap())
    found, runner = job.fingerprint(), runner_of(job, hardware)
    runner.open(["output"])
    with torch.no_grad():
        job.model.first.weight.zero_()
    job.model.eval()
    hardware.is_spoilt = True
    with pytest.raises(RuntimeError, match=f"{STICKY}: asked for recover"):
        runner.close()
    assert job.fingerprint() == found
    tried("CUDA error that sticks", "at the end", "the error itself", "the host's state bit-identical")


def test_what_lives_on_spoilt_devices_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where devices cannot be used, no value is copied to them, and modes and options are put back."""
    job = Job(Trap())
    snapshot = Snapshot(job.model, job.optimizer, job.loader)
    for saved in snapshot._tensors:  # as if the model lay on a card
        saved.on_host, saved.grad_on_host = None, None
    monkeypatch.setattr(saved_module.Tensor, "device", torch.device("cuda", 0))

    def touch(*_: Any) -> None:
        raise RuntimeError(STICKY)

    monkeypatch.setattr(saved_module, "_copy_into", touch)
    job.model.eval()
    job.model.first.weight.requires_grad_(False)
    job.optimizer.param_groups[0]["lr"] = 7.0
    torch.rand(3)
    generator = snapshot._random.cpu
    snapshot.restore(on_host_only=True)
    snapshot.restore_gradients(on_host_only=True)
    assert job.model.first.training
    assert not job.model.evaluated.training
    assert job.model.first.weight.requires_grad
    assert job.optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(RuntimeError, match=STICKY):
        snapshot.restore()


@pytest.mark.parametrize("moment", ["snapshot", "restore"])
@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_while_state_is_taken_or_put_back_waits(
    monkeypatch: pytest.MonkeyPatch, moment: str, presses: int, tried: Tried
) -> None:
    """Pressed in the middle of it, and again out of impatience: the state is whole first, then it takes effect."""
    job = Job(Trap())
    found, saved = job.fingerprint(), saved_module.SavedTensor
    method = "take_gradient" if moment == "snapshot" else "restore_gradient"
    original, count = getattr(saved, method), [0]

    def press(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        count[0] += 1
        if count[0] <= presses:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(saved, method, press)
    with pytest.raises(KeyboardInterrupt):
        tune(runner_of(job, resolve_hardware(DEVICES)), SearchOptions(max_trials=1), SilentCallback())
    assert count[0] >= len(list(job.model.parameters()))
    assert job.fingerprint() == found
    tried("Ctrl-C", f"in the {moment} of the state", "Ctrl-C, afterwards", "state bit-identical")


def test_gradients_that_an_interrupt_left_off_are_switched_on_again() -> None:
    """Ctrl-C between the lines of torch.no_grad() would switch gradients off for the user's own training too."""
    runner = runner_of(Job(Trap()), resolve_hardware(DEVICES))
    runner.open(["output"])
    torch.set_grad_enabled(False)
    try:
        runner.close()
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_signals_are_held_back_and_their_handlers_put_back() -> None:
    """A held signal arrives once, at the end of the block; a handler that ignores goes on ignoring."""
    before, told = signal.getsignal(signal.SIGINT), []

    def press_twice_and_go_on() -> None:
        with deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            told.append("went on")

    with pytest.raises(KeyboardInterrupt):
        press_twice_and_go_on()
    assert told == ["went on"]
    assert signal.getsignal(signal.SIGINT) is before
    with deferred():
        signal.signal(signal.SIGUSR2, previous := signal.getsignal(signal.SIGUSR2))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) is previous
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_the_block_and_a_held_signal_both_show() -> None:
    """Ctrl-C during a block that fails: the interrupt leaves, with the error as its context."""

    def press_and_fail() -> None:
        with deferred():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        press_and_fail()
    assert isinstance(caught.value.__context__, ValueError)
