"""A server within another program, on a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from typing import Any

from edgeq.errors import InputError
from edgeq.runtime.arguments import instance, integer, texts
from edgeq.runtime.model import Model
from edgeq.runtime.server.app import Server
from edgeq.runtime.server.serve import bound, cache_pages, check_address, running, warm
from edgeq.runtime.server.settings import Settings

MAX_NAMES, MAX_KEYS, MAX_CHARACTERS = 64, 10_000, 4096


def serve(
    model: Model,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    names: tuple[str, ...] = (),
    keys: Mapping[str, str] | None = None,
    without_keys: bool = False,
    seats: int = 4,
    queue: int = 32,
    cache_bytes: int | None = None,
    prompt_cache: str | os.PathLike[str] | None = None,
    prompt_cache_bytes: int = 2 << 30,
    origins: tuple[str, ...] = (),
    page: bool = False,
) -> BackgroundServer:
    """Serve `model` as `edgeq serve` does, beside what the program does with it; it is warmed first.

    port          0: one that is free, which is in `url`
    names         under which clients know the model; none: that of the file
    keys          of each client, by its name; None: nobody needs one, which only addresses of this machine allow, or
                  `without_keys`
    seats, queue  texts at once, at most the model's `max_logits`, and texts that may wait
    cache_bytes   for keys and values of all texts; None: what is available, for two contexts of every seat
    prompt_cache  a folder where prompts stay after the end, in files of at most `prompt_cache_bytes`
    origins       web pages that may ask;  page: serve the page to try the model

    InputError: an argument out of range; an address that is taken, or that others reach without a key; a cache of less than
    one context; a model that requantizes.  ModuleNotFoundError: the packages of `edgeq[server]` are not installed.
    """
    instance("model", model, Model, "a Model")
    if model.requantization:
        raise InputError(
            "requantized weights belong to one prompt; load the model with `requantization=Requantization(when='never')`"
        )
    settings = Settings(
        host=host,
        port=integer("port", port, 0, 65535),
        names=texts("names", names, MAX_NAMES, MAX_CHARACTERS) or (model.file.path.stem,),
        keys=_digests(keys or {}),
        origins=texts("origins", origins, MAX_NAMES, MAX_CHARACTERS),
        seats=seats,
        queue=integer("queue", queue, 0, 1 << 31),
        prompt_cache=None if prompt_cache is None else Path(prompt_cache),
        prompt_cache_bytes=integer("prompt_cache_bytes", prompt_cache_bytes, 0, 1 << 62),
        page=page,
    )
    check_address(settings, without_keys)
    return BackgroundServer(model, settings, None if cache_bytes is None else integer("cache_bytes", cache_bytes, 0, 1 << 62))


def _digests(keys: Mapping[str, str]) -> dict[bytes, str]:
    """InputError: an empty key, which who sends none has, or one that two clients have."""
    given = texts("keys", list(keys.values()), MAX_KEYS, MAX_CHARACTERS)
    if len(set(given)) < len(given):
        raise InputError(
            "two clients have the same `keys`, and whose cache a request may use follows from its key: give each its own"
        )
    return {sha256(key.encode()).digest(): name for name, key in zip(keys, given, strict=True)}


class BackgroundServer:
    """A server that runs until `close`, or the end of a `with` block.

    url   what a client of OpenAI's interface takes as its base
    """

    def __init__(self, model: Model, settings: Settings, cache_bytes: int | None = None) -> None:
        sockets, started = bound(settings), Event()
        warm(model)
        server = Server(model, settings, cache_pages(model, cache_bytes, settings.seats), self._fail)
        self._http = running(server, lambda port: started.set())
        self._thread = Thread(target=self._http.run, args=(sockets,), name="edgeq-server", daemon=True)
        self._thread.start()
        while not started.wait(0.05) and self._thread.is_alive():
            pass
        if not started.is_set():
            raise InputError(f"the server could not begin at {settings.host}:{settings.port}")
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{sockets[0].getsockname()[1]}/v1"

    def _fail(self) -> None:
        # The program around it decides what follows; clients have been told.
        self._http.should_exit = True

    def wait(self) -> None:
        """Until it ends, as it does when the model fails."""
        self._thread.join()

    def close(self) -> None:
        """Let running answers end for 30 s, and no others begin."""
        if self._thread.is_alive() and not self._http.should_exit:
            asyncio.run_coroutine_threadsafe(self._http.end(), self._http.loop).result()
        self._thread.join()

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BackgroundServer: {self.url}{'' if self._thread.is_alive() else ', ended'}>"
