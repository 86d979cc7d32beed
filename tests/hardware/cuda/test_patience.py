from __future__ import annotations

import concurrent.futures
import gc
import threading
import weakref

import pytest

from splittune.hardware.cuda.patience import OutOfPatienceError, PatientThread
from tests.processes import DEADLINE_S


@pytest.fixture
def stuck():
    """A call that returns only when its test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


@pytest.fixture
def waits(monkeypatch):
    """How long each caller is ready to wait for an answer, one entry for each that waits."""
    limits, result = [], concurrent.futures.Future.result

    def noted(self, timeout=None):
        limits.append(timeout)
        return result(self, timeout)

    monkeypatch.setattr(concurrent.futures.Future, "result", noted)
    return limits


def test_a_call_has_its_answer_from_one_daemon_thread():
    """Calls are made in one thread besides the caller's, which does not keep the program alive."""
    patient = PatientThread(DEADLINE_S)
    first, second = (patient.call(threading.current_thread) for _ in range(2))
    assert first is second is not threading.current_thread()
    assert first.daemon
    patient.stop()


def test_nothing_starts_before_the_first_call():
    """Making the object starts no thread."""
    patient = PatientThread(DEADLINE_S)
    assert not patient.is_running
    patient.call(int)
    assert patient.is_running
    patient.stop()


@pytest.mark.parametrize("error", [ValueError("a"), TimeoutError("of its own"), KeyboardInterrupt()], ids=repr)
def test_what_a_call_raises_is_raised_to_the_caller(error):
    """An exception of the call's own, a TimeoutError too, passes through and ends nobody's patience."""

    def fail():
        raise error

    patient = PatientThread(DEADLINE_S)
    with pytest.raises(type(error)) as caught:
        patient.call(fail)
    assert caught.value is error
    assert patient.call(lambda: 5) == 5
    patient.stop()


def test_a_call_that_hangs_ends_the_patience_for_good(stuck, waits):
    """After its time a hung call is left behind, and every later call is refused without being made or waited for."""
    patient = PatientThread(0.2)
    with pytest.raises(OutOfPatienceError):
        patient.call(stuck)
    made = []
    for _ in range(5):
        with pytest.raises(OutOfPatienceError):
            patient.call(lambda: made.append(1))
    assert waits == [0.2]
    assert patient.has_given_up
    assert made == []


def test_a_late_answer_changes_nothing():
    """A call that returns after its time does not bring the patience back."""
    patient, may_answer, threads = PatientThread(0.1), threading.Event(), []

    def answer_late():
        threads.append(threading.current_thread())
        may_answer.wait()

    with pytest.raises(OutOfPatienceError):
        patient.call(answer_late)
    may_answer.set()
    patient.stop()
    for thread in threads:  # none where the thread had not begun in time
        thread.join()
    with pytest.raises(OutOfPatienceError):
        patient.call(int)


def test_a_stopped_thread_ends_and_another_call_starts_a_new_one():
    """Stopping ends the thread once its calls are done; a call after that works again."""
    patient = PatientThread(DEADLINE_S)
    thread = patient.call(threading.current_thread)
    patient.stop()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert patient.call(threading.current_thread) is not thread
    for _ in range(50):  # at once too, while the thread before may not have ended yet
        patient.stop()
        assert patient.call(lambda: 5) == 5
    patient.stop()
    patient.stop()


def test_a_call_from_within_a_call_is_made_at_once():
    """A finalizer that the garbage collector runs in the middle of a call does not wait for that call to end."""
    patient = PatientThread(DEADLINE_S)
    assert patient.call(lambda: patient.call(lambda: 5)) == 5
    assert not patient.has_given_up
    patient.stop()


def test_an_answer_is_not_kept():
    """What a call held or returned is gone when its caller lets go of it, not only with the next call."""

    class Answer:
        pass

    patient = PatientThread(DEADLINE_S)
    answer = weakref.ref(patient.call(Answer))
    patient.call(int)  # by its answer, the thread has left the first call behind
    gc.collect()
    assert answer() is None
    held, is_gone = Answer(), threading.Event()
    watch = weakref.ref(held, lambda _: is_gone.set())
    patient.call(held.__repr__)
    del held
    assert is_gone.wait(DEADLINE_S)
    assert watch() is None
    patient.stop()
