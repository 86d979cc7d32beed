"""Modelled clocks of several devices: launches, kernels, transfers, and waiting for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from splittune.hardware.virtual.catalog import GpuModel

# An eager torch operation costs the launching thread about this much (Python, dispatcher, driver).
# Modelled.
LAUNCH_S = 8e-6
# Starting a copy between two devices, or from the host. Modelled.
TRANSFER_LATENCY_S = 10e-6


class Timeline:
    """Two clocks for each device, as in CUDA: its launching thread's, and its queue's end.

    A kernel starts when it has been launched and the queue is empty, so a fast thread hides
    launches behind kernels and a slow one starves the device. Replicas in forward have a thread
    each but share the interpreter: with n of them a launch takes n times as long. In backward torch
    gives every device a thread that needs no interpreter.
    """

    def __init__(self, gpus: Sequence[GpuModel]) -> None:
        self._gpus = tuple(gpus)
        self.launched_s = [0.0] * len(gpus)
        self.finished_s = [0.0] * len(gpus)
        self.busy_s = [0.0] * len(gpus)
        self.link_bytes = [0] * len(gpus)
        """Bytes that went over each device's link, in either direction."""
        self._launch_share = 1
        self._replicas_done = 0
        self._forward_start_s = 0.0

    def launch(self, device: int, kernel_s: float) -> None:
        """Run one kernel on `device`."""
        self.launched_s[device] += LAUNCH_S * self._launch_share
        start = max(self.launched_s[device], self.finished_s[device])
        self.finished_s[device] = start + kernel_s
        self.busy_s[device] += kernel_s

    def transfer(self, source: int | None, target: int | None, num_bytes: int) -> None:
        """Copy between two devices, or from or to the host (None).

        Both queues wait for each other, then for the bytes. The slower of the two links decides.
        Copies that share a device follow one another.
        """
        ends = [device for device in (source, target) if device is not None]
        for device in ends:
            self.link_bytes[device] += num_bytes
        if target is not None:  # its thread is told of the copy by the source's, which is at work until then
            self.launched_s[target] = max(self.launched_s[device] for device in ends) + LAUNCH_S
        bandwidth = min(self._gpus[device].link_bandwidth_bytes_per_s for device in ends)
        start = max(max(self.finished_s[device], self.launched_s[device]) for device in ends)
        for device in ends:
            self.finished_s[device] = start + TRANSFER_LATENCY_S + num_bytes / bandwidth

    def wait_for(self, device: int) -> None:
        """The launching thread reads a value from `device` and stands still until it is there."""
        self.launched_s[device] = max(self.launched_s[device], self.finished_s[device])

    def wait_for_all(self) -> float:
        """Every thread waits for every device; seconds since the start at which they go on."""
        now = max(*self.launched_s, *self.finished_s)
        self.launched_s = [now] * len(self._gpus)
        self.finished_s = [now] * len(self._gpus)
        return now

    @contextmanager
    def replica(self, device: int, num_replicas: int) -> Iterator[None]:
        """One replica's forward: run after the others, but at the same modelled time as they."""
        if self._replicas_done == 0:
            self._forward_start_s = max(self.launched_s)
        self.launched_s[device] = max(self.launched_s[device], self._forward_start_s)
        self._launch_share = num_replicas
        self._replicas_done += 1
        finished = False
        try:
            yield
            finished = True
        finally:
            self._launch_share = 1
            if self._replicas_done == num_replicas or not finished:
                self._replicas_done = 0
                self.launched_s = [max(self.launched_s)] * len(self._gpus)
