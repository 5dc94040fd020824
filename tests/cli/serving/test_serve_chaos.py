"""A server among clients that break off, while it is stopped, and while it is ended."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from edgeq.tools.lab.soak import exchange, gauges, idle, request, sample, server  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

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
    assert wait_until(lambda: sample(process.pid)[1] <= before[1] + 1, 0.1) and after[2] <= before[2] + 3


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
    assert b'"ok"' in exchange(port, request("/health"), 120, False, False)
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
    assert process.wait(120) == 0
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
        assert b'"ok"' in exchange(port, request("/health"), 120, False, False)
    finally:
        for each in neighbours:
            each.kill()
            each.wait()


def text_of(port: int, **fields: Any) -> Any:
    found = exchange(port, completion(stream=False, temperature=0, max_tokens=20, **fields), 60, False, False)
    assert found[9:12] == b"200", found
    return json.loads(found.partition(b"\r\n\r\n")[2])["choices"][0]["text"]


@pytest.fixture
def copied(demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(demo, tmp_path / "tiny.edgeq"))


def test_a_file_that_takes_the_name_of_the_model_changes_no_answer(copied: Path, shell: Callable[..., Any]) -> None:
    with server(copied, OPTIONS) as (process, port):
        before = text_of(port)
        (copied.parent / "new").write_bytes(b"another file")
        os.replace(copied.parent / "new", copied)
        time.sleep(2)
        assert text_of(port) == before and process.poll() is None
    again = shell("serve", copied, "--port", 0)
    assert again.returncode == 1 and "not an .edgeq file" in again.stderr and "Traceback" not in again.stderr


@pytest.mark.parametrize("how", ["another model", "cut", "grown"])
def test_a_model_that_is_written_to_answers_nobody(copied: Path, how: str) -> None:
    """Who serves it again finds out which of the two it is."""
    with server(copied, OPTIONS) as (process, port):
        text_of(port)
        size = copied.stat().st_size
        if how == "another model":
            with copied.open("r+b") as file:
                file.seek(48)
                file.write(b"another digest..")
                file.seek(size // 2)
                file.write(bytes(size // 4))
        else:
            os.truncate(copied, size - 100 if how == "cut" else size + 100)
        # Linux ends a process that reads what was cut off.
        assert process.wait(120) in (70, -signal.SIGBUS)


def test_a_disk_that_fills_changes_no_answer(demo: Path, tmp_path: Path) -> None:
    """The system refuses to make files longer than a part of a page, as it does where a disk is full."""
    prompt, folder = list(range(2, 600)), tmp_path / "kept"
    with server(demo, (*OPTIONS, "--prompt-cache", str(folder))) as (process, port):
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, hard))
        first = text_of(port, prompt=prompt)
        assert wait_until(lambda: gauges(port)["prompt_cache_errors"] == 1, 0.1) and not list(folder.iterdir())
        assert text_of(port, prompt=prompt) == first and text_of(port, prompt=prompt[1:])
        assert gauges(port)["prompt_cache_errors"] == 1


def test_without_more_memory_answers_wait_and_the_server_stays(demo: Path) -> None:
    with server(demo, (*OPTIONS, "--seats", "8")) as (process, port):
        text_of(port)
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
        used = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(process.pid, resource.RLIMIT_AS, (used + (8 << 20), hard))
        statuses = list[bytes]()

        def ask(seed: int) -> None:
            prompt = [2 + (seed * i * i + i) % 1900 for i in range(900)]
            found = exchange(port, completion(stream=False, prompt=prompt, max_tokens=50), 300, False, False)
            statuses.append(found[9:12])

        asking = [threading.Thread(target=ask, args=(seed,)) for seed in range(16)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert len(statuses) == 16 and set(statuses) <= {b"200", b"500", b"503"} and b"200" in statuses, statuses
        resource.prlimit(process.pid, resource.RLIMIT_AS, (hard, hard))
        assert process.poll() is None and isinstance(text_of(port), str)
        found = idle(port)
        assert not found["running"] and not found["waiting"] and found["pages_held"] == found["pages_idle"]


CLOCKED = """
import sys, time
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.server import owner
steps, step, drain = [0], Scheduler.step, owner.Owner.drain
def counted(self):
    found = step(self)
    if self.running:
        steps[0] += 1
        # The rest of the text is longer than the minute only if the signal comes early in it.
        time.sleep(0.02)
    return found
async def noted(self):
    before = steps[0]
    await drain(self)
    print("steps of the grace:", steps[0] - before, file=sys.stderr, flush=True)
Scheduler.step, owner.Owner.drain, owner.perf_counter = counted, noted, lambda: 0.2 * steps[0]
from edgeq.tools.cli.main import main
sys.argv[0] = "edgeq"
main()
"""
"""A server whose clock goes on by 0.2 s with every step of the scheduler."""


def test_a_minute_of_grace_for_a_text_that_takes_longer(demo: Path) -> None:
    command = [sys.executable, "-c", CLOCKED, "serve", str(demo), "--port", "0", *OPTIONS, "--grace", "60"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "at http://" in line:
                break
        port = int(line.partition("at http://")[2].partition("/v1")[0].rpartition(":")[2])
        noted = list[str]()
        reading = threading.Thread(target=lambda: noted.extend(process.stderr or ()), daemon=True)
        reading.start()
        found = b""
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            connection.sendall(completion())
            # A text that has not begun is told to come again; headers may arrive before it begins.
            while b"data:" not in found:
                part = connection.recv(1 << 16)
                assert part, found
                found += part
            process.send_signal(signal.SIGTERM)
            while b"draining" not in exchange(port, request("/health"), 60, False, False):
                time.sleep(0.01)
            assert b"server_draining" in exchange(port, completion(), 60, False, False)
            before = found.count(b"data:")
            while part := connection.recv(1 << 16):
                found += part
        assert process.wait(120) == 0
        reading.join()
        # Tokens until the end of the grace, then why there are no more.
        (steps,) = (int(line.rpartition(":")[2]) for line in noted if line.startswith("steps of the grace:"))
        assert steps >= 300 and found.count(b"data:") > before + 20
        assert b"[DONE]" not in found and b"server_draining" in found[-400:]
    finally:
        process.kill()
        process.wait()
