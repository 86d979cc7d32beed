from __future__ import annotations

import builtins
import sys
import traceback

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._utils import ExceptionWrapper

from splittune.hardware.oom import NEARLY_FULL_BYTES, is_out_of_memory, is_sticky
from splittune.units import GIB, MIB

OOM_TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB"

MESSAGES = {
    "caching allocator": OOM_TEXT,
    "caching allocator, ROCm": "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
    "capacity of 63.98 GiB",
    "runtime": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "runtime, ROCm": "HIP error: out of memory",
    "driver": "CUDA driver error: out of memory",
    "triton": "Triton Error [CUDA]: out of memory",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuSOLVER": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuDNN workspace": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "cuDNN, every algorithm tried": "Unable to find a valid cuDNN algorithm to run convolution",
    "cuDNN allocation": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN 9 allocation": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT": "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuFFT, little memory free": "cuFFT error: CUFFT_INTERNAL_ERROR",
    "NCCL": "NCCL Error 1: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "MIG": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1154, please report a '
    "bug to PyTorch. ",
    "MIG, connecting": "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
    '"../c10/cuda/CUDACachingAllocator.cpp":963, please report a bug to PyTorch. ',
    "MIG, by bus": "NVML_SUCCESS == DriverAPI::get()->nvmlDeviceGetHandleByPciBusId_v2_( pci_id, &nvml_device) "
    'INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1139, please report a bug to '
    "PyTorch. ",
    "host": "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 70368744177664 bytes. Error code 12 (Cannot allocate memory)",
    "host, Windows": "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 70368744177664 bytes.",
    "C++": "std::bad_alloc",
    "compiler backend": f"backend='inductor' raised:\nOutOfMemoryError: {OOM_TEXT}",
    "quoted by a wrapper": f"step 3 failed ({OOM_TEXT})",
    "replica whose type was lost": "Caught OutOfMemoryError in replica 1 on device 1.\nOriginal Traceback (most recent"
    ' call last):\n  File "model.py", line 3, in forward\n',
}

NEAR_MISSES = {
    "prose": "ran out of memory slots in replay buffer",
    "a limit of the user's own": "not enough memory cells for 5 items",
    "an option quoted": "retry_on='CUDA out of memory' is not an option",
    "index out of range seen by cuBLAS": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling "
    "`cublasCreate(handle)`",
    "a shape cuDNN never supports": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED_SHAPE",
    "device-side assert": "CUDA error: device-side assert triggered",
    "illegal access": "CUDA error: an illegal memory access was encountered",
    "shared memory of a kernel": "out of resource: shared memory, Required: 131072, Hardware limit: 101376",
    "another assert": 'success INTERNAL ASSERT FAILED at "../aten/src/ATen/native/cuda/Foo.cpp":1, '
    "please report a bug.",
    "cuDNN that is not there": "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "a call cuBLAS refuses": "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`",
    "launch": "CUDA error: too many resources requested for launch",
    "bounds": "index 5 is out of bounds for dimension 0 with size 5",
    "nothing": "",
}


# What follows from a lack of memory, and from an index out of range as well.
AMBIGUOUS = {
    "cuBLAS's handle": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN's handle": "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN, within": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
}


class StepError(Exception):
    """Somebody's own exception, which is no RuntimeError."""


def through_a_replica(failing, where: str = "in replica 1 on device 1") -> BaseException:
    """The exception of `failing` as torch's DataParallel raises it again from a replica's thread."""
    error = raised_by(failing)
    wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where=where)
    return raised_by(wrapper.reraise)


def raised_by(failing) -> BaseException:
    with pytest.raises((RuntimeError, StepError)) as caught:
        failing()
    return caught.value


def run_out():
    raise torch.OutOfMemoryError(OOM_TEXT)


def blame_the_oom():
    """Fails in a handler, and says that memory was the cause."""
    try:
        run_out()
    except torch.OutOfMemoryError as oom:
        raise RuntimeError("block 3 failed") from oom


def stumble_over_the_oom():
    """Fails in a handler with a bug of its own."""
    try:
        run_out()
    except torch.OutOfMemoryError:
        raise RuntimeError("the cache is already empty")  # noqa: B904 - the missing `from` is what is tested


def disown_the_oom():
    try:
        run_out()
    except torch.OutOfMemoryError:
        raise StepError("gave up") from None


def test_torchs_own_type_counts_whatever_it_says():
    """torch.OutOfMemoryError is one by type: its text may be anything."""
    assert is_out_of_memory(torch.OutOfMemoryError("20 MiB short on virtual GPU 1"))


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_every_known_spelling_of_a_runtime_error_counts(message):
    """A RuntimeError that says in a known way that an allocation failed counts."""
    assert is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
@pytest.mark.parametrize("error_type", [ValueError, TypeError, OSError, StepError])
def test_the_same_words_in_another_exception_do_not_count(error_type, message):
    """Text is judged in RuntimeErrors only: ValueError("CUDA out of memory") is somebody's own."""
    assert not is_out_of_memory(error_type(message))


@pytest.mark.parametrize("message", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_a_near_miss_does_not_count(message):
    """A RuntimeError about something else, memory in its words or not, is no out-of-memory error."""
    assert not is_out_of_memory(RuntimeError(message))


@given(st.text())
def test_free_text_without_a_spelling_never_counts(text):
    """No text counts unless one of the known names is in it."""
    known = (
        "out of memory",
        "ALLOC",
        "NOT_SUPPORTED",
        "CUFFT",
        "NVML_SUCCESS",
        "DefaultCPUAllocator",
        "bad_alloc",
        "cuDNN",
    )
    if not any(name in text for name in known):
        assert not is_out_of_memory(RuntimeError(text))


def test_a_subclass_of_runtime_error_is_judged_by_its_text():
    """torch.AcceleratorError and other RuntimeErrors are judged by what they say."""

    class AcceleratorError(RuntimeError):
        pass

    assert is_out_of_memory(AcceleratorError("CUDA error: out of memory"))
    assert not is_out_of_memory(AcceleratorError("CUDA error: unspecified launch failure"))


def test_the_host_allocator_of_this_torch_is_recognised():
    """A tensor that no host can hold fails with words the table knows."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_pythons_memory_error_counts():
    """MemoryError, numpy's too, is the interpreter saying that an allocation failed."""
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), StopIteration(), KeyError("out of memory")])
def test_other_exceptions_do_not_count(error):
    """An interrupt, an exit or another error is not a matter of memory."""
    assert not is_out_of_memory(error)


def test_an_oom_of_a_replica_counts():
    """DataParallel raises a replica's error again as text behind 'Caught OutOfMemoryError in replica 1 ...'."""
    error = through_a_replica(run_out)
    assert str(error).startswith("Caught OutOfMemoryError in replica 1 on device 1.")
    assert is_out_of_memory(error)


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_a_replicas_runtime_error_is_judged_by_its_own_message(message):
    """The message at the end of the traceback that a replica's error carries is searched like any other."""

    def fail():
        raise RuntimeError(message)

    assert is_out_of_memory(through_a_replica(fail))


@pytest.mark.parametrize("message", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_a_replicas_near_miss_does_not_count(message):
    """A replica's RuntimeError about something else is not made an out-of-memory error by its traceback."""

    def fail():
        raise RuntimeError(message)

    assert not is_out_of_memory(through_a_replica(fail))


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_words_added_behind_the_message_do_not_hide_it(message):
    """A wrapper that says behind the message where it came from changes nothing."""
    assert is_out_of_memory(RuntimeError(f"{message} (in replica 1 on device cuda:1, a shard of 4 samples)"))


def test_a_replicas_error_raised_from_an_oom_counts():
    """A cause counts in a replica's text as it does in an exception."""
    assert is_out_of_memory(through_a_replica(blame_the_oom))


def test_a_replicas_own_bug_while_handling_an_oom_does_not_count():
    """A RuntimeError raised in a replica's handler carries the handled error's text, and is still its own."""
    error = through_a_replica(stumble_over_the_oom)
    assert "CUDA out of memory" in str(error)
    assert not is_out_of_memory(error)


def test_source_lines_in_a_replicas_traceback_do_not_count():
    """A line of source that quotes an out-of-memory message is no message."""

    def fail():
        raise RuntimeError("shapes differ")  # CUDA out of memory. Tried to allocate ...

    error = through_a_replica(fail)
    assert "Tried to allocate" in str(error), "the traceback shows the source line"
    assert not is_out_of_memory(error)


def test_a_dataloader_workers_host_oom_counts():
    """A worker process reports its own failed allocation in the same way as a replica."""

    def fail():
        raise RuntimeError(MESSAGES["host"])

    assert is_out_of_memory(through_a_replica(fail, where="in DataLoader worker process 0"))


def test_an_exception_raised_from_an_oom_counts():
    """`raise X from oom` says that memory was the cause, whatever X is and however long the chain."""

    def fail():
        try:
            blame_the_oom()
        except RuntimeError as error:
            raise StepError("step 7") from error

    assert is_out_of_memory(raised_by(fail))


def test_an_error_raised_while_handling_an_oom_does_not_count():
    """An error in somebody's handler is a bug of its own: context alone is no cause."""
    error = raised_by(stumble_over_the_oom)
    assert isinstance(error.__context__, torch.OutOfMemoryError)
    assert not is_out_of_memory(error)


def test_an_error_raised_from_none_does_not_count():
    """`raise X from None` disowns the out-of-memory error it replaced."""
    assert not is_out_of_memory(raised_by(disown_the_oom))


def test_an_oom_with_another_error_as_its_cause_counts():
    """What counts by itself counts, whatever it came from."""
    error = torch.OutOfMemoryError(OOM_TEXT)
    error.__cause__ = ValueError("first")
    assert is_out_of_memory(error)


def test_a_ring_of_causes_ends():
    """Causes tied into a ring are each judged once."""
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_judging_leaves_the_exception_alone():
    """The judge reads an exception and adds nothing to it, no traceback either."""
    error = torch.OutOfMemoryError(OOM_TEXT)
    before = traceback.format_exception(error)
    is_out_of_memory(error)
    assert traceback.format_exception(error) == before
    assert error.__traceback__ is None


# Errors that may be about memory: the devices decide.


@pytest.mark.parametrize("message", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_a_handle_that_cannot_be_created_counts_on_a_nearly_full_device(message):
    """One device with less than 100 MiB free is enough, whichever it is; so it is for a replica's text."""

    def fail():
        raise RuntimeError(message)

    for free in ((40 * MIB,), (8 * GIB, 0), (NEARLY_FULL_BYTES - 1, 8 * GIB)):
        assert is_out_of_memory(RuntimeError(message), lambda free=free: free)
        assert is_out_of_memory(through_a_replica(fail), lambda free=free: free)


@pytest.mark.parametrize("message", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_a_handle_that_cannot_be_created_is_a_bug_where_memory_is_free_or_nobody_knows(message):
    """With 100 MiB free on each device, or unknown figures, it passes through as what it may be: the user's own."""
    error = RuntimeError(message)
    assert not is_out_of_memory(error, lambda: (8 * GIB, NEARLY_FULL_BYTES))
    assert not is_out_of_memory(error, lambda: None)
    assert not is_out_of_memory(error)
    assert not is_out_of_memory(ValueError(message), lambda: (0,))


def test_a_full_device_makes_no_other_error_one_of_memory():
    """On a full device, too, any other near miss is what it says, and clear ones count on an empty one."""
    for name in NEAR_MISSES.keys() - {"index out of range seen by cuBLAS", "cuDNN that is not there"}:
        assert not is_out_of_memory(RuntimeError(NEAR_MISSES[name]), lambda: (0,))
    for message in MESSAGES.values():
        assert is_out_of_memory(RuntimeError(message), lambda: (8 * GIB,))


def test_devices_are_asked_only_where_they_decide():
    """Neither for an error that is clear, nor for one after which they cannot answer."""

    def asked():
        raise AssertionError("asked")

    assert is_out_of_memory(torch.OutOfMemoryError(OOM_TEXT), asked)
    assert not is_out_of_memory(RuntimeError("shapes differ"), asked)
    lost = RuntimeError(AMBIGUOUS["cuBLAS's handle"])
    lost.__context__ = RuntimeError(STICKY["assert"])
    assert not is_out_of_memory(lost, asked)


def test_causes_and_groups_may_be_ambiguous_too():
    """What was raised from such an error counts as it does; a group counts if all in it do, clear or not."""

    def full():
        return (0,)

    step = StepError("step 7")
    step.__cause__ = RuntimeError(AMBIGUOUS["cuDNN's handle"])
    assert is_out_of_memory(step, full)
    assert not is_out_of_memory(step)
    if sys.version_info >= (3, 11):
        clear, doubtful = torch.OutOfMemoryError(OOM_TEXT), RuntimeError(AMBIGUOUS["cuDNN, within"])
        assert is_out_of_memory(exception_group("step", [clear, doubtful]), full)
        assert not is_out_of_memory(exception_group("step", [clear, doubtful]))
        assert not is_out_of_memory(exception_group("step", [clear, doubtful, ValueError()]), full)


# From here on: errors after which the process can use its devices no more.

STICKY = {
    "illegal address": "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
    "asynchronously reported at some other API call",
    "assert": "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side "
    "assertions.",
    "launch failure": "CUDA error: unspecified launch failure",
    "launch timeout": "CUDA error: the launch timed out and was terminated",
    "illegal instruction": "CUDA error: an illegal instruction was encountered",
    "misaligned address": "CUDA error: misaligned address",
    "program counter": "CUDA error: invalid program counter",
    "hardware stack": "CUDA error: hardware stack error",
    "address space": "CUDA error: operation not supported on global/shared address space",
    "ECC": "CUDA error: uncorrectable ECC error encountered",
    "NVLink": "CUDA error: uncorrectable NVLink error detected during the execution",
    "contained": "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    "ROCm": "HIP error: an illegal memory access was encountered",
    "driver": "CUDA driver error: an illegal memory access was encountered",
    "triton": "Triton Error [CUDA]: misaligned address",
    "NCCL": "NCCL Error 1: unhandled cuda error\nLast error:\n"
    "Cuda failure 700 'an illegal memory access was encountered'",
    "older NCCL": "NCCL Error 1: unhandled cuda error\nCuda failure 'unspecified launch failure'",
}

NOT_STICKY = NEAR_MISSES | {
    "out of memory": OOM_TEXT,
    "out of memory, runtime": "CUDA error: out of memory",
    "no such device": "CUDA error: invalid device ordinal",
    "no kernel": "CUDA error: no kernel image is available for execution on the device",
    "too large a grid": "CUDA error: invalid configuration argument",
    "too many resources": "CUDA error: too many resources requested for launch",
    "too many peers": "CUDA error: peer access is already enabled",
    "unknown": "CUDA error: unknown error",
    "a library's": "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "prose": "a device-side assert triggered by the test would be an illegal memory access",
    "host": "Assertion failed: misaligned address",
    "hint alone": "CUDA error: invalid argument\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
}
del NOT_STICKY["device-side assert"], NOT_STICKY["illegal access"]  # sticky, and no matter of memory


def assert_on_the_device():
    raise RuntimeError(STICKY["assert"])


def stumble_over_the_assert():
    """Fails in a handler with a bug of its own, after the devices are lost."""
    try:
        assert_on_the_device()
    except RuntimeError:
        raise StepError("no checkpoint")  # noqa: B904 - the missing `from` is what is tested


@pytest.mark.parametrize("message", STICKY.values(), ids=STICKY.keys())
def test_an_error_that_leaves_the_devices_unusable_is_sticky(message):
    """Each of CUDA's errors that outlive their call is sticky, whoever reports it, and none is a lack of memory."""
    assert is_sticky(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize("message", NOT_STICKY.values(), ids=NOT_STICKY.keys())
def test_an_error_after_which_the_devices_work_is_not_sticky(message):
    """A failed allocation, a refused call or mere prose leaves the process as it was."""
    assert not is_sticky(RuntimeError(message))


@pytest.mark.parametrize("message", [*MESSAGES.values(), ""], ids=[*MESSAGES.keys(), "nothing"])
def test_no_lack_of_memory_is_sticky(message):
    """However it is spelled, running out of memory leaves the process usable."""
    assert not is_sticky(RuntimeError(message))
    assert not is_sticky(torch.OutOfMemoryError(message))


@pytest.mark.parametrize("error_type", [ValueError, KeyError, OSError, StepError])
def test_the_words_of_a_sticky_error_in_another_exception_do_not_count(error_type):
    """Text is judged in RuntimeErrors only, as for memory; torch.AcceleratorError is one."""
    assert not is_sticky(error_type(STICKY["assert"]))


def test_a_replicas_sticky_error_is_sticky():
    """A replica's error arrives as text, a whole traceback, and counts as it does at first hand."""
    assert is_sticky(through_a_replica(assert_on_the_device))


def test_a_replicas_traceback_is_sticky_by_what_was_handled_in_it_too():
    """A RuntimeError raised in a replica while a sticky one was handled tells of it in its text."""

    def fail():
        try:
            assert_on_the_device()
        except RuntimeError:
            raise RuntimeError("no checkpoint")  # noqa: B904 - the missing `from` is what is tested

    assert is_sticky(through_a_replica(fail))


def test_source_lines_in_a_replicas_traceback_are_not_sticky():
    """A line of source that quotes a sticky error is no message."""

    def fail():
        raise RuntimeError("shapes differ")  # CUDA error: device-side assert triggered

    error = through_a_replica(fail)
    assert "device-side assert" in str(error), "the traceback shows the source line"
    assert not is_sticky(error)


def test_what_came_of_a_sticky_error_is_sticky():
    """The state of the process counts: an error raised from a sticky one, or while it was handled, changes nothing."""
    cause = raised_by(assert_on_the_device)
    error = StepError("step 7")
    error.__cause__ = cause
    assert is_sticky(error)
    assert is_sticky(raised_by(stumble_over_the_assert))
    disowned = StepError("gave up")
    disowned.__context__, disowned.__suppress_context__ = cause, True
    assert is_sticky(disowned)


def test_an_oom_after_a_sticky_error_is_both():
    """An out-of-memory error met while the devices were lost already does not make them usable."""
    error = torch.OutOfMemoryError(OOM_TEXT)
    error.__context__ = raised_by(assert_on_the_device)
    assert is_out_of_memory(error)
    assert is_sticky(error)


def test_a_ring_of_causes_is_judged_once():
    """Causes tied into a ring end, and so does a chain longer than Python's stack."""
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_sticky(first)
    chain = raised_by(assert_on_the_device)
    for _ in range(5000):
        later = StepError("later")
        later.__cause__ = chain
        chain = later
    assert is_sticky(chain)
    while chain is not None:  # apart, one by one: Python frees a long chain by recursion
        chain.__cause__, chain = None, chain.__cause__


# From here on: exception groups, which Python 3.10 does not have.
exception_group = getattr(builtins, "ExceptionGroup", None)
base_exception_group = getattr(builtins, "BaseExceptionGroup", None)
needs_groups = pytest.mark.skipif(exception_group is None, reason="exception groups came with Python 3.11")


@needs_groups
def test_a_group_of_ooms_counts():
    """Replicas that all ran out make one out-of-memory error, nested groups too."""
    inner = exception_group("replicas", [torch.OutOfMemoryError(OOM_TEXT), RuntimeError("CUDA error: out of memory")])
    assert is_out_of_memory(inner)
    assert is_out_of_memory(exception_group("step", [inner, MemoryError()]))


@needs_groups
@pytest.mark.parametrize("other", [ValueError("bad target"), KeyboardInterrupt()], ids=type)
def test_a_group_that_holds_another_error_does_not_count(other):
    """One replica's own bug, or an interrupt, is not hidden by another's lack of memory."""
    assert not is_out_of_memory(base_exception_group("replicas", [torch.OutOfMemoryError(OOM_TEXT), other]))


@needs_groups
def test_a_group_raised_from_an_oom_counts():
    """A group's cause is followed as any exception's is."""
    group = exception_group("step", [ValueError("follow-up")])
    group.__cause__ = torch.OutOfMemoryError(OOM_TEXT)
    assert is_out_of_memory(group)


@needs_groups
def test_a_group_that_is_its_members_cause_ends():
    """A member whose cause is the group is judged once."""
    member = ValueError("a")
    group = exception_group("step", [member])
    member.__cause__ = group
    assert not is_out_of_memory(group)


@needs_groups
def test_a_group_with_one_sticky_member_is_sticky():
    """One replica's lost device is enough, beside an error of any kind and however deep."""
    inner = exception_group("replicas", [torch.OutOfMemoryError(OOM_TEXT), RuntimeError(STICKY["assert"])])
    assert is_sticky(exception_group("step", [ValueError("bad target"), inner]))
    assert not is_sticky(exception_group("step", [ValueError("bad target"), torch.OutOfMemoryError(OOM_TEXT)]))
