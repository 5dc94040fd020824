"""Connections that the server cannot have, and bodies that cannot be read to their end."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeq.runtime import Model

pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")

from edgeq.runtime.server import bodies, listener  # noqa: E402
from edgeq.runtime.server.listener import LOG_SECONDS, MAX_TURNED_AWAY, Listener  # noqa: E402
from tests.runtime.server.serving import TEMPLATE, Served, serving  # noqa: E402

CLIENTS = """
import socket, sys
sys.stdin.readline()
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60))
    held[-1].sendall(b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
found = []
for each in held:
    try:
        found.append(each.recv(4096).split(b" ")[1].decode())
    except (ConnectionError, IndexError):
        found.append("closed")
print(*found)
"""
"""Connections that are all held until each has its answer, from a process with descriptors of its own."""
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a16", threads=1, threads_prefill=1, context=512, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model) as found:
        yield found
        assert found.ask("/health")[0] == 200 and found.idle()


@pytest.fixture
def listening() -> Iterator[tuple[Listener, list[float], list[float]]]:
    """A socket, its clock, whose last entry is the time, and how long it has paused."""
    now, pauses = [0.0], list[float]()
    with Listener(socket.AF_INET, socket.SOCK_STREAM, lambda: now[-1], pauses.append) as made:
        made.bind(("127.0.0.1", 0))
        made.listen(128)
        made.setblocking(False)
        yield made, now, pauses


def scarce(monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], bool]) -> None:
    """`accept` of the system finds none unless `descriptors` says that one was given up."""
    accept = socket.socket.accept

    def none_left(self: socket.socket) -> object:
        if not descriptors():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", none_left)


def test_who_comes_when_descriptors_are_gone_is_told_so_and_the_log_has_a_line_a_minute(
    listening: tuple[Listener, list[float], list[float]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, now, pauses = listening
    scarce(monkeypatch, lambda: made._kept is None)
    with caplog.at_level(logging.ERROR, "edgeq.server"):
        for minute in range(3):
            now.append(minute * LOG_SECONDS)
            clients = [socket.create_connection(made.getsockname(), timeout=60) for _ in range(20)]
            with pytest.raises(BlockingIOError):
                made.accept()
            for each in clients:
                with each:
                    assert each.recv(4096).startswith(b"HTTP/1.1 503 ") and not each.recv(4096)
    # The door that finds nobody is one that was turned away as well.
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        f"{count} connections turned away; allow more: ulimit -n" for count in (1, 21, 21)
    ]
    assert not pauses and made._kept is not None
    monkeypatch.undo()
    with socket.create_connection(made.getsockname(), timeout=60):
        made.accept()[0].close()


def test_a_crowd_is_not_turned_away_at_once(
    listening: tuple[Listener, list[float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = listening
    scarce(monkeypatch, lambda: made._kept is None)
    clients = [socket.create_connection(made.getsockname(), timeout=60) for _ in range(MAX_TURNED_AWAY + 3)]
    for left in (3, 0):
        with pytest.raises(BlockingIOError):
            made.accept()
        assert made._turned_away >= MAX_TURNED_AWAY - 1 or not left
    assert all(each.recv(12) == b"HTTP/1.1 503" for each in clients)
    for each in clients:
        each.close()


def test_where_even_the_kept_descriptor_is_gone_it_waits(
    listening: tuple[Listener, list[float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, pauses = listening
    with monkeypatch.context() as nothing, socket.create_connection(made.getsockname(), timeout=60):
        nothing.setattr(listener, "_kept", lambda: None)
        scarce(nothing, lambda: False)
        for count in (1, 2):
            with pytest.raises(BlockingIOError):
                made.accept()
            assert len(pauses) == count
        nothing.undo()
        made.accept()[0].close()
    monkeypatch.setattr(socket.socket, "accept", lambda self: (_ for _ in ()).throw(OSError(errno.EBADF, "closed")))
    with pytest.raises(OSError, match="closed"):
        made.accept()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no limits of a process")
def test_a_server_without_descriptors_goes_on(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """asyncio wrote 36 MB of tracebacks in minutes."""
    import resource

    with serving(model) as served, caplog.at_level(logging.ERROR):
        assert served.ask("/health")[0] == 200
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        command = [sys.executable, "-c", CLIENTS, str(served.port), "120"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
            used = {int(name) for name in os.listdir("/dev/fd")}
            free = [number for number in range(1000) if number not in used]
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (free[10], hard))
                text, _ = clients.communicate("go\n")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        found = Counter(text.split())
        assert sum(found.values()) == 120 and found["503"] + found["closed"] >= 100 and set(found) <= {"200", "503", "closed"}
        assert served.ask("/health")[0] == 200 and served.ask("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    assert len(caplog.records) <= 2 and "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "chunks",
    [b"ZZ", b"ZZ\r\n", b"-1", b"5\n{}", b"0x5", b"5\r{", b"g", b"f" * 21, b"5;a\0", b"5 5", b"\r\n2", b"f" * 16 + b"\r\n{}"]
    + [b"2\r\n{}\r\nZZ", b"2\r\n{}ZZ", b"2\r\n{}\r\n\r\n", b"2\r\n{}\r\n0\r\nno header\r\n\r\n"],
)
def test_a_bad_size_of_a_chunk_ends_at_once(served: Served, monkeypatch: pytest.MonkeyPatch, chunks: bytes) -> None:
    """It used to be told after the time limit of a body: h11 waits for the end of the line."""
    monkeypatch.setattr(bodies, "BODY_SECONDS", 1e6)
    status, headers, body = served.raw(CHUNKED + chunks)
    assert status == 400 and b"invalid_http" in body and headers["connection"] == "close"


def test_chunks_in_pieces_are_read(served: Served) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    sent = b"%x;name=value\r\n%b\r\n%X \r\n%b\r\n0\r\nX-Trailer: a\r\n\r\n" % (10, body[:10], len(body) - 10, body[10:])
    for size in (1, 3, 1000):
        with served.connect() as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(CHUNKED)
            for at in range(0, len(sent), size):
                client.sendall(sent[at : at + size])
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
