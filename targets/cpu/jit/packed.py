"""Kernels of processors in packs: object files that were compiled on one machine for another.

Nothing in the code depends on the version of Python.  What a trusted pack has for this processor is put where kernels are
looked for, so that it is found like what was compiled here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from edgeq.format.container import ModelFile
from edgeq.format.kernel_pack import KernelSet, StoredKernel
from edgeq.system import machine
from edgeq.system.whole_file import write_whole
from edgeq.targets import kernel_packs
from edgeq.targets.cpu.jit import compile, processor
from edgeq.targets.kernel_packs import FoundPack
from edgeq.targets.target import KernelPack

TARGET = "cpu"
MAX_KERNEL_BYTES = 4 << 20
_NAME = re.compile(r"[a-z0-9_]{1,40}(-[a-z0-9_]{1,40}){1,16}", re.ASCII)
_log = logging.getLogger(__name__)


def kernel_set(isa: str, folder: Path) -> KernelSet:
    """The object files of `folder`, which were compiled for the processor of devices of `isa`."""
    kernels = {path.stem: StoredKernel(None, (path.read_bytes(),)) for path in sorted(folder.glob("*.o"))}
    versions = {name: metadata.version(name) for name in ("numba", "llvmlite")}
    return KernelSet(TARGET, isa, compile.source_digest(), versions, kernels)


def outdated(made: KernelSet) -> str | None:
    """Why kernels are not those of this edgeq, as the end of a message; None: they are."""
    if made.arch not in processor.ISAS or made.sources != compile.source_digest():
        return "its kernels are those of another version of edgeq, numba or llvmlite; install the same versions here and there"
    if damaged := [name for name, kernel in made.kernels.items() if not _is_sound(name, kernel)]:
        return f"{damaged[0]} is no kernel of a processor; build it again"
    return None


def _is_sound(name: str, kernel: StoredKernel) -> bool:
    return bool(_NAME.fullmatch(name)) and len(kernel.pieces) == 1 and len(kernel.pieces[0]) <= MAX_KERNEL_BYTES


def _other_processor(made: KernelSet) -> str | None:
    wanted, cpu = processor.of_isa(made.arch), machine.cpu()
    if wanted.arch != cpu.arch:
        return f"kernels for {made.arch} ({wanted.arch}); this processor is {cpu.arch}"
    if missing := sorted(wanted.features - cpu.features):
        return f"kernels for {made.arch}; this processor lacks {', '.join(missing)}"
    return None


def _of_processors(file: ModelFile) -> Iterator[tuple[FoundPack, Sequence[KernelSet]]]:
    """The packs of a file that have kernels for processors."""
    for pack in kernel_packs.packs(file):
        if sets := [each for each in pack.sets if each.target == TARGET]:
            yield pack, sets


def facts(file: ModelFile) -> list[KernelPack]:
    """What is beside and inside a file for processors, and why nothing of it is used here."""
    found = []
    for pack, sets in _of_processors(file):
        reasons = [outdated(each) or _other_processor(each) for each in sets]
        refused = pack.distrusted if None in reasons else f"{pack.name}: {reasons[0]}"
        archs = {each.arch: len(each.kernels) for each in sets}
        names = {name for each in sets for name in each.kernels}
        found.append(KernelPack(pack.name, pack.digest, refused, len(names), archs, dict(sets[0].versions)))
    return found


def install(file: ModelFile) -> int:
    """Put kernels of trusted packs that fit this processor where kernels are looked for; those that are there stay.

    Returns how many were added.  What is not trusted is logged, if it has a kernel that is not there.
    """
    folder, added = compile.cache_folder(), 0
    for pack, sets in _of_processors(file):
        # Of several for one architecture the one that uses most of it.
        fitting = [each for each in sets if outdated(each) is None and _other_processor(each) is None]
        for each in sorted(fitting, key=lambda each: -len(processor.of_isa(each.arch).features)):
            missing = [name for name in each.kernels if not (folder / f"{name}.o").exists()]
            if missing and pack.distrusted:
                _log.warning("%s", pack.distrusted)
                break
            # Where the folder cannot be written, kernels are compiled.
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                for name in missing:
                    write_whole(folder / f"{name}.o", each.kernels[name].pieces[0])
                    added += 1
    return added
