"""Clients that leave at the wrong moment, and connections that hold what others need."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from edgeq.format.container import ModelFile
from edgeq.runtime import Model

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")

from edgeq.runtime.server import app, bodies, connection, watch  # noqa: E402
from edgeq.runtime.server.interfaces.answers import RequestAnswer  # noqa: E402
from tests.runtime.server.serving import TEMPLATE, Served, serving  # noqa: E402

KEYS = {hashlib.sha256(b"key-ann").digest(): "ann"}


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a16", threads=1, threads_prefill=1, context=512, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model) as found:
        yield found
        assert found.ask("/health")[0] == 200 and found.idle()


def posted(path: str, body: bytes, *lines: str) -> bytes:
    given = "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}", *lines
    return "\r\n".join([f"POST {path} HTTP/1.1", *given, "", ""]).encode() + body


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_is_set_ends_no_stream(served: Served, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    body = json.dumps({"prompt": "import os", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    with served.connect() as connection:
        connection.sendall(posted("/v1/completions", body, "Connection: close"))
        found, real = connection.recv(1 << 12), time.time
        monkeypatch.setattr(time, "time", lambda: real() + 86_400 * days)
        while part := connection.recv(1 << 16):
            found += part
    assert b"[DONE]" in found and b'"error"' not in found and served.ask("/health")[0] == 200
    assert served.ask("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_a_file_system_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does for a while; what was written to the file is found afterwards."""
    looks, changed = [OSError(errno.ESTALE, "stale file handle"), True, OSError(errno.EIO, "i/o error"), False], list[int]()

    class File:
        path = Path("model.edgeq")

        @property
        def is_intact(self) -> bool:
            found = looks.pop(0)
            if isinstance(found, OSError):
                raise found
            return bool(found)

    monkeypatch.setattr(watch, "SECONDS", 0)
    asyncio.run(watch.watch(cast(ModelFile, File()), lambda: changed.append(len(looks))))
    assert changed == [0]


def held(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[threading.Event, threading.Event]:
    """Stop a function of the application before it returns: set when it is there, and to be set when it may go on."""
    there, go_on, function = threading.Event(), threading.Event(), getattr(app, name)

    def stopping(*arguments: Any) -> Any:
        found = function(*arguments)
        there.set()
        assert go_on.wait(120)
        return found

    monkeypatch.setattr(app, name, stopping)
    return there, go_on


def test_a_client_that_left_before_its_stream_began_leaves_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    read, gone = held(monkeypatch, "completion_jobs")
    left, lost = threading.Event(), connection.Connection.connection_lost

    def leaving(self: connection.Connection, error: Exception | None) -> None:
        lost(self, error)
        left.set()

    monkeypatch.setattr(connection.Connection, "connection_lost", leaving)
    generated = served.server.scheduler.totals.generated_tokens
    with served.connect() as client:
        client.sendall(
            posted("/v1/completions", b'{"prompt": "import ", "stream": true, "max_tokens": 400, "ignore_eos": true}')
        )
        assert read.wait(120)
    assert left.wait(120)
    gone.set()
    time.sleep(0.1)
    assert served.idle() and not served.server.owner._answering
    assert served.server.scheduler.totals.generated_tokens - generated < 200


def test_only_as_many_bodies_are_open_as_there_are_threads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON takes thirty times the memory of its text: a request is read to its end before the next one is begun."""
    decoded, fields, lock, found = bodies.decoded, bodies.fields, threading.Lock(), list[int]()
    opened = 0

    def opening(body: bytes) -> Any:
        nonlocal opened
        with lock:
            opened += 1
            found.append(opened)
        return decoded(body)

    def closing(*arguments: Any) -> Any:
        nonlocal opened
        with lock:
            opened -= 1
        return fields(*arguments)

    monkeypatch.setattr(bodies, "decoded", opening)
    monkeypatch.setattr(bodies, "fields", closing)
    body = b'{"prompt": "a", "max_tokens": 1, "x": [' + b"{}," * 20_000 + b"0]}"
    threads = [threading.Thread(target=served.ask, args=("/v1/completions", body)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and max(found) <= 2


def test_bodies_together_have_a_limit_that_small_ones_pass(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "x": "' + b"x" * 200_000 + b'"}'
    with monkeypatch.context() as patched:
        patched.setattr(bodies, "MAX_BODIES", 0)
        status, headers, found = served.ask("/v1/completions", body)
        assert (status, found["error"]["code"]) == (503, "server_overloaded") and headers["retry-after"]
        assert headers["connection"] == "close"
        assert served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert served.ask("/v1/completions", body)[0] == 200
    assert served.ask("/v1/completions", b"{")[0] == 400 and served.server.bodies.nbytes == 0


def test_a_stream_keeps_nothing_of_what_it_has_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = list[RequestAnswer]()

    def recorded(*arguments: Any, **options: Any) -> RequestAnswer:
        answers.append(RequestAnswer(*arguments, **options))
        return answers[-1]

    monkeypatch.setattr(app, "RequestAnswer", recorded)
    asked = {"prompt": "import ", "max_tokens": 20, "seed": 1, "logprobs": 3, "ignore_eos": True}
    whole = served.ask("/v1/completions", asked)[2]["choices"][0]
    streamed = served.ask("/v1/completions", asked | {"stream": True})[2].decode()
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.split("\n") if line.startswith("data: {")]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [at for c in chunks if c["logprobs"] for at in c["logprobs"]["text_offset"]] == whole["logprobs"]["text_offset"]
    kept, sent = (answer.choices[0] for answer in answers)
    assert len(kept.logprobs) == 20 == sent.tokens and not sent.logprobs and kept.events and not sent.events


def test_bodies_that_never_come_leave_a_place(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 8)
    slow = list[socket.socket]()
    try:
        for _ in range(12):
            slow.append(served.connect())
            slow[-1].sendall(posted("/v1/completions", b"a" * 99)[:-9])
        time.sleep(0.2)
        assert served.ask("/health")[0] == 200
    finally:
        for each in slow:
            each.close()


def test_pages_of_other_origins_can_ask_before_they_send_their_key(model: Model) -> None:
    with serving(model, keys=KEYS, origins=("https://app.example",)) as served:
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        status, headers, _ = served.ask("/v1/chat/completions", method="OPTIONS", **asked)
        assert status == 204 and headers["access-control-allow-origin"] == "https://app.example"
        assert served.ask("/v1/models", Origin="https://app.example")[0] == 401
        assert served.ask("/v1/models", method="OPTIONS")[0] == 401


def test_a_body_that_breaks_off_after_its_answer_is_no_failure(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        told = b""
        while b'"ok"' not in told:
            told += client.recv(1 << 16)
        client.sendall(b"ZZ\r\n\r\n")
        assert not client.recv(1 << 16)
    assert "Traceback" not in caplog.text and "data_received" not in caplog.text


def test_mutated_requests_have_an_answer_or_a_clients_error(
    model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A small share of what `make fuzz` sends."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "fuzz"))
    import request_trials

    path = model_path("tiny-llama", bits=4, group_size=32)
    short = Model.load(path, mode="a16", threads=1, threads_prefill=1, context=96, chat_template=TEMPLATE)
    with serving(short) as served:
        trials, outcomes = request_trials.Requests(served.port), Counter[str]()
        for index in range(120):
            outcomes[trials.trial(Random(f"request 1 {index}"))] += 1
        assert served.idle()
    assert outcomes["answered"] > 8 and outcomes["refused 4xx"] > 60 and "Traceback" not in caplog.text


def test_a_broken_body_has_one_answer(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert served.raw(head + b"ZZ\r\n\r\n")[0] == 400
    assert served.ask("/health")[0] == 200 and "Traceback" not in caplog.text
