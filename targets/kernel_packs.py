"""The packs of kernels beside and inside a model file, and which of them the user trusts.

Machine code can do what the user can do.  A pack is used if this machine made it, or if its user accepted its digest
(edgeq/system/trust.py); never because a file brings it.  Whether its kernels fit, each target says.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgeq.errors import EdgeqError, InputError, printable
from edgeq.format import kernel_pack
from edgeq.format.container import ModelFile
from edgeq.format.kernel_pack import KernelSet
from edgeq.system import machine, trust


@dataclass(frozen=True)
class FoundPack:
    """A pack beside or inside a model file.

    name      for messages;  digest: of all its bytes
    damaged   why it cannot be read; None if it can
    """

    name: str
    digest: str
    sets: Sequence[KernelSet]
    damaged: str | None = None

    @property
    def distrusted(self) -> str | None:
        """Why nothing of it may be used; None if it may be."""
        if trust.trusted(self.digest):
            return None
        told = f"if its maker told you its digest {self.digest}, pass --trust-kernels"
        return f"{self.name}: machine code that was made elsewhere; {told}"


def packs(file: ModelFile) -> Iterator[FoundPack]:
    """The packs of a model file, the one beside it first."""
    beside = kernel_pack.beside(file.path)
    try:
        data = kernel_pack.read(beside)
    except EdgeqError as error:
        yield FoundPack(str(beside), "", (), str(error))
    else:
        if data is not None:
            yield examined(str(beside), data)
    for arch, segment in file.metadata.kernels.items():
        yield examined(f"{file.path} ({arch})", file.segment(segment).data)


def examined(name: str, stored: bytes | memoryview) -> FoundPack:
    """A pack in a copy of its own: a file that is mapped can change after its digest was taken."""
    # An architecture is a stranger's word, and a refusal goes to the terminal without an error.
    name = printable(name)
    if len(stored) > kernel_pack.MAX_BYTES:
        return FoundPack(name, "", (), kernel_pack.too_large(name, len(stored)))
    data = bytes(stored)
    digest = trust.digest_of(data)
    try:
        return FoundPack(name, digest, kernel_pack.decode(data, name))
    except EdgeqError as error:
        return FoundPack(name, digest, (), str(error))


def accept(file: ModelFile) -> list[FoundPack]:
    """Trust the packs of a model file from now on.  InputError: there is none, one is damaged, or it cannot be remembered."""
    accepted = list(packs(file))
    if not accepted:
        made = f"make one with: edgeq build {shlex.quote(str(file.path))} --for DEVICE"
        raise InputError(f"{file.path}: no pack of kernels beside or inside it; {made}")
    for pack in accepted:
        if pack.damaged is not None:
            raise InputError(pack.damaged)
        if not trust.trusted(pack.digest):
            remember(pack.digest)
    return accepted


def remember(digest: str) -> None:
    """Trust a pack.  InputError: the cache folder cannot be written."""
    try:
        trust.trust(digest)
    except OSError as error:
        folder = machine.cache_folder()
        raise InputError(
            f"{folder}: cannot remember there that kernels are trusted: {error.strerror}; set XDG_CACHE_HOME to a folder that "
            "you can write"
        ) from None
