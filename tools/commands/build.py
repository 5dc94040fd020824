"""`edgeq build`: the kernels of a model compiled ahead of its first run, here or for other machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edgeq.errors import InputError, UnsupportedError
from edgeq.format import kernel_pack
from edgeq.format.container import ModelFile
from edgeq.format.embedded_kernels import embed
from edgeq.format.kernel_pack import KernelSet
from edgeq.format.records import MODES, KvCodec, Mode
from edgeq.runtime import Model
from edgeq.runtime.load_options import MAX_LOGITS
from edgeq.runtime.network.adapted import with_every_part
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.network.draft_layer import drafting_decoder, drafting_layer, layer_options
from edgeq.runtime.network.policy import expert_graphs, expert_options
from edgeq.runtime.network.vision import tower
from edgeq.runtime.session.requantize import chosen
from edgeq.system import machine
from edgeq.system.devices import DEVICES
from edgeq.system.trust import digest_of
from edgeq.system.whole_file import write_whole
from edgeq.targets import TARGETS, kernel_packs, load
from edgeq.targets.kernel_packs import FoundPack
from edgeq.targets.target import BuiltKernel, BuiltKernels, Goal, KernelBuilder, Options, Workload
from edgeq.tools.cli.terminal import compilation, note, progress


def build(
    *,
    model: Path,
    goals: Sequence[str] | None,
    mode: Mode | None,
    caches: Sequence[str],
    out: Path | None,
    embedded: bool,
    target: str | None,
    isa: str | None,
    as_json: bool,
) -> None:
    """Compile into the cache of this machine, or for `goals` into a pack; a table, or one JSON object, to standard output.

    InputError: options that do not go together, an unknown goal, or a pack is there that is not trusted.  UnsupportedError: a
    compiler is missing, or the model has something that a target does not.
    """
    modes = (mode,) if mode else MODES
    if goals is None:
        if out or embedded:
            raise InputError("-o and --embed say where the kernels of --for go: name a device with --for")
        build_here(model, modes, caches, target, isa, as_json)
    elif target or isa:
        raise InputError("--target and --isa are for kernels of this machine; with --for the device says both")
    else:
        build_pack(model, wanted(goals), modes, caches, out, embedded=embedded, as_json=as_json)


def build_here(
    model: Path, modes: Sequence[Mode], caches: Sequence[str], target: str | None, isa: str | None, as_json: bool
) -> None:
    """Load the model in each mode and with each cache, with its layer that drafts and without.

    Kernels compiled earlier come from the cache of this machine.
    """
    started = perf_counter()
    drafts = ModelFile.open(model).metadata.config.draft_layers > 0
    for kv, mode, layer in product(caches, modes, (False, True) if drafts else (False,)):
        began = perf_counter()
        given: dict[str, Any] = {"mode": mode, "kv": kv, "target": target, "isa": isa, "draft_layer": layer}
        with compilation() as report:
            loaded = Model.load(model, on_progress=report, **given)
            if loaded.pictures:
                loaded.prepare_images(report)
        beside = " with its layer that drafts" if layer else ""
        note(f"{loaded.description}{beside}: ready after {perf_counter() - began:.1f} s")
        loaded.close()
    note(f"kernels are kept in {machine.cache_folder()}")
    if as_json:
        click.echo(json.dumps({"packs": [], "seconds": perf_counter() - started}, indent=1))


def build_pack(
    model: Path,
    goals: dict[str, list[Goal]],
    modes: Sequence[Mode],
    caches: Sequence[str],
    out: Path | None,
    *,
    embedded: bool,
    as_json: bool,
) -> None:
    """Compile for the goals of each target and write the kernels beside the model or into it."""
    started = perf_counter()
    builders = {name: builder_of(name) for name in goals}
    if reason := next((reason for builder in builders.values() if (reason := builder.refusal())), None):
        raise UnsupportedError(reason)
    file, path = ModelFile.open(model), out or kernel_pack.beside(model)
    # Asked before anything is compiled.
    before = inside(file) if embedded else beside(path)
    made = list[BuiltKernels]()
    work = workloads(file, modes, caches)
    for name, builder in builders.items():
        with progress() as report:
            made.append(builder.build(work, goals[name], report))
        for reason in made[-1].left_out:
            note(f"without the vision tower: {reason}")
    sets = [each for built in made for each in built.sets]
    lines = [line for built in made for line in built.kernels]
    compiled = sum(built.compiled for built in made)
    paths = write_inside(file, sets, before, out or model) if embedded else [write_beside(sets, before, path)]
    seconds = perf_counter() - started
    if as_json:
        packs = [{"path": str(path), "bytes": size, "digest": digest} for path, size, digest in paths]
        rows = [
            {"kernel": line.name, "for": line.goal, "arch": line.arch, "bytes": line.nbytes, **line.facts} for line in lines
        ]
        click.echo(json.dumps({"packs": packs, "compiled": compiled, "seconds": seconds, "kernels": rows}, indent=1))
        return
    show(lines)
    archs = ", ".join(sorted({each.arch for each in sets}))
    for path, size, digest in paths:
        note(f"{path}: kernels for {archs}, {size / 1e6:.1f} MB; {seconds:.1f} s, {compiled} compiled")
        note(f"on another machine: edgeq run {model.name} --trust-kernels, if the digest that it shows is {digest}")


def wanted(names: Sequence[str]) -> dict[str, list[Goal]]:
    """What is compiled for, by target.  InputError: a name is neither a device nor an architecture that is compiled for."""
    found: dict[str, list[Goal]] = {}
    for target, goal in map(goal_of, names):
        found.setdefault(target, []).append(goal)
    return found


def goal_of(name: str) -> tuple[str, Goal]:
    """The target that compiles for a device or an architecture, and for what.  InputError: there is none."""
    builders = {name: builder for name in TARGETS if (builder := load(name).builder())}
    device = DEVICES.get(name.lower())
    isa = device.isa if device else name.lower()
    for target, builder in builders.items():
        if arch := builder.arch_for(isa):
            return target, Goal(arch, device)
    archs = [arch for builder in builders.values() for arch in builder.architectures]
    raise InputError(f"--for {name}: not known; supported: {', '.join([*archs, *DEVICES])}")


def builder_of(target: str) -> KernelBuilder:
    builder = load(target).builder()
    assert builder is not None
    return builder


def workloads(file: ModelFile, modes: Sequence[Mode], caches: Sequence[str]) -> list[Workload]:
    """What a model runs in these modes, with these caches and any adapter, with its layer that drafts and without, the expert
    of a policy, and its vision tower."""
    found = []
    for kv in caches:
        codec = file.metadata.kv if kv == "file" else KvCodec(kv)  # type: ignore[arg-type]
        options = Options(modes[0], max_logits=MAX_LOGITS, kv=codec, requantize=chosen(None, file) is not None)
        # An adapter that is given when the model runs adds low-rank parts.
        for each in (file, with_every_part(file)):
            if each is not None:
                found.append(Workload(decoder(each.metadata), each, options, modes))
                if each.metadata.config.draft_layers:
                    graph = drafting_decoder(each.metadata)
                    found.append(Workload(graph, each, options, modes))
                    found.append(Workload(drafting_layer(each.metadata, 0, graph), each, layer_options(options), modes))
                if expert := each.metadata.config.policy:
                    given = expert_options(options, expert)
                    graphs = expert_graphs(each.metadata, 0, found[-1].graph)
                    found += [Workload(graph, each, given, modes) for graph in graphs]
    if file.metadata.config.vision:
        own = file.metadata.vision_mode
        options = Options(own or modes[0], max_logits=MAX_LOGITS)
        found.append(Workload(tower(file.metadata), file, options, (own,) if own else modes, optional=True))
    return found


Written = tuple[Path, int, str]
"""Path, bytes and digest of a pack."""


def beside(path: Path) -> list[KernelSet]:
    """The kernels of the pack that is there.  InputError: what is there is no pack, or not trusted."""
    data = kernel_pack.read(path)
    if data is not None and data[:8] != kernel_pack.MAGIC:
        raise InputError(f"{path}: exists and is no pack of kernels; it is not replaced: choose another name with -o")
    return usable(kernel_packs.examined(str(path), data)) if data is not None else []


def inside(file: ModelFile) -> list[KernelSet]:
    """The kernels inside a model file.  InputError: those of an architecture are not trusted."""
    found = (kernel_packs.examined(f"{file.path} ({a})", file.segment(i).data) for a, i in file.metadata.kernels.items())
    return [each for pack in found for each in usable(pack)]


def usable(pack: FoundPack) -> list[KernelSet]:
    """The sets of a pack that new kernels may join; those of another version, or of a damaged pack, are replaced.

    InputError: it is not trusted: its machine code would become this machine's own.
    """
    if pack.damaged is not None:
        note(f"it will be replaced: {pack.damaged}")
        return []
    current = []
    for each in pack.sets:
        builder = load(each.target).builder() if each.target in TARGETS else None
        reason = builder.outdated(each) if builder else f"kernels for {each.target}, which this edgeq does not know"
        if reason is None:
            current.append(each)
        else:
            note(f"{pack.name}, {each.arch}: it will be replaced: {reason}")
    if current and pack.distrusted:
        raise InputError(f"{pack.distrusted}; or give another name with -o")
    return current


def write_beside(made: Sequence[KernelSet], before: Sequence[KernelSet], path: Path) -> Written:
    written = kernel_pack.encode(kernel_pack.joined(before, made))
    try:
        write_whole(path, written)
    except OSError as error:
        raise InputError(f"{path}: cannot write it: {error.strerror}") from None
    return path, len(written), own(written)


def write_inside(file: ModelFile, made: Sequence[KernelSet], before: Sequence[KernelSet], out: Path) -> list[Written]:
    """Write the model with a pack for each architecture in it."""
    all_sets = kernel_pack.joined(before, made)
    packs = {each.arch: kernel_pack.encode([each]) for each in all_sets}
    embed(file, packs, out)
    return [(out, len(packs[each.arch]), own(packs[each.arch])) for each in made]


def own(data: bytes) -> str:
    """The digest of a pack, which this machine made and therefore trusts."""
    digest = digest_of(data)
    try:
        kernel_packs.remember(digest)
    except InputError as error:
        note(str(error))
    return digest


def show(lines: Sequence[BuiltKernel]) -> None:
    """A line for each kernel and goal; of a GPU, blocks and bytes in flight are those of a multiprocessor."""
    numbers = {"registers": "registers", "shared": "shared", "spilled": "spilled", "blocks": "blocks"}
    sizes = {"in_flight": "in flight", "needed": "needed"}
    of_gpu = any(line.facts for line in lines)
    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "for", "KB", *((*numbers.values(), *sizes.values()) if of_gpu else ())):
        table.add_column(name, justify="left" if name in ("kernel", "for") else "right", no_wrap=True)
    for line in lines:
        facts: dict[str, Any] = dict(line.facts)
        # PTX has no registers and no blocks yet.
        cells = [str(facts.get(name)) if facts.get("registers") else "" for name in numbers]
        cells += [f"{facts[name]:,}" if facts.get(name) else "" for name in sizes]
        table.add_row(line.name, line.goal, f"{line.nbytes / 1e3:.1f}", *(cells if of_gpu else ()))
    # A narrow terminal would cut names off: lines that are too long go on in the next one instead.
    console = Console(highlight=False, soft_wrap=True, width=max(120, Console().width))
    console.print(table)
    if of_gpu:
        console.print("blocks, and bytes of weights in flight: of a multiprocessor, computed from the numbers before them")
