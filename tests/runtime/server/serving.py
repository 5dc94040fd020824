"""A server in a thread of this process, and requests as bytes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edgeq.runtime import Model
from edgeq.runtime.server.app import Server
from edgeq.runtime.server.serve import bound, running
from edgeq.runtime.server.settings import Settings
from tests.waiting import wait_until

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Served:
    """`url` ends in the port.  `ask` sends a request and reads to the end of the answer."""

    def __init__(self, server: Server, port: int) -> None:
        self.server, self.port, self.url = server, port, f"http://127.0.0.1:{port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def raw(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of what comes back for `data`; status 0: the connection was closed without an answer."""
        with self.connect() as connection:
            connection.sendall(data)
            return answer(connection)

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"Host": f"127.0.0.1:{self.port}", "Content-Length": str(len(data)), "Connection": "close"}
        given |= {"Content-Type": "application/json"} if data else {}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        status, found, text = self.raw(
            f"{method or ('POST' if data else 'GET')} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + data
        )
        return status, found, json.loads(text) if "json" in found.get("content-type", "") else text

    def idle(self) -> bool:
        """Whether nothing runs or waits any more, and no page is held but by the prefix tree."""

        def nothing_left() -> bool:
            _, held, unused = self.server.scheduler.pages
            return not self.server.scheduler.busy and held == unused

        return wait_until(nothing_left)


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    try:
        while part := connection.recv(1 << 16):
            data += part
    except ConnectionError:
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split(" ")[1]) if head else 0, headers, body


@contextmanager
def serving(
    model: Model, *, cache_pages: int | None = None, on_failure: Callable[[], None] = print, **settings: Any
) -> Iterator[Served]:
    made = Settings(port=0, **settings)
    server = Server(model, made, cache_pages, on_failure)
    ports: list[int] = []
    http = running(server, ports.append)
    thread = threading.Thread(target=http.run, args=(bound(made),), daemon=True)
    thread.start()
    while not ports and thread.is_alive():
        time.sleep(0.01)
    try:
        yield Served(server, ports[0])
    finally:
        http.should_exit = True
        thread.join(120)
        assert not thread.is_alive()
