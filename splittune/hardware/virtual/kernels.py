"""Kernels of torch's operators that are replaced for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class TemporaryKernels:
    """Kernels as `register` makes them, for the whole process: there from the first use to the end of the last.

    Args:
        register: gives a library that holds them.
    """

    def __init__(self, register: Callable[[], torch.library.Library]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._num_uses = 0
        self._library: torch.library.Library | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._num_uses += 1
            if self._library is None:
                self._library = self._register()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_uses -= 1
            if not self._num_uses and self._library is not None:
                # Without this the kernels would stay until the garbage is collected. Private;
                # tests/hardware/virtual/test_autocast.py fails loudly should it change.
                self._library._destroy()
                self._library = None
