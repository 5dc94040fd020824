"""What an attacker does to `edgeq serve` besides single bad requests: `python -m tests.runtime.server.siege FILE.edgeq`.

One server with few descriptors is sent malformed HTTP, expensive schemas by many clients at once, and more connections than it
can have.  A finding is a server error, a request that is never answered, a server that has ended, or a log that grows.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.mutation import changed_bytes

DESCRIPTORS = 160
SECONDS = 600.0
PLAIN = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
SIZES = (
    b"ZZ",
    b"-1",
    b"0x5",
    b"5 5",
    b"5\n",
    b"g",
    b"f" * 21,
    b"f" * 17 + b"\r\n",
    b"5;a=b\r\n",
    b"\r\n",
    b"2\r\n{}ZZ",
    b"5\r",
)
HOSTS = ("[fe80::1%evil.com]", "[::1%25lo]", "evil.example", "0.0.0.0", "localhost.", "[::]", "a@localhost", "127.1", "")
ENDLESS = "Content-Length: 99999999", "Content-Length: -1", "Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: gzip"


def exchange(port: int, data: bytes) -> tuple[int, bytes]:
    """Status and body of what comes back; 0: nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        found = bytearray()
        try:
            connection.sendall(data)
            while part := connection.recv(1 << 16):
                found += part
        except ConnectionError:
            pass
    head, _, body = bytes(found).partition(b"\r\n\r\n")
    return (int(head.split(b" ", 2)[1]) if head else 0), body


def request(fields: object, host: str = "localhost", path: str = "/v1/chat/completions") -> bytes:
    body = json.dumps(fields).encode()
    lines = f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", f"Content-Length: {len(body)}"
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def malformed(rng: random.Random) -> bytes:
    """A request that is not HTTP, or not to this server, in one of five ways; none waits for more."""
    kind, sound = rng.randrange(5), request(PLAIN)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if kind == 0:
        # What follows ends a chunk that is sound.
        size = rng.choice((b"", b"2\r\n{}\r\n")) + rng.choice(SIZES) + b"\r\n"
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\0" * 64 + b"\r\n"
    if kind == 1:
        return request(PLAIN, rng.choice(HOSTS))
    if kind == 2:
        return head + rng.choice(ENDLESS[1:]).encode() + b"\r\n\r\n{}"
    if kind == 3:
        # Complete, so that nothing is waited for.
        return changed_bytes(rng, sound.partition(b"\r\n")[0]) + b"\r\n\r\n\r\n\0\r\n\r\n"
    return request(PLAIN, path=rng.choice(("/../etc/passwd", "/v1/%00", "//", "/v1/models/" + "a" * 40_000, "/\xe9", "*")))


def expensive(number: int) -> dict[str, object]:
    """A schema that takes seconds and is refused."""
    patterns = [f".*{chr(97 + i)}.{{{20 + i}}}.*" for i in range(20)]
    schema = {"type": "string", "minLength": number, "allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    return {**PLAIN, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def well(port: int) -> bool:
    return exchange(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] == 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=2000, help="malformed requests")
    parser.add_argument("--schemas", type=int, default=64, help="clients with expensive schemas at once")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = subprocess.Popen(
        [sys.executable, "-m", "edgeq", "serve", str(asked.file), "--port", "0", "--quiet", "--queue", "64"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard)),
    )
    log = list[str]()
    try:
        assert process.stderr is not None
        while not (found := re.search(r"at http://[^/ ]+:(\d+)/v1", process.stderr.readline())):
            assert process.poll() is None, "the server did not begin"
        threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
        port = int(found[1])
        siege(port, asked.count, asked.schemas, asked.connections, asked.seed)
        assert process.poll() is None and well(port)
        lines = Counter(line.split(" ", 2)[-1].rstrip() for line in log)
        print(f"log: {len(log)} lines, {sum(map(len, log))} bytes", *lines, sep="\n  ")
        assert sum(map(len, log)) < 10_000, "the log grows"
    finally:
        process.kill()
        process.wait()


def siege(port: int, count: int, schemas: int, connections: int, seed: int) -> None:
    statuses = Counter[int]()
    for index in range(count):
        data = malformed(random.Random(f"siege {seed} {index}"))
        status, _ = exchange(port, data)
        assert status < 500, data[:300]
        statuses[status] += 1
    assert well(port)
    print(f"malformed: {count}, statuses {dict(sorted(statuses.items()))}")
    with ThreadPoolExecutor(schemas) as clients:
        waiting = [clients.submit(exchange, port, request(expensive(number))) for number in range(schemas)]
        seconds = list[float]()
        while not all(each.done() for each in waiting):
            began = time.monotonic()
            assert exchange(port, request(PLAIN))[0] == 200
            seconds.append(time.monotonic() - began)
        refused = Counter(each.result()[0] for each in waiting)
    assert set(refused) <= {400, 503}, refused
    print(
        f"schemas: {schemas} at once, statuses {dict(refused)}; {len(seconds)} plain requests beside them took a median of "
        f"{statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s"
    )
    with ThreadPoolExecutor(1) as clients:
        again = clients.submit(exchange, port, request(expensive(0)))
        assert again.result()[0] in (400, 503)
    held = list[socket.socket]()
    try:
        for _ in range(connections):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=SECONDS))
    finally:
        for each in held:
            each.close()
    # The server has to see that they are closed before it has a place again.
    until = time.monotonic() + SECONDS
    while not well(port):
        assert time.monotonic() < until, "the server does not come back"
    print(f"connections: {connections} held at once, with {DESCRIPTORS} descriptors")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    main()
