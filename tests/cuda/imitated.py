"""An imitated GPU: cuda.bindings itself, over a libcuda.so.1 that runs kernels on the emulator (imitation/libcuda.cpp).

A process gets it by its environment, so each of these tests is a process: the command line, or a few lines of Python.
`python -m tests.cuda.imitated 90,87 ...` runs the tests of kernels as on a GPU of the first of these compute capabilities, from
a pack and without TVM and NVRTC, and on the others those that depend on it; what follows goes to pytest.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from edgeq.targets.cuda.device import discover
from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.nvrtc import Compiled
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.cuda.supply.pack_file import Pack, Packed
from tests.cuda import asked, emulated
from tests.cuda.first_run import carried

HERE = Path(__file__).parent / "imitation"
ROOMS = {"models", "operations"}
"""Those that `--gpu` runs (conftest.py)."""
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
    with suppress(FileExistsError):  # another worker may make it at the same moment
        (folder / "libcuda.so.1").symlink_to(made)
    return folder


def kernels(variants: Iterable[Variant], folder: Path) -> Path:
    """A folder with what an imitated GPU runs for the machine code of these kernels."""
    folder.mkdir(exist_ok=True)
    for generated in build.kernels(list(variants)):
        made = emulated.compiled_kernel(generated)
        (folder / f"{generated.name}.so").symlink_to(made)
        sizes = " ".join(str(SIZES[parameter.type]) for parameter in generated.parameters)
        (folder / f"{generated.name}.sizes").write_text(sizes)
    return folder


def pack(variants: Iterable[Variant]) -> bytes:
    """A pack of these kernels for any imitated GPU: instead of PTX the name alone, as the imitation does not read it."""
    made = {
        generated.variant: Packed(generated, {nvrtc.VIRTUAL: Compiled(nvrtc.VIRTUAL, f".version {generated.name}".encode())})
        for generated in build.kernels(list(variants))
    }
    return carried.write(Pack(build.versions(), build.source_digest(), made))


def nvidia_smi(folder: Path) -> Path:
    """A folder with an nvidia-smi that tells of the imitated GPU, as drivers of desktops and servers bring one."""
    folder.mkdir(exist_ok=True)
    lines = "Imitated GPU 0, 53.1, 41, 1500, 550.54, 120.00"
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{lines}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return folder


def environment(cache: Path, kernels: Path | None = None, *, bare: bool = False, **settings: object) -> dict[str, str]:
    """That of a process which has an imitated GPU; `settings` are those of libcuda.cpp, in lower case.

    bare   it has neither TVM nor NVRTC, nor has what it starts, as workers that run tests side by side
    """
    core = emulated.compiled((emulated.HERE / "emulator.cpp").read_text(), "emulator", "-O2")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(library()),
        "XDG_CACHE_HOME": str(cache),
        "IMITATED_CORE": str(core),
        "IMITATED_KERNELS": str(kernels or ""),
        **({"PYTHONPATH": str(HERE / "bare")} if bare else {}),
        **{f"IMITATED_{name.upper()}": str(value) for name, value in settings.items()},
    }


def run(
    *arguments: str | Path, cache: Path, kernels: Path | None = None, bare: bool = False, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments on a machine with an imitated GPU."""
    command, here = [sys.executable, *map(str, arguments)], environment(cache, kernels, bare=bare, **settings)
    return subprocess.run(command, env=here, capture_output=True, text=True, timeout=600)


def of_capability() -> list[Path]:
    """Files of tests of kernels that name an architecture.  To all others every imitated GPU is the same: it runs what the
    emulator made of a kernel, whatever the machine code is for."""
    files = (path for path in sorted(HERE.parent.glob("*/test_*.py")) if path.parent.name in ROOMS)
    return [path for path in files if re.search(r"\bsm_|\bisa\b|\.sm\b|\bcompute_", path.read_text(encoding="utf-8"))]


def main(capabilities: Sequence[int], arguments: Sequence[str]) -> None:
    """All tests on the first, on the others those of `of_capability`, to the end; exits with 1 if any failed."""
    if reason := refusal() or build.refusal():
        sys.exit(reason)
    failed = []
    with tempfile.TemporaryDirectory(prefix="edgeq-") as name:
        folder = Path(name)
        made, path = kernels(asked.every(), folder / "kernels"), folder / "pack"
        path.write_bytes(pack(asked.every()))
        for at, sm in enumerate(capabilities):
            tests = of_capability() if at else [HERE.parent]
            here = environment(folder / "cache", made, bare=True, sm=sm)
            here["PATH"] = f"{nvidia_smi(folder / 'bin')}:{here['PATH']}"
            command = [sys.executable, "-m", "pytest", "--gpu", "--pack", str(path), *map(str, tests), *arguments]
            print(f"== an imitated GPU of sm_{sm}", flush=True)
            if subprocess.run(command, env=here).returncode:
                failed.append(sm)
    if failed:
        sys.exit(f"failed on {', '.join(f'sm_{sm}' for sm in failed)}")


if __name__ == "__main__":
    main([int(sm) for sm in sys.argv[1].split(",")], sys.argv[2:])
