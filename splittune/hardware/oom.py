"""What an exception says of the devices: out of memory, or out of order. The one judge of each."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from splittune.units import MIB

# Each line is one way in which torch, or a library under it, says that an allocation failed. They
# are searched for in RuntimeErrors only. Prose that merely mentions memory must not match, so the
# common words are tied to their place: the start of a line or the ": " behind a type name, or
# torch's own next words.
_SPELLINGS = re.compile(
    "|".join(
        (
            # the caching allocator; a plain RuntimeError where a compiler backend, say, rebuilt it
            r"(?:^|: )(?:CUDA|HIP|XPU) out of memory\b",
            r"\b(?:CUDA|HIP|XPU) out of memory\. Tried to allocate",
            # the runtime or driver itself: context, pinned memory, expandable segments, loading
            r"\b(?:CUDA|HIP)(?: driver)? error: out of memory\b",
            r"\bTriton Error \[(?:CUDA|HIP)\]: out of memory\b",
            # libraries that allocate for themselves
            r"\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED\b",
            r"\bCUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED\b",
            # what cuDNN says when no algorithm's workspace fits. \b keeps
            # CUDNN_STATUS_NOT_SUPPORTED_SHAPE and its kin out: those are true whatever is free.
            r"\bcuDNN error: CUDNN_STATUS_NOT_SUPPORTED\b",
            # what torch says once it has tried every algorithm of cuDNN's, each of which ran out
            r"\bUnable to find a valid cuDNN algorithm to run convolution\b",
            # cuFFT's plans; torch.stft reports INTERNAL_ERROR when little is free (pytorch#119420)
            r"\bCUFFT_(?:ALLOC_FAILED|INTERNAL_ERROR)\b",
            # NCCL's buffers, which DataParallel's broadcast needs
            r"\bCuda failure (?:\d+ )?'out of memory'",
            # under MIG the allocator asks NVML for the figures of its own message, and is refused
            # (pytorch#112377); so it is where the driver does not match its library
            # (pytorch#130486)
            r"\bNVML_SUCCESS == [^\n]+ INTERNAL ASSERT FAILED\b",
            # the host's allocator: Linux, then Windows; and a C++ allocation that torch passes on
            r"\bDefaultCPUAllocator: (?:can't allocate memory|not enough memory)\b",
            r"\bstd::bad_alloc\b",
            # a replica's error whose type could not be rebuilt: only torch's heading names it
            r"(?:^|: )Caught OutOfMemoryError in replica \d+",
        )
    ),
    re.MULTILINE,
)

# What a library says when it cannot create its handle, for want of memory (tensorflow#9489) or for
# another reason: an index out of range is one. It counts only where a device was nearly full, or it
# would hide the user's own bug.
_AMBIGUOUS_SPELLINGS = re.compile(
    _SPELLINGS.pattern + r"|\bCUBLAS_STATUS_NOT_INITIALIZED\b|\bCUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)\b",
    re.MULTILINE,
)
# A device with less than this free is nearly full. A choice: a handle and the code that is loaded
# with it take some tens of MiB, outside torch's allocator. Doubled, a full device is blamed for
# more bugs; halved, a handle that lacks memory may pass for one.
NEARLY_FULL_BYTES = 100 * MIB

# CUDA's errors after which every further call of the process fails as well, in CUDA's words: its
# documentation says of each that the process must be ended and started anew. Not 'unknown error'
# and the libraries' EXECUTION_FAILED: they follow from these errors and from others.
_STICKY = re.compile(
    r"(?:\b(?:CUDA|HIP)(?: driver)? error: |\bTriton Error \[(?:CUDA|HIP)\]: |\bCuda failure (?:\d+ )?')"
    "(?:"
    + "|".join(
        (
            r"an illegal memory access was encountered\b",
            r"device-side assert triggered\b",
            r"unspecified launch failure\b",
            r"the launch timed out and was terminated\b",
            r"an illegal instruction was encountered\b",
            r"misaligned address\b",
            r"invalid program counter\b",
            r"hardware stack error\b",
            r"operation not supported on global/shared address space\b",
            r"uncorrectable ECC error encountered\b",
            r"uncorrectable NVLink error detected during the execution\b",
            r"Invalid access of peer GPU memory over nvlink or a hardware error\b",
        )
    )
    + ")"
)

# Python 3.11 brought exception groups; nothing is an instance of ().
_EXCEPTION_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())

# Python's own words between two tracebacks, when the later exception was raised while the earlier
# was handled.
_HANDLING = "During handling of the above exception, another exception occurred:"


def is_out_of_memory(error: BaseException, free_bytes: Callable[[], Sequence[int] | None] | None = None) -> bool:
    """True for an allocation that failed, on a device or on the host.

    `torch.OutOfMemoryError` and Python's `MemoryError` count by type, since numpy and the host's
    allocator fail on the same batches; any other `RuntimeError` by the spellings above. So do an
    exception raised `from` one that counts and a group whose every member counts: a group that
    holds another error as well is that error's.

    An exception raised while an out-of-memory error was being handled, but not `from` it, does not
    count: a ``ValueError`` in somebody's handler is a bug of its own, and must be seen.

    Where cuBLAS or cuDNN could not create a handle, memory may be the cause or a bug may. It counts
    if a device had less than 100 MiB free, so judge before anything is freed. Of a device that is
    lost (see `is_sticky`) nothing is asked.

    Example: ``RuntimeError("CUDA error: out of memory")`` counts,
    ``ValueError("CUDA error: out of memory")`` does not; "CUDA error:
    CUBLAS_STATUS_NOT_INITIALIZED" counts where devices have 8 GiB and 40 MiB free, and does not
    where they have 8 GiB and 4 GiB.

    Args:
        error: what was raised.
        free_bytes: what each device has free now, `Hardware.free_bytes` say, asked where it
            matters; None, or an answer of None, where nobody can tell.
    """
    if _counts(error, _SPELLINGS, seen=set()):
        return True
    if free_bytes is None or not _counts(error, _AMBIGUOUS_SPELLINGS, seen=set()) or is_sticky(error):
        return False
    free = free_bytes()
    return free is not None and min(free) < NEARLY_FULL_BYTES


def is_sticky(error: BaseException) -> bool:
    """True for a CUDA error after which this process can use its devices no more.

    Such is left by a kernel that read or asserted wrongly. The state of the process is judged, not
    whose error it is. So besides a `RuntimeError` that says so, an exception counts that was raised
    `from` one, or while one was handled, and a group of which any member counts. A process may have
    run out of memory as well: where both judges say yes, this one decides.

    Example: ``RuntimeError("CUDA error: device-side assert triggered")`` counts, "CUDA error: out
    of memory" does not.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, RuntimeError) and _STICKY.search(_own_words(str(one), and_handled=True)):
            return True
        pending += (one.__cause__, one.__context__, *(one.exceptions if isinstance(one, _EXCEPTION_GROUP) else ()))
    return False


def _counts(error: BaseException | None, spellings: re.Pattern[str], seen: set[int]) -> bool:
    """`seen` holds the identities already judged: causes can be tied into a ring by hand."""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _counts_by_itself(error, spellings, seen):
            return True
        error = error.__cause__
    return False


def _counts_by_itself(error: BaseException, spellings: re.Pattern[str], seen: set[int]) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, _EXCEPTION_GROUP):
        return all(_counts(member, spellings, seen) for member in error.exceptions)
    return isinstance(error, RuntimeError) and spellings.search(_own_words(str(error))) is not None


def _own_words(message: str, *, and_handled: bool = False) -> str:
    """What the exception itself says; if asked for, also what was being handled meanwhile.

    torch passes on an exception of another thread or process as text, a whole traceback behind
    'Caught X in replica 1 ...'. The same rules hold for that text, and lines of source (indented),
    which may quote anything, never count.
    """
    if not message.startswith("Caught "):
        return message
    heading, _, _ = message.partition("\n")
    said = message if and_handled else message.rpartition(_HANDLING)[2]
    return "\n".join((heading, *(line for line in said.splitlines() if not line.startswith("  "))))
