"""A thread for every position, the same one in every forward."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor


class ReplicaThreads:
    """A thread for each of a wrapper's positions, made when it is first needed, ended with this object.

    Libraries choose kernels for a thread: cuDNN keeps the plans of its convolutions and its
    attention in each thread, and cuBLAS a workspace. A new thread searches and builds them all
    again, in every forward, and some of it is never freed. So each position has one thread for
    good, and a replica that runs alone runs there too.

    Example: ``threads.run({0: first, 2: third})`` runs ``first()`` and ``third()`` at the same time,
    each in the thread that ran that position's task before.

    A forked child has none of its parent's threads, and makes its own. A thread that gave out tasks
    itself would wait for itself: callers ask `is_inside` first.
    """

    def __init__(self) -> None:
        self._executors: dict[int, ThreadPoolExecutor] = {}
        self._own = threading.local()
        self._pid = os.getpid()

    @property
    def is_inside(self) -> bool:
        """Whether the caller is one of these threads."""
        return getattr(self._own, "is_inside", False)

    def run(self, tasks: Mapping[int, Callable[[], None]], if_cut_short: Callable[[], None] | None = None) -> None:
        """Run the task of each position, all at once; they are expected not to raise.

        It returns, or passes Ctrl-C on, once all of them have ended: none runs on while its caller
        cleans up. Before it waits for that, it calls `if_cut_short`: a task may wait for one that
        will never begin.
        """
        jobs = [_Job(task) for task in tasks.values()]
        try:
            for position, job in zip(tasks, jobs, strict=True):
                self._executor_of(position).submit(self._work, job)
            for job in jobs:
                job.ended.wait()
        except BaseException:
            if if_cut_short is not None:
                if_cut_short()
            raise
        finally:
            for job in jobs:
                job.give_up()

    def _executor_of(self, position: int) -> ThreadPoolExecutor:
        if self._pid != os.getpid():
            self._executors, self._pid = {}, os.getpid()
        if position not in self._executors:
            self._executors[position] = ThreadPoolExecutor(1, thread_name_prefix=f"replica {position}")
        return self._executors[position]

    def _work(self, job: _Job) -> None:
        self._own.is_inside = True
        job.run()


class _Job:
    """A task that is run, or given up before it began. Ctrl-C may come anywhere, in the midst of giving it out too."""

    def __init__(self, task: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self._task: Callable[[], None] | None = task
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run the task, unless it was given up."""
        task = self._take()
        if task is not None:
            try:
                task()
            finally:
                self.ended.set()

    def give_up(self) -> None:
        """Return once the task has ended, or will never begin."""
        if self._take() is None:
            self.ended.wait()

    def _take(self) -> Callable[[], None] | None:
        with self._lock:
            task, self._task = self._task, None
            return task
