"""A server from its start to its end."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import uvicorn

from edgeq.errors import InputError
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.model import Model
from edgeq.runtime.sampling import Sampling
from edgeq.runtime.server.app import Server
from edgeq.runtime.server.connection import Connection
from edgeq.runtime.server.listener import Listener
from edgeq.runtime.server.settings import Settings, is_loopback
from edgeq.runtime.session.context_size import context_pages
from edgeq.system import machine
from edgeq.targets.rows import PAGE

FAILED = 70
"""The exit code after the model has failed: a supervisor starts a dead process again, and sees no dead thread."""
RESERVE = 512 << 20
"""Bytes of memory that the cache leaves to others."""
KEEP_ALIVE_SECONDS = 15
WARM_TOKENS = 256


def cache_pages(model: Model, memory: int | None, seats: int) -> int:
    """Cache pages that `memory` bytes hold; None: what is available but for the file and 512 MiB, for a context of every seat
    and as much again of texts that have ended.

    InputError: less than one context.
    """
    page, context = model.position_bytes * PAGE, context_pages(model.graph, model.program.options, model.context)
    if memory is None:
        left = machine.available_bytes() - model.file.path.stat().st_size - RESERVE
        return max(context, min(left // page, 2 * seats * context))
    if memory < context * page:
        raise InputError(
            f"a cache of {memory >> 20} MiB is less than a context of {model.context} positions, which takes "
            f"{context * page / (1 << 20):.1f} MiB; choose a shorter `context`"
        )
    return memory // page


def warm(model: Model) -> None:
    """Compile what is left to compile, and measure how fast prompts run; then give memory back that loading and this took."""
    # It goes through the vocabulary.
    model.text.longest_token  # noqa: B018
    model.template  # noqa: B018
    context = model.context if model.config.pooling else model.context - 2
    tokens = [1 + i % (model.config.vocab_size - 1) for i in range(min(WARM_TOKENS, context))]
    for _ in range(2):
        if model.config.pooling:
            model.embedder.read([Prompt(tokens)], None, None)
        else:
            model.generate(tokens, max_tokens=2, sampling=Sampling(), ignore_eos=True).text()
    machine.release_freed_memory()


class _Uvicorn(uvicorn.Server):
    """Ends in order at the first signal, at once at the second."""

    def __init__(self, config: uvicorn.Config, server: Server, on_start: Callable[[int], None]) -> None:
        super().__init__(config)
        self._server, self._on_start = server, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_start(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.started:
            return super().handle_exit(sig, frame)
        if self._server.owner.draining:
            self.should_exit = self.force_exit = True
            return
        self.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self.end()))

    async def end(self) -> None:
        """What the first signal does."""
        await self._server.owner.drain()
        self.should_exit = True


def bound(settings: Settings) -> list[socket.socket]:
    """Sockets at the address, for `serve`: that it is taken is known before a model is loaded.  InputError: it is."""
    found, port = list[socket.socket](), settings.port
    try:
        for family, kind, _, _, address in socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM):
            made = Listener(family, kind)
            found.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((address[0], port, *address[2:]))
            # The other addresses of a name get the same port.
            port = made.getsockname()[1]
    except OSError as error:
        for each in found:
            each.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"{settings.host}:{port} is in use by another program; choose another with --port") from None
        raise InputError(f"cannot listen at {settings.host}:{port}: {error.strerror}") from None
    return found


def serve(
    model: Model,
    settings: Settings,
    *,
    sockets: list[socket.socket] | None = None,
    cache_bytes: int | None = None,
    on_start: Callable[[int], None],
) -> None:
    """Serve until a signal ends it.

    sockets       of `bound`;  cache_bytes: for keys and values of all texts;  on_start: is told the port

    InputError: a cache of less than one context, or an address that is taken.
    """
    server = Server(model, settings, cache_pages(model, cache_bytes, settings.seats), lambda: os._exit(FAILED))
    running(server, on_start).run(bound(settings) if sockets is None else sockets)


def running(server: Server, on_start: Callable[[int], None]) -> _Uvicorn:
    """The HTTP server around an application, which `run` starts."""

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        # Starlette's streams use one: without it the first request would wait for twenty modules.
        async with anyio.create_task_group():
            pass
        server.begin()
        try:
            yield
        finally:
            server.close()

    app = server.app()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            return await app(scope, receive, send)
        await receive()
        async with lifespan():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    config = uvicorn.Config(
        application,
        host=server.settings.host,
        port=server.settings.port,
        http=Connection,
        ws="none",
        lifespan="on",
        loop="asyncio",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="error",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    return _Uvicorn(config, server, on_start)


def check_address(settings: Settings, without_keys: bool) -> None:
    """InputError: others can reach the address, and no key is asked for."""
    if not (is_loopback(settings.host) or settings.keys or without_keys):
        raise InputError(
            f"{settings.host} can be reached by others, and no key is asked for: pass --api-key-file FILE, set EDGEQ_API_KEY, "
            "or pass --no-auth"
        )
