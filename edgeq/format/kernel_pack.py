"""Packs: kernels that were compiled ahead, for any number of targets and architectures, in one file.

    0     header, 48 bytes, little endian: magic 8 | version u32 | bytes of the description u32 | BLAKE2b-256 of the description
    48    description, JSON: sets of kernels, and the size and the digest of every piece
    ...   the pieces, one after the other to the end of the file

A piece is machine code or text.  What a kernel's `about` says, and what its pieces are, only its target knows.

A pack can come from a stranger, and what it holds is code.  `decode` checks all that is here and runs nothing: the file must be
described to the byte, every digest must agree, every count has a limit.  Who may use it, targets/kernel_packs.py decides.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.system.trust import digest_of

MAGIC = b"edgeqker"
VERSION = 1
MAX_BYTES, MAX_DESCRIPTION_BYTES = 256 << 20, 16 << 20
MAX_SETS, MAX_KERNELS, MAX_PIECES, MAX_VERSIONS = 32, 4096, 8, 16
WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
"""Words of the description, which messages show: no control characters, which would steer the user's terminal."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,200}", re.ASCII)
_HEADER = struct.Struct("<8sII32s")
_NOT_ONE = "not a whole pack of kernels; make one with: edgeq build FILE --for DEVICE"


@dataclass(frozen=True)
class StoredKernel:
    """about   what the target has to know of it, as JSON;  pieces: its text, its machine code"""

    about: Any
    pieces: tuple[bytes, ...]


@dataclass(frozen=True)
class KernelSet:
    """The kernels of one target for one architecture.

    arch       an instruction set as `DeviceSpec.isa` has it, or compute_80 (PTX)
    sources    digest of the sources of the kernels
    versions   of the programs that made them, by name
    kernels    by name
    """

    target: str
    arch: str
    sources: str
    versions: Mapping[str, str]
    kernels: Mapping[str, StoredKernel]

    @property
    def made_by(self) -> tuple[object, ...]:
        """What kernels must have in common to lie in one set."""
        return self.target, self.arch, self.sources, dict(self.versions)


def joined(before: Iterable[KernelSet], made: Iterable[KernelSet]) -> list[KernelSet]:
    """The kernels of both, those of `made` where both have one or where other sources made those of `before`."""
    found = {(each.target, each.arch): each for each in before}
    for each in made:
        old = found.get((each.target, each.arch))
        same = old is not None and old.made_by == each.made_by
        found[each.target, each.arch] = replace(each, kernels={**(old.kernels if old and same else {}), **each.kernels})
    return list(found.values())


def encode(sets: Iterable[KernelSet]) -> bytes:
    """The bytes of a pack: the same for the same contents.  Equal pieces are stored once."""
    pieces, described = dict[bytes, int](), []
    for each in sorted(sets, key=lambda each: (each.target, each.arch)):
        kernels = []
        for name, kernel in sorted(each.kernels.items()):
            places = [pieces.setdefault(piece, len(pieces)) for piece in kernel.pieces]
            kernels.append({"name": name, "about": kernel.about, "pieces": places})
        of_set = {"target": each.target, "arch": each.arch, "sources": each.sources, "versions": dict(each.versions)}
        described.append({**of_set, "kernels": kernels})
    about = {"sets": described, "pieces": [{"bytes": len(piece), "digest": digest_of(piece)} for piece in pieces]}
    description = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    header = _HEADER.pack(MAGIC, VERSION, len(description), hashlib.blake2b(description, digest_size=32).digest())
    return b"".join([header, description, *pieces])


def decode(data: bytes, name: object) -> list[KernelSet]:
    """The sets of a pack, checked to the byte; `name` is what messages call it.

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
        return _sets(about["sets"], _pieces(about["pieces"], memoryview(data)[_HEADER.size + length :]))
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FormatError(f"{name}: its description is not sound; build it again") from None


def _pieces(described: Any, data: memoryview) -> list[memoryview]:
    if not isinstance(described, list):
        raise FormatError("its pieces are not sound")
    pieces, at = list[memoryview](), 0
    for index, each in enumerate(described):
        length = each["bytes"]
        if not is_count(length) or length > len(data) - at:
            raise FormatError(f"piece {index} does not lie in the file: truncated or hostile; copy or build it again")
        piece = data[at : at + length]
        if digest_of(piece) != each["digest"]:
            raise FormatError(f"piece {index} does not match its digest: damaged; copy or build it again")
        pieces.append(piece)
        at += length
    if at != len(data):
        raise FormatError("it has bytes that nothing describes: damaged or hostile")
    return pieces


def _sets(described: Any, pieces: Sequence[memoryview]) -> list[KernelSet]:
    if not isinstance(described, list) or len(described) > MAX_SETS:
        raise FormatError(f"more than {MAX_SETS} sets of kernels")
    # A piece may be that of several kernels: how much they are together is what a reader of them has in memory.
    left, found = MAX_BYTES, dict[tuple[str, str], KernelSet]()
    for each in described:
        versions, kernels = each["versions"], each["kernels"]
        words = [*versions, *versions.values(), each["target"], each["arch"], each["sources"]]
        if len(versions) > MAX_VERSIONS or not all(isinstance(word, str) and WORD.fullmatch(word) for word in words):
            raise FormatError("the names or versions of a set of kernels are not sound")
        if not isinstance(kernels, list) or len(kernels) > MAX_KERNELS:
            raise FormatError(f"more than {MAX_KERNELS} kernels")
        made = dict[str, StoredKernel]()
        for kernel in kernels:
            name, places = kernel["name"], kernel["pieces"]
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise FormatError(f"{str(name)[:80]!r} is no name of a kernel")
            if name in made:
                raise FormatError(f"kernel {name} twice")
            if len(places) > MAX_PIECES or not all(is_count(place) and place < len(pieces) for place in places):
                raise FormatError(f"the pieces of {name} are not sound")
            left -= sum(len(pieces[place]) for place in places)
            if left < 0:
                raise FormatError(f"kernels of more than {MAX_BYTES:,} bytes together")
            made[name] = StoredKernel(kernel["about"], tuple(bytes(pieces[place]) for place in places))
        if (each["target"], each["arch"]) in found:
            raise FormatError(f"kernels of {each['target']} for {each['arch']} twice")
        found[each["target"], each["arch"]] = KernelSet(each["target"], each["arch"], each["sources"], versions, made)
    return list(found.values())


def is_count(value: Any) -> bool:
    """Whether that is a whole number which a size or an index can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES


def read(path: Path) -> bytes | None:
    """The bytes of a pack; None: there is no such file.  InputError: it cannot be read.  FormatError: it is too large."""
    try:
        # A pipe without a writer would wait.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path}: not a file")
            if status.st_size > MAX_BYTES:
                raise FormatError(too_large(path, status.st_size))
            return file.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None


def too_large(name: object, size: int) -> str:
    """A message: `name` has `size` bytes, which is more than a pack has."""
    return f"{name}: {size:,} bytes; a pack of kernels has at most {MAX_BYTES:,}"


def beside(model: Path) -> Path:
    """Where the pack of a model file is looked for: FILE.kernels."""
    return model.with_name(f"{model.name}.kernels")
