"""How a server is set up."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgeq.errors import InputError
from edgeq.runtime.model import Model
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.speculative.speculator import DraftSource, Speculator

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """host, port         port 0: one that is free
    adapters           models that were made of the served one with an adapter; a client asks for NAME:ADAPTER
    names              under which clients know the model; the first is in the answers
    keys               name of each client by the SHA-256 of its key; none: nobody needs one
    allowed_hosts      of the Host header beside localhost and addresses;  origins: web pages that may ask
    seats, queue       texts at once, and texts that may wait
    step_seconds       of a run that reads prompts while texts are decoded
    most_body          bytes of a request;  most_texts: of one request (n)
    strict             fields that are not known are refused
    queue_seconds, request_seconds, grace_seconds   until a request gives up waiting, ends, and ends when the server does
    share_prefixes     keep the cache of texts that have ended for those that begin alike
    prompt_cache       a folder where it stays after the end of the process;  prompt_cache_bytes: of its files
    page               serve the page to try the model at /
    draft, gamma       where drafts come from beside grammars, and how long they are, as in Model.generate
    """

    host: str = "127.0.0.1"
    port: int = 8080
    names: tuple[str, ...] = ("edgeq",)
    adapters: Mapping[str, Model] = field(default_factory=dict)
    keys: Mapping[bytes, str] = field(default_factory=dict)
    allowed_hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    seats: int = 4
    queue: int = 32
    step_seconds: float = 0.2
    most_body: int = 4 * MIB
    most_texts: int = 8
    strict: bool = False
    queue_seconds: float = 300
    request_seconds: float = 3600
    grace_seconds: float = 30
    share_prefixes: bool = True
    prompt_cache: Path | None = None
    prompt_cache_bytes: int = 2 << 30
    page: bool = True
    draft: DraftSource = "off"
    gamma: int | None = None

    @property
    def models(self) -> dict[str, Model | None]:
        """What clients may ask for: each name, and each with each adapter; None: the model itself."""
        adapted = {f"{name}:{adapter}": model for name in self.names for adapter, model in self.adapters.items()}
        return {**dict.fromkeys(self.names), **adapted}

    def title(self, model: Model | None) -> str:
        """How answers call it."""
        return next(name for name, found in self.models.items() if found is model)

    def check_model(self, name: str | None) -> None:
        """ApiError: no model has that name here."""
        if name is not None and name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, "model_not_found", f"the model {name[:100]!r} is not here; there is {known}", "model")

    def owner(self, key: bytes) -> str | None:
        """The name of the client with this key, compared in constant time; None: there is none."""
        digest, found = hashlib.sha256(key).digest(), None
        for known, name in self.keys.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def speculator_of(model: Model, settings: Settings) -> Speculator:
    """Where the server's drafts come from.  InputError: as Model.speculator."""
    for each in settings.adapters.values():
        # It compiles what drafts need, and later others would wait for that.
        each.speculator(settings.draft, settings.gamma)
    return model.speculator(settings.draft, settings.gamma) or Speculator("off", None, model.program.options.mode)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(path: Path | None, variable: str | None) -> dict[bytes, str]:
    """Keys of a file with a line `name:key` for each client, and of the environment.

    InputError: it cannot be read, others can read it, or a line is not of this form.
    """
    found = {hashlib.sha256(variable.encode()).digest(): "default"} if variable else {}
    if path is None:
        return found
    try:
        with open(path, encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise InputError(f"{path}: others can read the keys; run: chmod 600 {path}")
            lines = file.read(MIB).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read it: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, key = (part.strip() for part in line.partition(":"))
        if not (name and colon and key):
            raise InputError(f"{path}: line {number} is not NAME:KEY")
        digest = hashlib.sha256(key.encode()).digest()
        if found.get(digest, name) != name:
            # Whose cache a request may use follows from its key.
            raise InputError(f"{path}: line {number}: the key of {name!r} is that of {found[digest]!r} too; give each its own")
        found[digest] = name
    if not found:
        raise InputError(f"{path}: no key in it; expected a line NAME:KEY for each client")
    return found
