"""Threads that read files while another thread does something else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Readers(Generic[T]):
    """`count` threads that make results in the order of `submit`.

    Not a ThreadPoolExecutor: Python waits for the threads of that when it ends, and a disk may hang.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs = SimpleQueue[tuple[Future[T], Callable[[], T]] | None]()
        self._lock, self._count, self._closed = Lock(), count, False
        for _ in range(count):
            Thread(target=_run, args=(self._jobs,), name=name, daemon=True).start()

    def submit(self, read: Callable[[], T]) -> Future[T]:
        """What `read` returns or raises, as soon as there is something; cancelled where the threads were told to end."""
        future = Future[T]()
        with self._lock:
            if self._closed:
                future.cancel()
            else:
                self._jobs.put((future, read))
        return future

    def close(self) -> None:
        """Tell the threads to end after what was submitted; they are not waited for."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._count):
                    self._jobs.put(None)


def _run(jobs: SimpleQueue[tuple[Future[T], Callable[[], T]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, read = job
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)
        # Else this thread would hold what was read until there is more to do.
        del job, future, read
