"""`edgeq warm`: compile the kernels of a model ahead of its first run, here or for another machine."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from edgeq.errors import InputError, ResourceError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.records import MODES, KvCodec, Mode
from edgeq.runtime import Model
from edgeq.runtime.load_options import MAX_LOGITS
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.network.vision import tower
from edgeq.runtime.session.requantize import Requantization, chosen
from edgeq.system import machine
from edgeq.system.devices import DEVICES
from edgeq.system.trust import digest_of
from edgeq.targets.target import Options
from edgeq.tools.cli.terminal import compilation, note


def warm(
    *, model: Path | None, device: str | None, out: Path | None, source: Path | None, trust: str | None, **options: Any
) -> None:
    """Compile here, compile for a device, or install what was compiled for this one.  InputError: options of more than one."""
    if (model is None) == (source is None):
        raise InputError("give a model file to compile for, or --from and a file of kernels")
    if (device is None) != (out is None) or (source and device):
        raise InputError("--for and -o go together, with a model file")
    if trust and not source:
        raise InputError("--trust goes with --from")
    if source:
        install(source, trust)
    elif device and out and model:
        compile_for(device, model, out, **options)
    elif model:
        compile_here(model, **options)


def compile_here(model: Path, *, mode: Mode | None, **options: Any) -> None:
    """Compile for `mode`, or for every mode, and print how long that took.  Kernels compiled earlier come from the cache."""
    for each in (mode,) if mode else MODES:
        started = perf_counter()
        with compilation() as report:
            loaded = Model.load(model, mode=each, on_progress=report, **options)
            if loaded.pictures:
                loaded.prepare_images(report)
        note(f"{loaded.description}: ready after {perf_counter() - started:.1f} s")
    note(f"kernels are kept in {machine.cache_folder()}")


def compile_for(
    name: str,
    model: Path,
    out: Path,
    *,
    mode: Mode | None,
    kv: str,
    isa: str | None,
    target: str | None,
    requantization: Requantization | None,
    **_threads: Any,
) -> None:
    """Compile for the device `name` and write the kernels to `out`."""
    from edgeq.targets.cpu.ahead import jobs_for
    from edgeq.targets.cpu.jit import archive
    from edgeq.targets.cpu.jit.parallel import compile_by, workers_for

    if target not in (None, "cpu"):
        raise InputError(f"target {target} compiles nothing; leave --target out")
    goal, file, started = DEVICES[name], ModelFile.open(model), perf_counter()
    codec = file.metadata.kv if kv == "file" else KvCodec(kv)  # type: ignore[arg-type]
    requantize = chosen(requantization, file) is not None
    options = Options(mode or MODES[0], isa=isa, max_logits=MAX_LOGITS, kv=codec, requantize=requantize)
    modes = (mode,) if mode else MODES
    jobs = jobs_for(goal, decoder(file.metadata), file, options, modes)
    if file.metadata.config.vision:
        own = file.metadata.vision_mode
        options = replace(options, kv=KvCodec(), requantize=False)
        jobs = list(dict.fromkeys(jobs + jobs_for(goal, tower(file.metadata), file, options, (own,) if own else modes)))
    with tempfile.TemporaryDirectory() as folder:
        with compilation(goal.name) as report:
            failures = compile_by(max(1, workers_for(len(jobs))), jobs, Path(folder), goal, report)
        if failures:
            raise UnsupportedError(f"the compiler for {goal.name} ended: {failures[0]}")
        if len(list(Path(folder).iterdir())) < len(jobs):
            raise ResourceError("no process could be started to compile")
        archive.write(out, Path(folder), goal)
    digest = digest_of(out.read_bytes())
    note(f"{out}: {len(jobs)} kernels for {goal.name}, {out.stat().st_size / 1e6:.1f} MB, {perf_counter() - started:.1f} s")
    note(f"on the device: edgeq warm --from {out.name} --trust {digest}")


def install(path: Path, trust: str | None) -> None:
    """Install kernels that were compiled elsewhere, if the user trusts them: by `trust`, the file's digest, or when asked."""
    from edgeq.targets.cpu.jit.archive import Archive

    archive = Archive(path)
    if trust is not None and trust.lower() != archive.digest:
        raise InputError(f"{path}: its digest is {archive.digest}, not {trust}; nothing was installed")
    if trust is None and not archive.trusted:
        note(f"{path}: {len(archive)} kernels for {archive.device}, digest {archive.digest}")
        if not (sys.stdin and sys.stdin.isatty()):
            raise InputError(f"{path}: machine code; if its maker told you this digest, pass --trust {archive.digest}")
        if not click.confirm("They are machine code and can do what you can do. Install them?", err=True):
            raise InputError("nothing was installed")
    try:
        archive.trust()
        added = archive.install()
    except OSError as error:
        raise InputError(f"{machine.cache_folder()}: cannot write there: {error.strerror}") from None
    note(f"{added} of {len(archive)} kernels added; kept in {machine.cache_folder()}")
