"""Where the kernels of a program come from: this machine's cache, a trusted pack, the compilers that are installed.

A cubin is code and can do what the user can do.  A pack beside or inside a model file is used if this machine made it, or if
its user accepted its digest (edgeq/system/trust.py); never because a file brings it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgeq.errors import EdgeqError, InputError, UnsupportedError, printable
from edgeq.format.container import ModelFile
from edgeq.system import machine, trust
from edgeq.targets.cuda.supply import build, nvrtc, pack_file
from edgeq.targets.cuda.supply.nvrtc import COMPILED_FOR, VIRTUAL, Compiled, arch_for
from edgeq.targets.cuda.supply.pack import Generated, Variant
from edgeq.targets.cuda.supply.pack_file import Pack
from edgeq.targets.target import KernelPack

EMBEDDED = frozenset({72, 87, 101, 110})
"""Those of boards: NVIDIA promises nothing of machine code for them on other GPUs, or the other way round."""
ELF = b"\x7fELF"
"""Machine code begins with it, PTX does not."""
PTX_DRIVER = 12060
"""CUDA version of the oldest driver that reads the PTX of NVRTC 12.6, as the driver states it: 1000 major + 10 minor."""

OnKernel = Callable[[int, str], None]
"""Told (kernels done, the one that is compiled next)."""
KernelSource = Callable[[Sequence[Variant], OnKernel], list[Generated]]
"""Gives kernels in the order of their variants."""


@dataclass(frozen=True)
class Found:
    """A pack beside or inside a model file.

    name      for messages;  digest: of all its bytes
    refused   why nothing of it is used; None if it may be
    """

    name: str
    digest: str
    pack: Pack | None
    refused: str | None

    @property
    def facts(self) -> KernelPack:
        kernels, versions = (self.pack.kernels, dict(self.pack.versions)) if self.pack else ({}, {})
        archs = {arch: sum(arch in x.images for x in kernels.values()) for arch in (self.pack.archs if self.pack else ())}
        return KernelPack(self.name, self.digest, self.refused, len(kernels), archs, versions)


def packs(file: ModelFile) -> Iterator[Found]:
    """The packs of a model file, the one beside it first.  What cannot be read is told in `refused`."""
    beside = pack_file.beside(file.path)
    try:
        data = pack_file.read(beside)
    except EdgeqError as error:
        yield Found(str(beside), "", None, str(error))
    else:
        if data is not None:
            yield examined(str(beside), data)
    for arch, segment in file.metadata.kernels.items():
        yield examined(f"{file.path} ({arch})", file.segment(segment).data)


def examined(name: str, stored: bytes | memoryview) -> Found:
    """A pack in a copy of its own: a file that is mapped can change after its digest was taken."""
    # An architecture is a stranger's word, and a refusal goes to the terminal without an error.
    name = printable(name)
    if len(stored) > pack_file.MAX_BYTES:
        return Found(name, "", None, pack_file.too_large(name, len(stored)))
    data = bytes(stored)
    digest = trust.digest_of(data)
    try:
        pack = pack_file.decode(data, name)
    except EdgeqError as error:
        return Found(name, digest, None, str(error))
    return Found(name, digest, pack, _refusal(name, digest, pack))


def _refusal(name: str, digest: str, pack: Pack) -> str | None:
    if pack.sources != build.source_digest():
        return f"{name}: its kernels are those of another version of edgeq; build it again with this one"
    wanted = build.GENERATOR | build.COMPILER
    if other := [f"{program} {version}" for program, version in sorted(set(pack.versions.items()) - set(wanted.items()))]:
        return f"{name}: made by {', '.join(other)}, this edgeq takes those of `pip install edgeq[build]`; build it again"
    if not trust.trusted(digest):
        return f"{name}: machine code that was made elsewhere; if its maker told you its digest {digest}, pass --trust-kernels"
    return None


def accept(path: Path) -> list[Found]:
    """Trust the packs of a model file from now on.  InputError: there is none, one is damaged, or it cannot be remembered."""
    found = list(packs(ModelFile.open(path)))
    if not found:
        raise InputError(
            f"{path}: no pack of kernels beside or inside it; make one with: edgeq build {shlex.quote(str(path))} --for DEVICE"
        )
    for each in found:
        if each.pack is None:
            raise InputError(each.refused or each.name)
        if not trust.trusted(each.digest):
            remember(each.digest)
    return found


def remember(digest: str) -> None:
    """InputError: the cache folder cannot be written."""
    try:
        trust.trust(digest)
    except OSError as error:
        folder = machine.cache_folder()
        raise InputError(
            f"{folder}: cannot remember there that kernels are trusted: {error.strerror}; set XDG_CACHE_HOME to a folder that "
            "you can write"
        ) from None


def preferred(archs: Sequence[str], sm: int, driver: int = PTX_DRIVER) -> list[str]:
    """Those of `archs` that a GPU runs, the best first: its own machine code, that of an older one, PTX.

    driver   CUDA version of the driver
    """
    ranks: dict[str, int] = {}
    for arch in archs:
        kind, _, number = arch.partition("_")
        capability = int(number)
        if kind == "sm" and capability == sm:
            ranks[arch] = 0
        elif kind == "sm" and capability // 10 == sm // 10 and capability < sm and not {capability, sm} & EMBEDDED:
            ranks[arch] = sm - capability
        elif kind == "compute" and capability <= sm and driver >= PTX_DRIVER:
            ranks[arch] = 1000
    return sorted(ranks, key=ranks.__getitem__)


def can_make() -> bool:
    return build.refusal() is None and nvrtc.refusal() is None


class Supply:
    """Kernels for one GPU and one model file.

    arch      the architecture that alone is used; None: the best of those that the GPU runs
    command   makes what is missing, on a machine with the extra `build`
    """

    def __init__(self, file: ModelFile, sm: int, driver: int = PTX_DRIVER, arch: str | None = None, command: str = "") -> None:
        self._sm, self._driver, self._arch = sm, driver, arch
        self._command = command or f"edgeq build {shlex.quote(str(file.path))} --for {arch_for(sm)}"
        self._found = list(packs(file))

    @property
    def _own(self) -> str:
        """The architecture that is compiled for here, and kept in the cache."""
        return self._arch or arch_for(self._sm)

    def refusal(self) -> str | None:
        """Why there are no kernels, as far as that can be told before a graph is compiled; None: there may be."""
        if can_make() or any(self._chosen(pack.archs) for pack in self._usable()) or build.keeps_images(self._own):
            return None
        refused = [each.refused for each in self._found if each.refused]
        others = sorted({arch for pack in self._usable() for arch in pack.archs})
        why = refused[0] if refused else f"kernels for {', '.join(others)} only" if others else "no kernels for it here"
        return f"{why}; on a machine with edgeq[build] run: {self._command}"

    def __call__(self, variants: Sequence[Variant], on_kernel: OnKernel) -> list[Generated]:
        """The kernels with machine code.  UnsupportedError names what is missing and the command that makes it."""
        found: list[Generated] = []
        missing: list[Variant] = []
        for done, variant in enumerate(variants):
            kernel = self._ready(variant) or self._made(variant, partial(on_kernel, done, variant.symbol))
            if kernel is None:
                missing.append(variant)
                continue
            if not kernel.image.startswith(ELF):
                on_kernel(done, f"{variant.symbol} from PTX, by the driver")
            found.append(kernel)
        if missing:
            names = ", ".join(variant.symbol for variant in missing[:3]) + (", ..." if len(missing) > 3 else "")
            why = "".join(f" ({each.refused})" for each in self._found if each.refused)
            raise UnsupportedError(
                f"{len(missing)} kernels for {self._arch or f'sm_{self._sm}'} are missing: {names}{why}; "
                f"on a machine with edgeq[build] run: {self._command}"
            )
        return found

    def _usable(self) -> list[Pack]:
        return [each.pack for each in self._found if each.pack and not each.refused]

    def _chosen(self, archs: Sequence[str]) -> list[str]:
        return preferred([arch for arch in archs if self._arch in (None, arch)], self._sm, self._driver)

    def _ready(self, variant: Variant) -> Generated | None:
        """From the cache, else from a pack."""
        for arch in self._chosen([*(f"sm_{sm}" for sm in COMPILED_FOR), VIRTUAL]):
            if arch == self._own and (kept := build.kept_image(variant, arch)):
                return _with(kept.generated, kept.images[arch])
        for pack in self._usable():
            kernel = pack.kernels.get(variant)
            if kernel and (archs := self._chosen(list(kernel.images))):
                return _with(kernel.generated, kernel.images[archs[0]])
        return None

    def _made(self, variant: Variant, on_start: Callable[[], None]) -> Generated | None:
        """Compiled here, from the text of a pack or of TVM; None: what that takes is not installed."""
        arch = self._own
        text = next((pack.kernels[variant].generated for pack in self._usable() if variant in pack.kernels), None)
        if nvrtc.refusal() or (text is None and build.refusal()) or not self._chosen([arch]):
            return None
        on_start()
        kernel = build.compiled(variant, [arch], text)
        return _with(kernel.generated, kernel.images[arch])


def _with(generated: Generated, image: Compiled) -> Generated:
    return replace(generated, image=image.image)
