"""Kernels of GPUs as packs hold them: their text, how to launch them, and machine code for several architectures.

Of a kernel for an architecture, pieces are its text and its image; the text is stored once for all architectures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeq.errors import FormatError
from edgeq.format import kernel_pack
from edgeq.format.kernel_pack import KernelSet, StoredKernel, is_count
from edgeq.targets.cuda.supply.nvrtc import Compiled
from edgeq.targets.cuda.supply.pack import Generated, Variant, of_record, record

TARGET = "cuda"
MAX_TEXT_BYTES = 1 << 20
ARCH = re.compile(r"(sm|compute)_[0-9]{2,3}", re.ASCII)
NUMBERS = ("registers", "shared", "spilled")


@dataclass(frozen=True)
class Packed:
    """A kernel, and what was compiled from its text, by architecture."""

    generated: Generated
    images: Mapping[str, Compiled]


@dataclass(frozen=True)
class Pack:
    """What a pack holds for GPUs.

    versions   of the programs that made it, by name
    sources    digest of the sources of its kernels
    """

    versions: Mapping[str, str]
    sources: str
    kernels: Mapping[Variant, Packed]

    @property
    def archs(self) -> list[str]:
        return sorted({arch for kernel in self.kernels.values() for arch in kernel.images})


def sets(pack: Pack) -> list[KernelSet]:
    """The kernels of a pack, by architecture."""
    return [KernelSet(TARGET, arch, pack.sources, pack.versions, _stored(pack, arch)) for arch in pack.archs]


def _stored(pack: Pack, arch: str) -> dict[str, StoredKernel]:
    stored = {}
    for variant, kernel in pack.kernels.items():
        if arch in kernel.images:
            image = kernel.images[arch]
            about = {**record(kernel.generated), **{name: getattr(image, name) for name in NUMBERS}}
            stored[variant.symbol] = StoredKernel(about, (kernel.generated.text.encode(), image.image))
    return stored


def pack_of(sets: Iterable[KernelSet]) -> Pack:
    """The inverse of `sets`.  FormatError: a kernel is none, or what made them differs."""
    pack = Pack({}, "", {})
    kernels = dict[Variant, Packed]()
    for each in sets:
        if kernels and (each.sources, each.versions) != (pack.sources, pack.versions):
            raise FormatError("kernels of several versions in one pack; build it again")
        if not ARCH.fullmatch(each.arch):
            raise FormatError(f"{each.arch}: no architecture of a GPU")
        pack = Pack(each.versions, each.sources, kernels)
        for stored in each.kernels.values():
            generated, image = _kernel(stored, each.arch)
            known = kernels.get(generated.variant, Packed(generated, {}))
            if known.generated != generated or each.arch in known.images:
                raise FormatError(f"kernel {generated.variant.symbol} twice")
            kernels[generated.variant] = Packed(generated, {**known.images, each.arch: image})
    return pack


def _kernel(stored: StoredKernel, arch: str) -> tuple[Generated, Compiled]:
    about: Any = stored.about
    # First without its text: a name that is safe to show.
    symbol = of_record(about, "").variant.symbol
    if len(stored.pieces) != 2 or len(stored.pieces[0]) > MAX_TEXT_BYTES:
        raise FormatError(f"the text of {symbol} is not sound")
    numbers = [about.get(name) for name in NUMBERS]
    if not all(map(is_count, numbers)):
        raise FormatError(f"the numbers of {symbol} for {arch} are not sound")
    text, image = stored.pieces
    try:
        return of_record(about, text.decode()), Compiled(arch, image, *numbers)
    except UnicodeDecodeError:
        raise FormatError(f"the text of {symbol} is not sound") from None


def encode(pack: Pack) -> bytes:
    """The bytes of a pack of these kernels alone."""
    return kernel_pack.encode(sets(pack))


def decode(data: bytes, name: object) -> Pack:
    """The kernels for GPUs of a pack, checked.  FormatError, UnsupportedError: as `edgeq.format.kernel_pack.decode`."""
    found = [each for each in kernel_pack.decode(data, name) if each.target == TARGET]
    try:
        return pack_of(found)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
