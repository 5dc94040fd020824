"""Energy of a run above what the machine takes when idle, from the best sensor that it has."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from edgeq.tools.measure.sensors import NVML, Sensor, every

IDLE_SECONDS = 2.0
PERIOD = 0.1
"""Seconds between two readings of power; a process of its own reads some of them, so more would disturb what is measured."""


@dataclass
class Spent:
    """Joules of a run above idle, and its mean power with that of idle; None: no sensor tells, or it failed meanwhile."""

    joules: float | None = None
    watts: float | None = None


class PowerMeter:
    """idle_watts   what the sensor read while nothing was measured; None: there is no sensor
    described    every sensor by name, and what can be had from it
    """

    def __init__(self, sensors: Sequence[Sensor], on_gpu: bool = False, idle_seconds: float = IDLE_SECONDS) -> None:
        """on_gpu   the target runs on a GPU: its power counts, and else that of all other sensors"""
        self.described = [{"sensor": sensor.name, "state": sensor.state} for sensor in sensors]
        self._sensor = next((sensor for sensor in sensors if sensor.usable and (sensor.name == NVML) == on_gpu), None)
        self.idle_watts: float | None = None
        if self._sensor is not None:
            spent = Spent()
            started = time.perf_counter()
            with self._counting(self._sensor, spent):
                time.sleep(idle_seconds)
            if spent.joules is not None:
                self.idle_watts = spent.joules / (time.perf_counter() - started)

    @classmethod
    def of_this_machine(cls, on_gpu: bool) -> PowerMeter:
        return cls(every(), on_gpu)

    @contextmanager
    def measuring(self) -> Iterator[Spent]:
        """Fills what it gives when the block ends."""
        spent = Spent()
        if self._sensor is None or self.idle_watts is None:
            yield spent
            return
        started = time.perf_counter()
        with self._counting(self._sensor, spent):
            yield spent
        if spent.joules is not None:
            seconds = time.perf_counter() - started
            spent.watts = spent.joules / seconds
            spent.joules = max(0.0, spent.joules - self.idle_watts * seconds)

    @contextmanager
    def _counting(self, sensor: Sensor, spent: Spent) -> Iterator[None]:
        if sensor.joules is None:
            with _sampled(sensor, spent):
                yield
            return
        try:
            before = sensor.joules()
        except (OSError, ValueError):
            yield
            return
        yield
        try:
            used = sensor.joules() - before
        except (OSError, ValueError):
            return
        spent.joules = used if used >= 0 else used + sensor.wraps_at


@contextmanager
def _sampled(sensor: Sensor, spent: Spent) -> Iterator[None]:
    """Mean power times the length of the block."""
    assert sensor.watts is not None
    watts, read, stop, found = sensor.watts, list[float](), threading.Event(), list[Exception]()

    def sample() -> None:
        try:
            read.append(watts())
            while not stop.wait(PERIOD):
                read.append(watts())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            found.append(error)

    thread = threading.Thread(target=sample, daemon=True)
    started = time.perf_counter()
    thread.start()
    try:
        yield
    finally:
        seconds = time.perf_counter() - started
        stop.set()
        thread.join()
    if read and not found:
        spent.joules = sum(read) / len(read) * seconds
