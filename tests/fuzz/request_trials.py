"""Requests that no client sends, over a socket to a server: an answer or a client's error, and a server that goes on."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

from mutation import VALUES, changed_bytes, changed_json

TALK: list[Any] = [
    {"role": "system", "content": "Short."},
    {"role": "user", "content": [{"type": "text", "text": "<|end|> Hello"}]},
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}}}}
DRAWN: dict[str, Any] = {
    **{"model": "edgeq", "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    **{
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 2.5},
        "seed": 3,
        "n": 2,
    },
    **{"stop": ["x", "\n"], "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "user": "u"},
}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {**DRAWN, "messages": TALK, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low"}),
    ("/v1/chat/completions", {"messages": TALK, "max_completion_tokens": 2, "chat_template_kwargs": {"a": True}}),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"}),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 4, "response_format": SCHEMA}),
    ("/v1/completions", {**DRAWN, "prompt": "import os", "logprobs": 2}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8]], "max_tokens": 2, "echo": False}),
    ("/v1/messages", {"model": "edgeq", "max_tokens": 3, "messages": TALK[1:], "system": "Short.", "stop_sequences": ["x"]}),
    ("/v1/messages", {"max_tokens": 2, "messages": TALK[1:], "stream": True, "temperature": 0.3, "top_k": 4}),
    ("/v1/messages/count_tokens", {"messages": TALK[1:]}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "instructions": "Short.", "stream": True}),
    ("/v1/responses", {"input": TALK, "max_output_tokens": 2, "text": {"format": {"type": "text"}}}),
)
HOST = "127.0.0.1"
OTHERS = (*VALUES, "edgeq", "user", "data:image/png;base64,AAAA", "http://127.0.0.1/", "<|end|>" * 9, [[1] * 9] * 9, 2.5, 50)
SECONDS, PATIENCE = 60.0, 0.3
"""For an answer; for one to a request whose head may promise more than is sent: a server waits for the rest."""


def sent(rng: random.Random) -> tuple[bytes, bool]:
    """A request with something wrong in its fields, in the bytes of its body, or before it; whether what is before is sound."""
    path, fields = rng.choice(REQUESTS)
    where = rng.random()
    if where < 0.7:
        fields = changed_json(rng, fields, OTHERS)
    body = json.dumps(fields).encode()
    if 0.6 < where < 0.9:
        body = changed_bytes(rng, body)
    lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode()
    if where > 0.85:
        head = changed_bytes(rng, head)
    return head + body, where <= 0.85


def request(rng: random.Random, port: int) -> str:
    """Send one and read to the end; what came, in a word."""
    data, sound = sent(rng)
    with socket.create_connection((HOST, port), timeout=SECONDS if sound else PATIENCE) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR) if rng.random() < 0.05 else None
            found = bytearray()
            while part := connection.recv(1 << 16):
                found += part
        except ConnectionError:
            return "closed"
        except TimeoutError:
            assert not sound, f"no answer: {data[:300]!r}"
            return "waits"
    if not found:
        return "closed"
    head, _, body = bytes(found).partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    assert status < 500, f"{head[:300]!r} {body[:300]!r}"
    if status == 200:
        text = body.decode()
        assert "server_error" not in text, text[-300:]
        return "answered"
    if b"application/json" in head:
        error = json.loads(body)["error"]
        assert error["message"] and error["code"] and error["type"], body
    return f"refused {status // 100}xx"


class Requests:
    """Trials over one server, which has to be well after each."""

    def __init__(self, port: int, kept: object = None) -> None:
        """`kept`: what ends the server when it is dropped."""
        self._port, self._kept = port, kept

    def trial(self, rng: random.Random) -> str:
        found = request(rng, self._port)
        if rng.random() < 0.05:
            with socket.create_connection((HOST, self._port), timeout=SECONDS) as connection:
                connection.sendall(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                assert b" 200 " in connection.recv(1 << 16).partition(b"\r\n")[0]
        return found
