"""Packs: the kernels of a model in one file, with their text, how to launch them, and machine code for several GPUs.

    0     header, 48 bytes, little endian: magic 8 | version u32 | bytes of the description u32 | BLAKE2b-256 of the description
    48    description, JSON: versions of the generator, digest of the sources, kernels with the digests of what follows
    ...   for each kernel its text, then its images in the order of their names, one after the other to the end of the file

A pack can come from a stranger, and what it holds is code.  `decode` checks all of it and runs nothing: the file must be
described to the byte, every digest must agree, every count has a limit.  Who may use it, supply.py decides.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.system.trust import digest_of
from edgeq.targets.cuda.supply.nvrtc import Compiled
from edgeq.targets.cuda.supply.pack import Generated, Variant, of_record, record

MAGIC = b"edgeqgpu"
VERSION = 1
MAX_BYTES, MAX_DESCRIPTION_BYTES = 256 << 20, 16 << 20
MAX_KERNELS, MAX_IMAGES, MAX_VERSIONS = 4096, 32, 16
ARCH = re.compile(r"(sm|compute)_[0-9]{2,3}", re.ASCII)
WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
"""Words of the description, which messages show: no control characters, which would steer the user's terminal."""
_HEADER = struct.Struct("<8sII32s")
_NOT_ONE = "not a whole pack of kernels; make one with: edgeq build FILE --for DEVICE"


@dataclass(frozen=True)
class Packed:
    """A kernel, and what was compiled from its text, by architecture."""

    generated: Generated
    images: Mapping[str, Compiled]


@dataclass(frozen=True)
class Pack:
    """What a pack holds.

    versions   of the programs that made it, by name
    sources    digest of the sources of its kernels
    """

    versions: Mapping[str, str]
    sources: str
    kernels: Mapping[Variant, Packed]

    @property
    def archs(self) -> list[str]:
        return sorted({arch for kernel in self.kernels.values() for arch in kernel.images})

    def only(self, arch: str) -> Pack:
        """The same with the images of one architecture."""
        kernels = {
            variant: replace(kernel, images={arch: kernel.images[arch]})
            for variant, kernel in self.kernels.items()
            if arch in kernel.images
        }
        return replace(self, kernels=kernels)

    def joined(self, other: Pack) -> Pack:
        """The kernels of both, those of `other` where both have one."""
        kernels = dict(self.kernels)
        for variant, kernel in other.kernels.items():
            mine = kernels.get(variant)
            same = mine is not None and mine.generated == kernel.generated
            kernels[variant] = Packed(kernel.generated, {**(mine.images if mine and same else {}), **kernel.images})
        return replace(other, kernels=kernels)


def encode(pack: Pack) -> bytes:
    """The bytes of a pack: the same for the same contents."""
    described, data = [], list[bytes]()
    for variant in sorted(pack.kernels, key=lambda each: each.symbol):
        kernel = pack.kernels[variant]
        text = kernel.generated.text.encode()
        images = {}
        data.append(text)
        for arch, image in sorted(kernel.images.items()):
            numbers = {"registers": image.registers, "shared": image.shared, "spilled": image.spilled}
            images[arch] = {**_described(image.image), **numbers}
            data.append(image.image)
        described.append({**record(kernel.generated), "text": _described(text), "images": images})
    about = {"versions": dict(pack.versions), "sources": pack.sources, "kernels": described}
    description = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    header = _HEADER.pack(MAGIC, VERSION, len(description), hashlib.blake2b(description, digest_size=32).digest())
    return b"".join([header, description, *data])


def _described(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "digest": digest_of(data)}


def decode(data: bytes, name: object) -> Pack:
    """A pack, checked to the byte; `name` is what messages call it.

    FormatError: it is none, damaged or hostile.  UnsupportedError: of another version of the format.
    """
    if len(data) < _HEADER.size or data[:8] != MAGIC:
        raise FormatError(f"{name}: {_NOT_ONE}")
    _, version, length, expected = _HEADER.unpack(data[: _HEADER.size])
    if version != VERSION:
        raise UnsupportedError(f"{name}: a pack of version {version}; this edgeq reads {VERSION}: build it again with this one")
    description = data[_HEADER.size : _HEADER.size + length]
    if length > MAX_DESCRIPTION_BYTES or len(description) < length:
        raise FormatError(f"{name}: {_NOT_ONE}")
    if hashlib.blake2b(description, digest_size=32).digest() != expected:
        raise FormatError(f"{name}: its description does not match its digest: damaged; copy or build it again")
    try:
        about = json.loads(description)
        return _read(about, _Rest(memoryview(data), _HEADER.size + length))
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FormatError(f"{name}: its description is not sound; build it again") from None


class _Rest:
    """The bytes after the description, taken piece by piece."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at

    def take(self, described: Any, what: str) -> bytes:
        length = described["bytes"]
        if not _count(length) or length > len(self._data) - self._at:
            raise FormatError(f"{what} does not lie in the file: truncated or hostile; copy or build it again")
        piece = self._data[self._at : self._at + length]
        self._at += length
        if digest_of(piece) != described["digest"]:
            raise FormatError(f"{what} does not match its digest: damaged; copy or build it again")
        return bytes(piece)

    def end(self) -> None:
        if self._at != len(self._data):
            raise FormatError("it has bytes that nothing describes: damaged or hostile")


def _read(about: Any, rest: _Rest) -> Pack:
    versions, kernels = about["versions"], about["kernels"]
    words = [*versions, *versions.values(), about["sources"]]
    if len(versions) > MAX_VERSIONS or not all(isinstance(word, str) and WORD.fullmatch(word) for word in words):
        raise FormatError("the versions of what made it are not sound")
    if not isinstance(kernels, list) or len(kernels) > MAX_KERNELS:
        raise FormatError(f"more than {MAX_KERNELS} kernels")
    found: dict[Variant, Packed] = {}
    for each in kernels:
        packed = _kernel(each, rest)
        if packed.generated.variant in found:
            raise FormatError(f"kernel {packed.generated.variant.symbol} twice")
        found[packed.generated.variant] = packed
    rest.end()
    return Pack(versions, about["sources"], found)


def _kernel(each: Any, rest: _Rest) -> Packed:
    # First without its text: a name that is safe to show.
    symbol = of_record(each, "").variant.symbol
    text = rest.take(each["text"], f"the text of {symbol}")
    images, found = each["images"], dict[str, Compiled]()
    if len(images) > MAX_IMAGES or not all(ARCH.fullmatch(arch) for arch in images):
        raise FormatError(f"the architectures of {symbol} are not sound")
    for arch in sorted(images):
        numbers = [images[arch][name] for name in ("registers", "shared", "spilled")]
        if not all(map(_count, numbers)):
            raise FormatError(f"the numbers of {symbol} for {arch} are not sound")
        image = rest.take(images[arch], f"{symbol} for {arch}")
        found[arch] = Compiled(arch, image, *numbers)
    return Packed(of_record(each, text.decode()), found)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES


def read(path: Path) -> bytes | None:
    """The bytes of a pack; None: there is no such file.  InputError: it cannot be read.  FormatError: it is too large."""
    try:
        # A pipe without a writer would wait.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{path}: not a file")
            if found.st_size > MAX_BYTES:
                raise FormatError(too_large(path, found.st_size))
            return file.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None


def too_large(name: object, size: int) -> str:
    return f"{name}: {size:,} bytes; a pack of kernels has at most {MAX_BYTES:,}"


def beside(model: Path) -> Path:
    """Where the pack of a model file is looked for: FILE.kernels."""
    return model.with_name(f"{model.name}.kernels")
