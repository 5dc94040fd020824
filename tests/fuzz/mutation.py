"""Changes to bytes and to JSON values, drawn from a seeded generator."""

from __future__ import annotations

import random
from typing import Any

from edgeq.errors import MAX_MESSAGE, EdgeqError

EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 64, 2**32 - 1)
"""Numbers around which sizes, offsets and counts go wrong."""
VALUES: tuple[Any, ...] = (
    *EDGES,
    *(None, True, False, -1, 2**40, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e-300, 1e300, 1e308, float("inf"), float("nan")),
    *("", "x", "\0", "\ud800", "\x1b[2J", "\u202e", "silu", "llama3", "f" * 300, "7" * 5000),
    *([], {}, [[]], [0] * 5, {"type": "Sequence"}, [1e30, "x"]),
)


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Up to sixteen small changes: a bit, a byte, a number, a piece that is repeated, put in or cut out."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if len(out) < 16:
            break
        at = rng.randrange(len(out) - 8)
        match rng.randrange(7):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.choice((0, 1, 127, 128, 255))
            case 2:
                at -= at % 4
                out[at : at + 4] = (rng.choice((*EDGES, len(out), at)) % 2**32).to_bytes(4, "little")
            case 3:
                at -= at % 4
                number = int.from_bytes(out[at : at + 4], "little") + rng.choice((-64, -4, -1, 1, 4, 64))
                out[at : at + 4] = (number % 2**32).to_bytes(4, "little")
            case 4:
                source, length = rng.randrange(len(out)), rng.choice((1, 4, 8, 64))
                piece = out[source : source + length]
                out[at : at + len(piece)] = piece
            case 5:
                out[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
            case 6:
                del out[at : at + rng.choice((1, 4, 64))]
    return bytes(out)


def changed_json(rng: random.Random, value: Any, others: tuple[Any, ...] = VALUES) -> Any:
    """A copy of a JSON value in which up to three entries, at any depth, are replaced, removed, added or exchanged."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _changed(rng, value, others)
    return value


def _changed(rng: random.Random, value: Any, others: tuple[Any, ...]) -> Any:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys:
        return rng.choice(others)
    out, key = value.copy(), rng.choice(keys)
    match rng.randrange(8):
        case 0:
            del out[key]
        case 1:
            out[key] = rng.choice(others)
        case 2 if isinstance(out, dict):
            out[rng.choice(("x", "type", "", "rope_scaling", "\ud800"))] = rng.choice(others)
        case 2:
            out.extend(out[:64])
        case 3:
            other = rng.choice(keys)
            out[key], out[other] = out[other], out[key]
        case _:
            out[key] = _changed(rng, out[key], others)
    return out


def refused(error: EdgeqError) -> str:
    """The outcome of a refusal, whose message must be one printable line of bounded length."""
    message = str(error)
    assert message.isprintable() and 0 < len(message) <= MAX_MESSAGE + 300, f"message {message[:200]!r}"
    return "refused"
