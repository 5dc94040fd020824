"""What strangers send: each attack has its answer, and the server goes on as before."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
import typing
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import InputError
from edgeq.runtime import Model
from edgeq.system import machine

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")

from edgeq.runtime.server import connection  # noqa: E402
from edgeq.runtime.server.interfaces.fields import Chat, Completion, decoded  # noqa: E402
from edgeq.runtime.server.interfaces.messages import Messages  # noqa: E402
from edgeq.runtime.server.serve import cache_pages, check_address  # noqa: E402
from edgeq.runtime.server.settings import Settings, read_keys  # noqa: E402
from tests.runtime.server.serving import TEMPLATE, Served, answer, serving  # noqa: E402

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "def f("}]
KEYS = {hashlib.sha256(f"key-{name}".encode()).digest(): name for name in ("ann", "bob")}


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a16", threads=1, threads_prefill=1, context=512, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model, names=("tiny",), origins=("https://app.example",), allowed_hosts=("edge.lan",)) as found:
        yield found
        assert found.ask("/health")[0] == 200 and found.idle()


@pytest.fixture(scope="module")
def locked(model: Model) -> Iterator[Served]:
    with serving(model, keys=KEYS) as found:
        yield found


def refused(served: Served, status: int, code: str, *arguments: Any, **headers: Any) -> dict[str, Any]:
    """The error; of a body the connection closes with it."""
    found, sent, body = served.ask(*arguments, **headers)
    assert (found, body["error"]["code"]) == (status, code), body
    assert set(body["error"]) == {"message", "type", "param", "code"} and "Traceback" not in str(body)
    return dict(body["error"])


def posted(path: str, body: bytes) -> bytes:
    """The head of a request for JSON."""
    lines = "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}"
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()


# Connections


def test_one_that_says_nothing_or_little_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
    for parts in ([], [b"GET / HTT"], [b"G", b"E", b"T"] * 9):
        with served.connect() as slow:
            for part in parts:
                try:
                    slow.sendall(part)
                except ConnectionError:
                    break
                time.sleep(0.05)
            assert answer(slow)[0] in (0, 400)
            assert served.ask("/health")[0] == 200


def test_a_body_that_does_not_come_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.runtime.server import bodies

    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n"
    status, _, body = served.raw(head.encode() + b'{"mess')
    assert status == 408 and json.loads(body)["error"]["code"] == "body_too_slow"


def test_three_hundred_silent_connections_leave_a_place(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # No place comes of the time limit.
    monkeypatch.setattr(connection, "HEADER_SECONDS", 1e6)
    held = list[socket.socket]()
    try:
        for _ in range(300):
            held.append(served.connect())
        assert served.ask("/health")[0] == 200
    finally:
        for each in held:
            each.close()


def test_a_reader_that_does_not_read_is_left(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.3)
    body = json.dumps(
        {"prompt": "import ", "max_tokens": 500, "ignore_eos": True, "n": 8, "stream": True, "logprobs": 5}
    ).encode()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect(("127.0.0.1", served.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        lazy.sendall(head.replace("Host: a", "Host: localhost").encode() + body)
        assert served.idle()
    assert served.ask("/health")[0] == 200


def test_clients_that_come_and_leave_leave_nothing(served: Served) -> None:
    body = json.dumps({"prompt": "import " * 30, "max_tokens": 100, "stream": True}).encode()
    assert served.idle()
    threads = threading.active_count()
    for i in range(100):
        with served.connect() as each:
            each.sendall(posted("/v1/completions", body) + body[: len(body) * (i % 3 + 1) // 3])
    assert served.idle() and threading.active_count() <= threads + 2


# Bodies


def test_too_large_is_told_before_it_is_read(served: Served) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for declared in ("Content-Length: 1000000000\r\n\r\n", "Content-Length: " + "9" * 40 + "\r\n\r\n"):
        status, headers, _ = served.raw((head + declared).encode())
        assert status in (400, 413) and headers["connection"] == "close"
    with served.connect() as endless:
        endless.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
        sent, chunk = 0, b"10000\r\n" + b"a" * 65536 + b"\r\n"
        try:
            for _ in range(2000):
                endless.sendall(chunk)
                sent += 65536
        except OSError:
            pass
        assert sent < 64 << 20


def test_headers_that_are_too_many_or_contradict_each_other(served: Served) -> None:
    start = "GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for lines, statuses in {
        "X-Long: " + "a" * 200_000 + "\r\n": (400, 431),
        "".join(f"X-{i}: a\r\n" for i in range(6000)): (400, 431),
        "Content-Length: 1\r\nContent-Length: 2\r\n": (400,),
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n": (400,),
        "X-Bad: a\0b\r\n": (400,),
        "Host: localhost\r\n": (400, 403),
    }.items():
        status, headers, body = served.raw((start + lines + "\r\n").encode())
        assert status in statuses and headers["connection"] == "close" and "error" in json.loads(body), lines[:40]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":' * 100_000,
        b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"messages": [], "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"[]",
        b"",
        b'{"prompt": "a", "x": ' + b"[" * 70 + b"]" * 70 + b"}",
    ],
)
def test_what_is_no_sound_json_is_refused(served: Served, body: bytes) -> None:
    status, _, found = served.ask("/v1/completions", body, "POST", Content_Type="application/json")
    assert status == 400 and found["error"]["code"] in ("invalid_json", "invalid_value"), found


def test_the_last_of_two_equal_keys_counts_and_many_keys_are_ignored(served: Served) -> None:
    assert decoded(b'{"a": 1, "a": 2}') == {"a": 2}
    many = {"prompt": "a", "max_tokens": 1} | {f"k{i}\r\nx": i for i in range(1000)}
    status, headers, _ = served.ask("/v1/completions", many)
    assert status == 200 and headers["x-edgeq-ignored"] == "1000"
    status, headers, _ = served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, "b ad\r\n": 1, "good": 2})
    assert status == 200 and headers["x-edgeq-ignored"] == "good"


def wrong_values(field: Any) -> Iterator[Any]:
    """Values of the wrong type or out of bounds for a field, by its type."""
    yield from ({"a": {"b": 1}}, [[[]]], -(1 << 62), 1 << 63, 1e300)
    if bool not in typing.get_args(field) and field is not bool:
        yield True
    if "str" not in str(field):
        yield from ("", "a" * 1000)


FIELDS = [(kind, name) for kind in (Chat, Completion, Messages) for name in kind.__struct_fields__]
ALLOWED = {
    "logit_bias",
    "response_format",
    "output_config",
    "chat_template_kwargs",
    "prompt",
    "seed",
    "ignore_eos",
    "stream",
    "echo",
    "logprobs",
}


def test_every_field_has_its_type_and_its_bounds(served: Served) -> None:
    """Generated from the types: whatever a field is given, the answer is one of 200 or 400 with the field's name."""
    path = {Chat: CHAT, Completion: "/v1/completions", Messages: "/v1/messages"}
    sound: dict[Any, dict[str, Any]] = {
        Chat: {"messages": ASKED, "max_tokens": 1},
        Completion: {"prompt": "a", "max_tokens": 1},
        Messages: {"messages": ASKED, "max_tokens": 1},
    }
    tried = 0
    for kind, name in FIELDS:
        for value in wrong_values(typing.get_type_hints(kind, include_extras=True)[name]):
            status, _, body = served.ask(path[kind], sound[kind] | {name: value})
            tried += 1
            assert status in (400, 404) or (status == 200 and name in ALLOWED | {"model", "reasoning_effort", "system"}), (
                name,
                value,
            )
            if status == 400:
                assert name in f"{body['error']['param']} {body['error']['message']}", (name, value, body)
    assert tried > 300 and served.idle()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": ASKED * 1025}, "invalid_value"),
        ({"messages": []}, "invalid_value"),
        ({}, "missing_field"),
        ({"messages": [{"role": "user", "content": "word " * 700_000}]}, "context_length_exceeded"),
        ({"messages": ASKED, "stop": ["a"] * 17}, "invalid_value"),
        ({"messages": ASKED, "stop": [""]}, "invalid_value"),
        ({"messages": ASKED, "n": 9}, "invalid_value"),
        ({"messages": ASKED, "logit_bias": {"99999": 1}}, "invalid_value"),
        ({"messages": ASKED, "logit_bias": {"-5": 1}}, "invalid_value"),
        ({"messages": ASKED, "min_tokens": 9, "max_tokens": 3}, "invalid_value"),
        ({"messages": ASKED, "top_logprobs": 3}, "invalid_value"),
        ({"messages": ASKED, "stream_options": {}}, "invalid_value"),
        ({"messages": ASKED, "repetition_penalty": 0.01}, "invalid_value"),
        ({"messages": ASKED, "chat_template_kwargs": {"messages": "x"}}, "invalid_value"),
        ({"messages": ASKED, "chat_template": "{{ 1 }}"}, "unsupported_parameter"),
        ({"messages": ASKED, "tools": [{"type": "function"}] * 129}, "invalid_value"),
        ({"messages": ASKED, "tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter"),
        ({"messages": ASKED, "response_format": {"type": "xml"}}, "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "invalid_value"),
        ({"messages": [{"role": "function", "content": "x"}]}, "invalid_value"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(served: Served, body: dict[str, Any], code: str) -> None:
    refused(served, 400, code, CHAT, body)


def test_prompts_of_completions_have_bounds(served: Served) -> None:
    for prompt in ("", [], [[]], [1, "a"], ["a", [1]], [1 << 40], [-1], [True], [1.5], ["a"] * 9, [None], {"a": 1}):
        assert served.ask("/v1/completions", {"prompt": prompt, "max_tokens": 1})[0] == 400, prompt
    message = refused(served, 400, "context_length_exceeded", "/v1/completions", {"prompt": [5] * 513})["message"]
    assert message.startswith("This model's maximum context length is 512 tokens.")


def test_other_clients_are_answered_while_a_body_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.runtime.server import bodies

    decoded, begun, asked = bodies.decoded, threading.Event(), threading.Event()

    def slow(body: bytearray) -> Any:
        begun.set()
        assert asked.wait(120), "another client was not answered meanwhile"
        return decoded(body)

    monkeypatch.setattr(bodies, "decoded", slow)
    statuses = list[int]()
    reading = threading.Thread(target=lambda: statuses.append(served.ask(CHAT, {"messages": []})[0]))
    reading.start()
    assert begun.wait(120) and served.ask("/health")[0] == 200
    asked.set()
    reading.join()
    assert statuses == [400]


# Pictures


def bomb(edge: int) -> bytes:
    """A PNG of edge x edge black pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = zlib.compressobj(9)
    data = b"".join(lines.compress(bytes(edge // 8 + 1)) for _ in range(edge)) + lines.flush()
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", edge, edge, 1, 0, 0, 0, 0))
        + chunk(b"IDAT", data)
        + chunk(b"IEND", b"")
    )


def test_pictures_are_refused_where_the_model_does_not_see(served: Served) -> None:
    picture = f"data:image/png;base64,{base64.b64encode(bomb(8)).decode()}"
    for url, code in {
        picture: "invalid_image",
        "http://169.254.169.254/latest": "image_url_not_allowed",
        "file:///etc/passwd": "image_url_not_allowed",
        "data:text/html;base64,PGI+": "invalid_image",
        "data:image/svg+xml;base64,PHN2Zz4=": "invalid_image",
        "data:image/png;base64,%%%": "invalid_image",
        "data:image/png;base64,R0lGODlhAQABAAAAACw=": "invalid_image",
    }.items():
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        refused(served, 400, code, CHAT, {"messages": [message]})


# Who may ask


def test_host_origin_and_key_are_looked_at_before_anything_else(served: Served, locked: Served) -> None:
    for host in (
        "evil.example",
        "0.0.0.0:80",
        "a/?x=localhost",
        "localhost.evil.example",
        "",
        "localhost@evil",
        "[::]",
        "[::ffff:0.0.0.0]",
        "[fe80::1%evil.com]",
        "[fe80::1%evil.com]:8080",
        "[::1%25lo]",
        "fe80::1%eth0",
    ):
        assert served.ask("/health", Host=host)[0] in (400, 403), host
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1", "[::1]:8080", "192.168.1.7", "edge.lan:8080"):
        assert served.ask("/health", Host=host)[0] == 200, host
    body = json.dumps({"prompt": "a"}).encode()
    refused(served, 403, "forbidden_origin", "/v1/completions", body, Origin="https://evil.example", Content_Type="text/plain")
    refused(served, 403, "forbidden_origin", "/v1/models", Origin="null")
    refused(served, 415, "unsupported_media_type", "/v1/completions", body, Content_Type="text/plain")
    status, headers, _ = served.ask("/v1/models", Origin="https://app.example")
    assert status == 200 and headers["access-control-allow-origin"] == "https://app.example"
    assert served.ask("/v1/models", method="OPTIONS", Origin="https://app.example")[0] == 204
    assert served.ask("/v1/models", Origin=f"http://127.0.0.1:{served.port}")[0] == 200


def test_every_path_but_health_needs_a_key(locked: Served) -> None:
    right = {"Authorization": "Bearer key-ann"}
    for path in (
        "/v1/models",
        "/metrics",
        "/v1/chat/completions",
        "/models",
        "/nothing",
        "/v1/models/../health",
        "//health",
        "/health/",
    ):
        refused(locked, 401, "invalid_api_key", path)
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic key-ann"},
        {"Authorization": "Bearer " + "k" * 10_000},
        {"Authorization": "Bearer key-\xe4nn"},
        {"Authorization": "Bearer key-ann", "x-api-key": "key-bob"},
        {"x-api-key": ""},
    ):
        refused(locked, 401, "invalid_api_key", "/v1/models", **headers)
    refused(locked, 401, "invalid_api_key", "/v1/models?api_key=key-ann&key=key-ann")
    assert locked.ask("/v1/models", **right)[0] == locked.ask("/v1/models", **{"x-api-key": "key-bob"})[0] == 200
    assert locked.ask("/health")[0] == 200


def test_a_prefix_is_found_by_its_owner_alone(locked: Served) -> None:
    body = {"prompt": "".join(f"secret {i}\n" for i in range(60)), "max_tokens": 1}

    def cached(name: str) -> int:
        answer = locked.ask("/v1/completions", body, Authorization=f"Bearer key-{name}")[2]
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("ann") == 0 and cached("ann") > 0 and cached("bob") == 0


def test_a_server_that_others_reach_asks_for_a_key(tmp_path: Path, model: Model) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "edge.lan"):
        with pytest.raises(InputError, match="no key is asked for"):
            check_address(Settings(host=host), without_keys=False)
        check_address(Settings(host=host, keys=KEYS), without_keys=False)
    check_address(Settings(host="::1"), without_keys=False)
    file = tmp_path / "keys"
    file.write_text("ann: key-ann \n# no key\nbob:key:bob\n")
    file.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        read_keys(file, None)
    file.chmod(0o600)
    settings = Settings(keys=read_keys(file, "third"))
    assert [settings.owner(key) for key in (b"key-ann", b"key:bob", b"third", b"bob", b"")] == [
        "ann",
        "bob",
        "default",
        None,
        None,
    ]
    file.write_text("only-a-name\n")
    with pytest.raises(InputError, match="line 1 is not NAME:KEY"):
        read_keys(file, None)
    file.write_text("anna:one\nbert: one\n")
    with pytest.raises(InputError, match="line 2: the key of 'bert' is that of 'anna' too"):
        read_keys(file, None)
    with pytest.raises(InputError, match="less than a context"):
        cache_pages(model, 1000, 4)


# What a client writes is text


def test_literals_of_control_tokens_are_text(served: Served, model: Model) -> None:
    literal = next(iter(model.text.added))
    control = model.text.encode_part(literal)
    assert len(control) == 1
    for message in ({"role": "user", "content": literal}, {"role": "user", "content": [{"type": "text", "text": literal}]}):
        tokens = model.chat_prompt([{"role": "user", "content": literal}]).tokens
        found = served.ask(CHAT, {"messages": [message], "max_tokens": 1})[2]["usage"]["prompt_tokens"]
        assert found == len(tokens) and control[0] not in tokens


def test_nothing_of_a_request_comes_into_the_log_but_its_path(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "edgeq.server"):
        served.ask("/v1/completions", {"prompt": "sesame", "max_tokens": 1, "user": "sesame"}, X_Note="sesame")
        served.ask("/a%0d%0ab%1b[31mc")
    assert "sesame" not in caplog.text and len(caplog.records) == 2
    assert not re.search(r"[\x00-\x1f\x7f]", caplog.records[1].getMessage())


def test_memory_comes_back(served: Served) -> None:
    def resident() -> int:
        return machine.process_memory().get("VmRSS", 0)

    served.ask(CHAT, {"messages": [{"role": "user", "content": "a " * 1000}]})
    before = resident()
    for _ in range(5):
        served.ask("/v1/completions", b'{"prompt": "' + b"a" * (3 << 20) + b'"}')
        served.ask("/v1/completions", b"[" * (3 << 20), "POST", Content_Type="application/json")
    assert resident() - before < 80 << 20
    assert served.idle()
