"""What every request has to pass before it is looked at: sizes of headers, Host, Origin, key.

Decisions use the raw headers and the path of the request line, never an address that was put together from a header
(CVE-2026-48710).
"""

from __future__ import annotations

import ipaddress
import logging
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeq.errors import printable
from edgeq.runtime.server.errors import ApiError
from edgeq.runtime.server.metrics import Metrics
from edgeq.runtime.server.settings import Settings

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
MAX_LOGGED_CHARACTERS = 100
MAX_METHOD_CHARACTERS = 16
OPEN = ("/health",)
"""What needs no key."""
PAGE = "/"

_log = logging.getLogger("edgeq.server")


class Guard:
    """An application around the server's: it refuses, counts and logs.

    The name of the client is in `scope["state"]["client"]`: that of its key, which owns what it caches, or its address.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status = perf_counter(), 0
        origin = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), None)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if origin in self._settings.origins:
                    message["headers"] += [(b"access-control-allow-origin", origin.encode()), (b"vary", b"origin")]
            await send(message)

        try:
            headers = self._check(scope)
            if scope["method"] == "OPTIONS" and origin in self._settings.origins:
                # Browsers ask this before they send a key.
                allowed = [
                    (b"access-control-allow-methods", b"GET, POST"),
                    (b"access-control-allow-headers", b"*, authorization"),
                ]
                await sent({"type": "http.response.start", "status": 204, "headers": allowed})
                await sent({"type": "http.response.body"})
            else:
                self._name(scope, headers)
                await self._app(scope, receive, sent)
        except ApiError as error:
            await error.response()(scope, receive, sent)
        finally:
            route = scope["state"].get("endpoint", "other")
            self._metrics.requests.labels(route, str(status)).inc()
            path = printable(scope["path"][:MAX_LOGGED_CHARACTERS])
            method = scope["method"][:MAX_METHOD_CHARACTERS]
            _log.info("%s %s %d %.0f ms", method, path, status, 1000 * (perf_counter() - started))

    def _check(self, scope: Scope) -> dict[bytes, list[bytes]]:
        """The headers.  ApiError: too many of them, or from a page that may not ask."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        if len(scope["headers"]) > MAX_HEADERS or sum(len(n) + len(v) for n, v in scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, "headers_too_large", f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES >> 10} KiB of them")
        # Two proxies that believe different ones of these take one request for two.
        if len(headers.get(b"content-length", [])) > 1 or {b"content-length", b"transfer-encoding"} <= set(headers):
            raise ApiError(400, "invalid_http", "more than one length of the body is given")
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._is_allowed(host_of(hosts[0])):
            raise ApiError(
                403, "forbidden_host", "the Host header names no host of this server; allow it with --allow-host NAME"
            )
        for origin in headers.get(b"origin", []):
            same = origin in (b"http://" + hosts[0], b"https://" + hosts[0])
            if not same and origin.decode("latin-1") not in self._settings.origins:
                raise ApiError(
                    403, "forbidden_origin", "web pages of this origin may not ask; allow it with --cors-origin ORIGIN"
                )
        return headers

    def _name(self, scope: Scope, headers: dict[bytes, list[bytes]]) -> None:
        """Who asks.  ApiError: a key is needed."""
        scope["state"]["client"] = scope["client"][0] if scope["client"] else ""
        scope["state"]["owner"] = ""
        open_page = scope["path"] == PAGE and scope["method"] == "GET" and self._settings.page
        if self._settings.keys and scope["path"] not in OPEN and not open_page:
            owner = self._owner(headers)
            if owner is None:
                raise ApiError(401, "invalid_api_key", "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
            scope["state"]["client"] = scope["state"]["owner"] = owner

    def _owner(self, headers: dict[bytes, list[bytes]]) -> str | None:
        bearers = [value.partition(b" ") for value in headers.get(b"authorization", [])]
        keys = [key for scheme, _, key in bearers if scheme.lower() == b"bearer"] + headers.get(b"x-api-key", [])
        # anthropic's client can send both; they have to be the same.
        return self._settings.owner(keys[0]) if len(set(keys)) == 1 else None

    def _is_allowed(self, host: str) -> bool:
        if host == "localhost" or host in self._settings.allowed_hosts:
            return True
        if "%" in host:
            # Python reads anything after it as the zone of an IPv6 address; no client has a reason to send one.
            return False
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        # Pages reach this machine through 0.0.0.0 too, however it is written, past what browsers keep them from.
        return not (getattr(address, "ipv4_mapped", None) or address).is_unspecified


def host_of(header: bytes) -> str:
    """The name or address of a Host header, without its port; "" for what is neither."""
    text = header.decode("latin-1").lower()
    host, _, port = text.rpartition(":") if text.rpartition(":")[2].isdigit() else (text, "", "")
    return host if host and not set(host) & set("/?#@\\ ") else ""
