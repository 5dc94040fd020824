"""An imitated GPU: cuda.bindings itself, over a libcuda.so.1 that runs kernels on the emulator (imitation/libcuda.cpp).

A process gets it by its environment, so each of these tests is a process: the command line, or a few lines of Python.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from edgeq.targets.cuda.device import discover
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.pack import Variant
from tests.cuda import emulated

HERE = Path(__file__).parent / "imitation"
SIZES = {"pointer": 8, "int64": 8, "int32": 4, "float32": 4}


def refusal() -> str | None:
    """Why nothing can be imitated here; None if it can."""
    if reason := emulated.refusal():
        return reason
    if importlib.util.find_spec("cuda") is None:
        return discover.NOT_INSTALLED
    return None


def library() -> Path:
    """The folder with the imitated libcuda.so.1."""
    text = (HERE / "libcuda.cpp").read_text()
    made = emulated.compiled(text, "libcuda", "-O1", "-Wl,-soname,libcuda.so.1")
    folder = made.with_suffix("")
    folder.mkdir(exist_ok=True)
    link = folder / "libcuda.so.1"
    if not link.is_symlink():
        link.symlink_to(made)
    return folder


def kernels(variants: Iterable[Variant], folder: Path) -> Path:
    """A folder with what an imitated GPU runs for the machine code of these kernels."""
    folder.mkdir(exist_ok=True)
    for generated in build.kernels(list(variants)):
        made = emulated.compiled(emulated.translated(generated), generated.variant.symbol, "-O1")
        (folder / f"{generated.name}.so").symlink_to(made)
        sizes = " ".join(str(SIZES[parameter.type]) for parameter in generated.parameters)
        (folder / f"{generated.name}.sizes").write_text(sizes)
    return folder


def run(
    *arguments: str | Path, cache: Path, kernels: Path | None = None, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments on a machine with an imitated GPU; `settings` are those of libcuda.cpp, in lower case."""
    core = emulated.compiled((emulated.HERE / "emulator.cpp").read_text(), "emulator", "-O2")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library()),
        "XDG_CACHE_HOME": str(cache),
        "IMITATED_CORE": str(core),
        "IMITATED_KERNELS": str(kernels or ""),
        **{f"IMITATED_{name.upper()}": str(value) for name, value in settings.items()},
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
