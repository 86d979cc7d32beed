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
    """Clocks of each device, as in CUDA: its launching thread's, its queue's end, and its link's in either direction.

    A kernel starts when it has been launched and the queue is empty, so a fast thread hides
    launches behind kernels and a slow one starves the device. Replicas in forward have a thread
    each but share the interpreter: with n of them a launch takes n times as long. In backward torch
    gives every device a thread that needs no interpreter.

    Between devices there are ordinary copies (`transfer`), for which both queues stand still; hops (`hop`), which take
    the links alone; and NCCL's collectives (`collective`), which take every queue and pass through all cards in turn.
    """

    def __init__(self, gpus: Sequence[GpuModel]) -> None:
        self._gpus = tuple(gpus)
        self.launched_s = [0.0] * len(gpus)
        self.finished_s = [0.0] * len(gpus)
        self.sent_s = [0.0] * len(gpus)
        self.received_s = [0.0] * len(gpus)
        self.busy_s = [0.0] * len(gpus)
        self.copied_s = [0.0] * len(gpus)
        """For how long each device's queue stood still for bytes on their way, not for another device's kernels."""
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

        Both queues wait for each other, then for the bytes. From the host a copy comes beside what the device works on,
        and what is launched afterwards waits for it.
        """
        ends = [device for device in (source, target) if device is not None]
        start_s, end_s = self._send(source, target, num_bytes, after=[] if source is None else ends)
        for device in ends:
            self.copied_s[device] += max(0.0, end_s - max(start_s, self.finished_s[device]))
            self._hold(device, end_s)

    def hop(self, source: int | None, target: int | None, num_bytes: int) -> float:
        """Copy once the queues of both ends have come to it; they go on, and its end is returned."""
        return self._send(source, target, num_bytes, after=[end for end in (source, target) if end is not None])[1]

    def collective(self, devices: Sequence[int], num_bytes: int) -> None:
        """A broadcast from the first device or a sum at it, in slices that pass from device to device at once.

        Worked: 31.5 MB over links of 31.5e9 bytes/s take 1 ms, and 10 us for every device but one.
        """
        for device in devices:
            self.launched_s[device] = max(self.launched_s[device], self.launched_s[devices[0]]) + LAUNCH_S
        clocks = (self.launched_s, self.finished_s, self.sent_s, self.received_s)
        start_s = max(clock[device] for clock in clocks for device in devices)
        bandwidth = min(self._gpus[device].link_bandwidth_bytes_per_s for device in devices)
        end_s = start_s + (len(devices) - 1) * TRANSFER_LATENCY_S + num_bytes / bandwidth
        for device in devices:
            self.copied_s[device] += end_s - start_s
            self.finished_s[device] = self.sent_s[device] = self.received_s[device] = end_s
            is_between = device not in (devices[0], devices[-1])
            self.link_bytes[device] += num_bytes * (2 if is_between else 1)

    def wait_until(self, device: int, mark_s: float) -> None:
        """The device's queue goes on at that time at the earliest."""
        self._hold(device, mark_s)

    def _hold(self, device: int, until_s: float) -> None:
        self.finished_s[device] = max(self.finished_s[device], until_s)

    def _send(
        self, source: int | None, target: int | None, num_bytes: int, *, after: Sequence[int]
    ) -> tuple[float, float]:
        """When bytes leave, behind what is on the same way of either link, and arrive; the slower link decides."""
        ends = [device for device in (source, target) if device is not None]
        for device in ends:
            self.link_bytes[device] += num_bytes
        if target is not None:  # its thread is told of the copy by the source's, which is at work until then
            self.launched_s[target] = max(self.launched_s[device] for device in ends) + LAUNCH_S
        start_s = max(
            *(self.launched_s[device] for device in ends),
            *(self.finished_s[device] for device in after),
            0.0 if source is None else self.sent_s[source],
            0.0 if target is None else self.received_s[target],
        )
        end_s = start_s + TRANSFER_LATENCY_S + num_bytes / min(self._gpus[d].link_bandwidth_bytes_per_s for d in ends)
        if source is not None:
            self.sent_s[source] = end_s
        if target is not None:
            self.received_s[target] = end_s
        return start_s, end_s

    def wait_for(self, device: int) -> None:
        """The launching thread reads a value from `device` and stands still until it is there."""
        self.launched_s[device] = max(self.launched_s[device], self.finished_s[device])

    def end_s(self) -> float:
        """Seconds since the start at which every device has finished what it was given so far."""
        return max(*self.launched_s, *self.finished_s, *self.sent_s, *self.received_s)

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
