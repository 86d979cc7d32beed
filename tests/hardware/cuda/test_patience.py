from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from splittune.hardware.cuda.patience import OutOfPatienceError, PatientThread


@pytest.fixture
def stuck():
    """A call that returns only when its test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_a_call_has_its_answer_from_one_daemon_thread():
    """Calls are made in one thread besides the caller's, which does not keep the program alive."""
    patient = PatientThread(10)
    first, second = (patient.call(threading.current_thread) for _ in range(2))
    assert first is second is not threading.current_thread()
    assert first.daemon
    patient.stop()


def test_nothing_starts_before_the_first_call():
    """Making the object starts no thread."""
    patient = PatientThread(10)
    assert not patient.is_running
    patient.call(int)
    assert patient.is_running
    patient.stop()


@pytest.mark.parametrize("error", [ValueError("a"), TimeoutError("of its own"), KeyboardInterrupt()], ids=repr)
def test_what_a_call_raises_is_raised_to_the_caller(error):
    """An exception of the call's own, a TimeoutError too, passes through and ends nobody's patience."""

    def fail():
        raise error

    patient = PatientThread(10)
    with pytest.raises(type(error)) as caught:
        patient.call(fail)
    assert caught.value is error
    assert patient.call(lambda: 5) == 5
    patient.stop()


def test_a_call_that_hangs_ends_the_patience_for_good(stuck):
    """After its time a hung call is left behind, and every later call is refused without being made or waited for."""
    patient = PatientThread(0.2)
    with pytest.raises(OutOfPatienceError):
        patient.call(stuck)
    made = []
    before = time.monotonic()
    for _ in range(5):
        with pytest.raises(OutOfPatienceError):
            patient.call(lambda: made.append(1))
    assert time.monotonic() - before < 0.2
    assert patient.has_given_up
    assert made == []


def test_a_late_answer_changes_nothing():
    """A call that returns after its time does not bring the patience back."""
    patient = PatientThread(0.1)
    with pytest.raises(OutOfPatienceError):
        patient.call(lambda: time.sleep(0.3))
    time.sleep(0.4)
    with pytest.raises(OutOfPatienceError):
        patient.call(int)


def test_a_stopped_thread_ends_and_another_call_starts_a_new_one():
    """Stopping ends the thread once its calls are done; a call after that works again."""
    patient = PatientThread(10)
    thread = patient.call(threading.current_thread)
    patient.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert patient.call(threading.current_thread) is not thread
    for _ in range(50):  # at once too, while the thread before may not have ended yet
        patient.stop()
        assert patient.call(lambda: 5) == 5
    patient.stop()
    patient.stop()


def test_a_call_from_within_a_call_is_made_at_once():
    """A finalizer that the garbage collector runs in the middle of a call does not wait for that call to end."""
    patient = PatientThread(0.5)
    assert patient.call(lambda: patient.call(lambda: 5)) == 5
    assert not patient.has_given_up
    patient.stop()


def test_an_answer_is_not_kept():
    """What a call held or returned is gone when its caller lets go of it, not only with the next call."""

    class Answer:
        pass

    patient = PatientThread(10)
    answer = weakref.ref(patient.call(Answer))
    patient.call(int)  # by its answer, the thread has left the first call behind
    gc.collect()
    assert answer() is None
    held = Answer()
    watch = weakref.ref(held)
    patient.call(held.__repr__)
    del held
    end = time.monotonic() + 10
    while watch() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert watch() is None
    patient.stop()
