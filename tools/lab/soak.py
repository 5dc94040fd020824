"""`edgeq serve FILE` under mixed traffic for a while: does anything grow, stay open or stay held?

    python -m edgeq.tools.lab.soak model.edgeq --seconds 600

Clients send chats, completions and streams; some leave, some send broken bodies, some read slowly.  Memory, descriptors and
threads of the server are read every second, and once more when nothing runs.  Prints one JSON object; exit code 1: something
grew, was not given back, or a request failed for no fault of its client.
"""

from __future__ import annotations

import json
import random
import re
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from edgeq.errors import DeviceError
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.params import EdgeqFile

SETTLED = 0.25
"""Share of the time at the beginning that does not count: caches fill."""
MAX_MIB = 5.0
"""That memory may grow by after it."""
JUDGED_SECONDS = 120.0
"""Seconds of a run whose memory is judged: on a busy machine caches fill for longer than shorter ones last."""
IDLE_SECONDS = 20.0
LEAVING, BROKEN, SLOW = 0.1, 0.05, 0.05
"""Shares of requests whose client leaves in the middle, whose body is no request, and whose answer is read byte by byte."""
BODIES = (b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "a", "n": 99}', b'{"prompt": "a", "temperature": NaN}', b"\xff" * 50)


@contextmanager
def server(model: Path, options: tuple[str, ...]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process, and its port.  DeviceError: it does not start."""
    command = [sys.executable, "-m", "edgeq", "serve", str(model), "--port", "0", "--quiet", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"at http://[^/ ]+:(\d+)/v1", line):
                break
        else:
            raise DeviceError("the server has ended before it served")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


def exchange(port: int, data: bytes, patience: float, leaves: bool, slow: bool) -> bytes:
    """What comes back; a client that leaves reads its beginning and resets the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(16 if slow else 1 << 16):
            found += part
            if slow:
                time.sleep(0.002)
            if leaves:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
        return found


def request(path: str, body: bytes | None = None) -> bytes:
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class Client:
    """Sends one request after another until `end`; counts what came."""

    def __init__(self, port: int, seed: int, end: float) -> None:
        self._port, self._draw, self._end = port, random.Random(seed), end
        self.outcomes = Counter[str]()

    def run(self) -> None:
        while time.monotonic() < self._end:
            try:
                self.outcomes[self._one()] += 1
            except OSError as error:
                self.outcomes[f"FAILED {type(error).__name__}"] += 1

    def _one(self) -> str:
        draw = self._draw
        kind = draw.random()
        if kind < BROKEN:
            status = exchange(self._port, request("/v1/completions", draw.choice(BODIES)), 60, False, False)[9:12]
            return "refused" if status == b"400" else f"FAILED {status.decode()}"
        leaves, slow = kind < BROKEN + LEAVING, kind > 1 - SLOW
        body: dict[str, Any] = {"max_tokens": draw.choice((1, 8, 30)), "temperature": 1, "stream": slow or draw.random() < 0.5}
        body |= {"n": 2, "logprobs": 1} if draw.random() < 0.1 else {}
        body["prompt"] = "import os\n" * draw.randrange(1, 30) + f"def f{draw.randrange(1000)}("
        found = exchange(self._port, request("/v1/completions", json.dumps(body).encode()), 120, leaves, slow)
        if leaves:
            return "left"
        whole = b"[DONE]" in found if body["stream"] else b"usage" in found
        return "answered" if found[9:12] == b"200" and whole else f"FAILED {found[9:12].decode()}"


def sample(pid: int) -> tuple[float, int, int]:
    """MiB of memory that is not mapped from files, descriptors, threads."""
    text = Path(f"/proc/{pid}/status").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"^(RssAnon|Threads):\s+(\d+)", text, re.MULTILINE)}
    return numbers["RssAnon"] / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), numbers["Threads"]


def gauges(port: int) -> dict[str, float]:
    text = exchange(port, request("/metrics"), 60, False, False).decode()
    return {name: float(value) for name, value in re.findall(r"^edgeq_(\w+) ([\d.e+-]+)$", text, re.MULTILINE)}


def idle(port: int) -> dict[str, float]:
    """The gauges once nothing runs and no page is held but by the prefix tree, or those of the last try."""
    end = time.monotonic() + IDLE_SECONDS
    while True:
        found = gauges(port)
        if not (found["running"] or found["waiting"] or found["pages_held"] - found["pages_idle"]) or time.monotonic() > end:
            return found
        time.sleep(0.2)


def slope(values: list[tuple[float, float]]) -> float:
    """Median of the slopes between pairs of points (Theil 1950, Sen 1968), in units per second."""
    few = values[:: max(1, len(values) // 200)]
    found = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(few) for b in few[i + 1 :]]
    return statistics.median(found) if found else 0.0


@click.command("soak", cls=Command)
@click.argument("model", type=EdgeqFile())
@click.option("--seconds", type=click.FloatRange(5), default=600, show_default=True)
@click.option("--clients", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--context", type=click.IntRange(64), default=512, show_default=True)
def main(model: Path, seconds: float, clients: int, context: int) -> None:
    """Serve MODEL to clients of all kinds for a while, and say what grew."""
    with server(model, ("-c", str(context), "-t", "1", "--threads-prefill", "1")) as (process, port):
        end = time.monotonic() + seconds
        every = [Client(port, seed, end) for seed in range(clients)]
        threads = [threading.Thread(target=each.run) for each in every]
        # One connection of each kind first, so that what is made once is there.
        Client(port, -1, 0)._one()
        before = (idle(port), sample(process.pid))[1]
        for thread in threads:
            thread.start()
        began, seen = time.monotonic(), list[tuple[float, float]]()
        while time.monotonic() < end:
            seen.append((time.monotonic() - began, sample(process.pid)[0]))
            time.sleep(min(1.0, seconds / 60))
        for thread in threads:
            thread.join()
        last, after = idle(port), sample(process.pid)
    outcomes = sum((each.outcomes for each in every), Counter[str]())
    counted = [point for point in seen if point[0] > SETTLED * seconds]
    quarter = max(1, len(counted) // 4)
    growth = statistics.median(y for _, y in counted[-quarter:]) - statistics.median(y for _, y in counted[:quarter])
    failed = {name: count for name, count in outcomes.items() if name.startswith("FAILED")}
    held = last["pages_held"] - last["pages_idle"]
    wrong = {
        "failed": bool(failed),
        "memory": seconds >= JUDGED_SECONDS and growth > MAX_MIB,
        "descriptors": after[1] > before[1] + 1,
        "threads": after[2] > before[2] + 2,
        "pages": bool(held or last["running"] or last["waiting"]),
    }
    click.echo(
        json.dumps(
            {
                "seconds": seconds,
                "outcomes": dict(outcomes),
                "mib_first_last": [round(seen[0][1], 1), round(seen[-1][1], 1)],
                "mib_growth": round(growth, 2),
                "mib_per_hour": round(3600 * slope(counted), 1),
                "descriptors": [before[1], after[1]],
                "threads": [before[2], after[2]],
                "pages_held": held,
                "wrong": [name for name, bad in wrong.items() if bad],
            }
        )
    )
    if any(wrong.values()):
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
