"""A server among clients that break off, while it is stopped, and while it is ended."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from edgeq.tools.lab.soak import exchange, gauges, idle, request, sample, server  # noqa: E402

pytestmark = pytest.mark.exhaustive
OPTIONS = ("-t", "1", "--threads-prefill", "1", "-c", "1024", "--grace", "20")


@pytest.fixture
def served(demo: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with server(demo, OPTIONS) as found:
        yield found


def completion(**fields: Any) -> bytes:
    body = {"prompt": "import os", "max_tokens": 900, "ignore_eos": True, "stream": True, **fields}
    return request("/v1/completions", json.dumps(body).encode())


def test_half_a_minute_of_mixed_traffic_leaves_nothing_behind(demo: Path) -> None:
    command = [sys.executable, "-m", "edgeq.tools.lab.soak", str(demo), "--seconds", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["outcomes"]["answered"] > 50, done.stdout + done.stderr


def test_clients_that_are_killed_leave_nothing(served: tuple[subprocess.Popen[str], int]) -> None:
    """In the middle of streams, and in the middle of uploads."""
    process, port = served
    # Threads that read requests are started by the first ones.
    for _ in range(3):
        exchange(port, completion(max_tokens=2), 60, False, False)
    before = (idle(port), sample(process.pid))[1]
    for _ in range(5):
        threads = [threading.Thread(target=exchange, args=(port, completion(), 60, True, False)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for data in (completion()[:-9], b"POST /v1/completions HT"):
            socket.create_connection(("127.0.0.1", port)).sendall(data)
        for thread in threads:
            thread.join()
    found, after = idle(port), sample(process.pid)
    assert not found["running"] and not found["waiting"] and found["pages_held"] == found["pages_idle"]
    end = time.monotonic() + 10
    while sample(process.pid)[1] > before[1] + 1 and time.monotonic() < end:
        time.sleep(0.1)
    assert sample(process.pid)[1] <= before[1] + 1 and after[2] <= before[2] + 3


def test_a_server_that_was_stopped_goes_on(served: tuple[subprocess.Popen[str], int]) -> None:
    process, port = served
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(exchange(port, completion(n=4), 120, False, False)))
    reading.start()
    while not gauges(port)["running"]:
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)
    assert b'"ok"' in exchange(port, request("/health"), 20, False, False)
    reading.join()
    assert b"[DONE]" in found[0] and b'"error":' not in found[0]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_while_a_prompt_is_read(served: tuple[subprocess.Popen[str], int], signals: int) -> None:
    process, port = served
    found: list[bytes] = []

    def ask() -> None:
        with suppress(OSError):
            found.append(exchange(port, completion(prompt=list(range(2, 900)), max_tokens=20), 60, False, False))

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    while not gauges(port)["running"]:
        time.sleep(0.001)
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.wait(30) == 0
    for thread in asking:
        thread.join()
    if signals == 1:
        # Those that had not begun are told to come again.
        assert len(found) == 4 and all(b"[DONE]" in each or b"server_draining" in each for each in found), found
        assert any(b"[DONE]" in each for each in found)


def test_a_busy_neighbour_makes_nobody_fail(served: tuple[subprocess.Popen[str], int]) -> None:
    _, port = served
    spin = [sys.executable, "-c", "while True: pass"]
    neighbours = [subprocess.Popen(spin) for _ in range(2)]
    try:
        for _ in range(5):
            assert b"[DONE]" in exchange(port, completion(max_tokens=60), 60, False, False)
        assert b'"ok"' in exchange(port, request("/health"), 20, False, False)
    finally:
        for each in neighbours:
            each.kill()
            each.wait()
