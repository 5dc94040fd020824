"""Kernels for a program: generated where TVM is installed, compiled where NVRTC is, and kept on this machine.

What is kept is found by a digest of what it was made from: the sources of kernels/, the versions of TVM, the variant, and of
machine code the version of NVRTC.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from edgeq.errors import EdgeqError, FormatError, UnsupportedError
from edgeq.format import kernel_pack
from edgeq.system.machine import cache_folder
from edgeq.system.whole_file import write_whole
from edgeq.targets.cuda.supply import nvrtc, pack_file
from edgeq.targets.cuda.supply.nvrtc import Compiled
from edgeq.targets.cuda.supply.pack import Generated, Variant, decode, encode
from edgeq.targets.cuda.supply.pack_file import Pack, Packed

GENERATOR = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post0"}
COMPILER = {"nvidia-cuda-nvrtc-cu12": "12.6.85", "nvidia-cuda-runtime-cu12": "12.6.77"}
"""Distributions and the versions that the extra `build` pins: those of packs, where they are not installed."""
SOURCES = Path(__file__).parents[1]


def refusal() -> str | None:
    """Why kernels cannot be generated here; None if they can."""
    if importlib.util.find_spec("tvm") is None:
        return "apache-tvm is not installed; run: pip install edgeq[build]"
    return None


@cache
def source_digest() -> str:
    """Digest of the sources of the kernels, which name what a launch has to give them."""
    digest = hashlib.sha256()
    for path in (SOURCES / "supply" / "pack.py", *sorted((SOURCES / "kernels").rglob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def versions() -> dict[str, str]:
    """The installed versions of the distributions that make kernels, the pinned ones of those that are missing."""
    return {name: _installed(name) or pinned for name, pinned in (GENERATOR | COMPILER).items()}


@cache
def _installed(name: str) -> str | None:
    # Every kernel that is looked for asks, and to read what is installed takes milliseconds.
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def other_versions() -> str | None:
    """Why packs that are made here would be refused elsewhere; None: they would not."""
    wanted = GENERATOR | COMPILER
    other = [f"{name} {version}" for name, version in versions().items() if version != wanted[name]]
    return (
        f"{', '.join(other)} is installed, whose packs are refused elsewhere; run: pip install edgeq[build]" if other else None
    )


@cache
def generator_digest() -> str:
    """Digest of everything but the variant that the text of a kernel depends on."""
    made_by = versions()
    return _digest(source_digest(), *(f"{name} {made_by[name]}" for name in GENERATOR))


def image_digest() -> str:
    """Digest of everything but the variant that the machine code of a kernel depends on."""
    made_by = versions()
    return _digest(generator_digest(), nvrtc.PREAMBLE, *(f"{name} {made_by[name]}" for name in COMPILER))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


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
    path = cache_folder() / "cuda" / f"{variant.symbol}-{_digest(generator_digest(), repr(variant))}.json"
    try:
        stored = decode(path.read_text(encoding="utf-8"))
        if stored.variant == variant:
            return stored
    except (OSError, ValueError, FormatError):
        pass  # not there, or damaged: it is generated again
    from edgeq.targets.cuda.kernels.generate import generate

    generated = generate(variant)
    _keep(path, encode(generated).encode())
    return generated


def _keep(path: Path, data: bytes) -> None:
    # A cache that cannot be written costs a second per kernel, nothing else.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)


def _image_path(variant: Variant, arch: str) -> Path:
    return cache_folder() / "cuda" / f"{variant.symbol}-{_digest(repr(variant))[:16]}{_made_for(arch)}"


def _made_for(arch: str) -> str:
    """How the names of all files end that hold machine code of this version for one architecture."""
    return f"-{image_digest()}-{arch}.kernels"


def keeps_images(arch: str) -> bool:
    """Whether any kernel of this version was compiled for an architecture and is kept on this machine."""
    return next((cache_folder() / "cuda").glob(f"*{_made_for(arch)}"), None) is not None


def kept_image(variant: Variant, arch: str) -> Packed | None:
    """A kernel that was compiled on this machine earlier; None: it was not, or what is kept of it is damaged."""
    path = _image_path(variant, arch)
    try:
        data = kernel_pack.read(path)
        kernel = pack_file.decode(data, path.name).kernels.get(variant) if data else None
    except EdgeqError:
        return None
    return kernel if kernel and arch in kernel.images else None


def keep(variant: Variant, kernel: Packed) -> None:
    """Keep what was compiled of a kernel on this machine; the caller answers for where it comes from."""
    for arch, image in kernel.images.items():
        pack = Pack(versions(), source_digest(), {variant: Packed(kernel.generated, {arch: image})})
        _keep(_image_path(variant, arch), pack_file.encode(pack))


def compiled(variant: Variant, archs: Sequence[str], generated: Generated | None = None) -> Packed:
    """A kernel for these architectures, what is missing of it compiled now and kept.

    generated   its text, where it need not be generated

    UnsupportedError: TVM or NVRTC is missing, or the kernel does not compile.
    """
    images: dict[str, Compiled] = {}
    for arch in archs:
        known = kept_image(variant, arch)
        if known is None:
            generated = generated or kept(variant)
            if (reason := nvrtc.refusal()) is not None:
                raise UnsupportedError(f"kernel {variant.symbol} has to be compiled: {reason}")
            known = Packed(generated, {arch: nvrtc.reproduced(generated, arch)})
            keep(variant, known)
        generated = known.generated
        images |= known.images
    return Packed(generated or kept(variant), images)
