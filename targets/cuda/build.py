"""Kernels for a program: generated where TVM is installed, and kept on this machine.

A kept kernel is found by a digest of what it was made from: the sources of kernels/, the versions of TVM, the variant.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from edgeq.errors import FormatError, UnsupportedError
from edgeq.machine import cache_folder
from edgeq.targets.cuda.pack import Generated, Variant, decode, encode

GENERATOR = ("apache-tvm", "apache-tvm-ffi")
SOURCES = Path(__file__).parent


def refusal() -> str | None:
    """Why kernels cannot be generated here; None if they can."""
    if importlib.util.find_spec("tvm") is None:
        return "apache-tvm is not installed; run: pip install edgeq[build]"
    return None


@cache
def generator_digest() -> str:
    """Of everything but the variant that the text of a kernel depends on."""
    digest = hashlib.sha256()
    for path in (SOURCES / "pack.py", *sorted((SOURCES / "kernels").glob("*.py"))):
        digest.update(path.read_bytes())
    for name in GENERATOR:
        digest.update(importlib.metadata.version(name).encode())
    return digest.hexdigest()


def kernels(variants: Sequence[Variant], on_kernel: Callable[[int, str], None] = lambda done, label: None) -> list[Generated]:
    """The kernels of `variants`, in their order.

    on_kernel   is told (kernels done, the one that is generated next)

    UnsupportedError: TVM is missing; its version is part of the name of a kept kernel.
    """
    found = []
    for done, variant in enumerate(variants):
        on_kernel(done, variant.symbol)
        found.append(kept(variant))
    return found


def kept(variant: Variant) -> Generated:
    reason = refusal()
    if reason is not None:
        raise UnsupportedError(f"kernel {variant.symbol} has to be generated: {reason}")
    digest = hashlib.sha256(f"{generator_digest()} {variant!r}".encode()).hexdigest()[:32]
    path = cache_folder() / "cuda" / f"{variant.symbol}-{digest}.json"
    try:
        stored = decode(path.read_text(encoding="utf-8"))
        if stored.variant == variant:
            return stored
    except (OSError, ValueError, FormatError):
        pass  # not there, or damaged: it is generated again
    from edgeq.targets.cuda.kernels.generate import generate

    generated = generate(variant)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own and a rename: another process never reads half a kernel.
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(encode(generated), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs a second per kernel, nothing else
    return generated
