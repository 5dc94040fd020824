"""Errors as clients of OpenAI's interface read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from edgeq.errors import DeviceError, EdgeqError, InputError, UnsupportedError
from edgeq.runtime.batching.job import Busy

KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """What a client is told: a status, a code that programs read, a message for people, and the field that is wrong."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param, self.headers = status, code, message, param, dict(headers or {})

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        # Anthropic's clients look for the outer type, OpenAI's for what is within.
        return {"type": "error", "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body), self.status, self.all_headers, "application/json")

    @property
    def all_headers(self) -> dict[str, str]:
        # What is left of a refused body is not read; a failure is not to be tried three times, as clients do with others.
        fixed = {"connection": "close"} if self.status < 500 else {"x-should-retry": "false"} if self.status == 500 else {}
        return fixed | self.headers


def unsupported(name: str, why: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{name}: {why}", name)


def of_exception(error: Exception, retry_after: int = 1) -> ApiError:
    """The error of anything that a handler raises.  What is not meant for users is told without its text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(503, "server_overloaded", str(error), headers={"retry-after": str(retry_after)})
    if isinstance(error, (InputError, UnsupportedError)):
        return ApiError(400, "invalid_value", str(error).replace("`", ""))
    if isinstance(error, EdgeqError) and not isinstance(error, DeviceError):
        return ApiError(500, "server_error", str(error))
    return ApiError(500, "server_error", "the server failed on this request")
