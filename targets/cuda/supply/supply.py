"""Where the kernels of a program come from: this machine's cache, a trusted pack, the compilers that are installed.

Packs are those of targets/kernel_packs.py; which of their kernels fit this edgeq and a GPU is decided here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edgeq.errors import FormatError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.kernel_pack import KernelSet
from edgeq.targets import kernel_packs
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
    """The packs of a model file that have kernels for GPUs, or cannot be read; why nothing is used is told in `refused`."""
    for pack in kernel_packs.packs(file):
        sets = [each for each in pack.sets if each.target == pack_file.TARGET]
        if pack.damaged is not None:
            yield Found(pack.name, pack.digest, None, pack.damaged)
        elif sets:
            yield _fitting(pack.name, pack.digest, sets, pack.distrusted)


def _fitting(name: str, digest: str, sets: Sequence[KernelSet], distrusted: str | None) -> Found:
    # A set of another version beside those of this one is left alone.
    reasons = [outdated(each) for each in sets]
    fitting = [each for each, reason in zip(sets, reasons, strict=True) if reason is None]
    try:
        pack = pack_file.pack_of(fitting or sets)
    except FormatError as error:
        return Found(name, digest, None, f"{name}: {error}")
    return Found(name, digest, pack, distrusted if fitting else f"{name}: {reasons[0]}")


def outdated(made: KernelSet) -> str | None:
    """Why kernels are not those of this edgeq, as the end of a message; None: they are."""
    if made.sources != build.source_digest():
        return "its kernels are those of another version of edgeq; build it again with this one"
    wanted = build.GENERATOR | build.COMPILER
    if other := [f"{program} {version}" for program, version in sorted(set(made.versions.items()) - set(wanted.items()))]:
        return f"made by {', '.join(other)}, this edgeq takes those of `pip install edgeq[build]`; build it again"
    return None


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
        self._packs = list(packs(file))

    @property
    def _own(self) -> str:
        """The architecture that is compiled for here, and kept in the cache."""
        return self._arch or arch_for(self._sm)

    def refusal(self) -> str | None:
        """Why there are no kernels, as far as that can be told before a graph is compiled; None: there may be."""
        if can_make() or any(self._chosen(pack.archs) for pack in self._usable()) or build.keeps_images(self._own):
            return None
        refused = [each.refused for each in self._packs if each.refused]
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
            why = "".join(f" ({each.refused})" for each in self._packs if each.refused)
            raise UnsupportedError(
                f"{len(missing)} kernels for {self._arch or f'sm_{self._sm}'} are missing: {names}{why}; "
                f"on a machine with edgeq[build] run: {self._command}"
            )
        return found

    def _usable(self) -> list[Pack]:
        return [each.pack for each in self._packs if each.pack and not each.refused]

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
