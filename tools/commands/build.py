"""`edgeq build`: the kernels of a model for GPUs, generated and compiled on a machine that needs no GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edgeq.errors import InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.records import MODES, KvCodec, Mode
from edgeq.runtime.load_options import MAX_LOGITS
from edgeq.runtime.network.adapted import with_every_part
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.network.vision import tower
from edgeq.runtime.session.requantize import chosen
from edgeq.system.devices import DEVICES, DeviceSpec
from edgeq.system.trust import digest_of, trusted
from edgeq.system.whole_file import write_whole
from edgeq.targets.cuda.device import occupancy
from edgeq.targets.cuda.run import plan
from edgeq.targets.cuda.supply import build as kernels
from edgeq.targets.cuda.supply import nvrtc, pack_file, parallel, supply
from edgeq.targets.cuda.supply.embed import embed
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.cuda.supply.pack_file import Pack
from edgeq.targets.target import Options
from edgeq.tools.cli.terminal import note, progress


@dataclass(frozen=True)
class Goal:
    """What is compiled for: an architecture, and the device of that name where one was named."""

    arch: str
    device: DeviceSpec | None = None


def build(
    *,
    model: Path,
    goals: Sequence[str] | None,
    mode: Mode | None,
    caches: Sequence[str],
    out: Path | None,
    embedded: bool,
    as_json: bool,
) -> None:
    """A table, or one JSON object, to standard output; the pack to a file.

    InputError: no GPU is named and none is here, or a pack is there that is not trusted.  UnsupportedError: TVM or NVRTC is
    missing, or the model has something that the target does not.
    """
    started = perf_counter()
    wanted = [goal(name) for name in goals] if goals else [here()]
    for reason in (kernels.refusal(), nvrtc.refusal()):
        if reason:
            raise UnsupportedError(reason)
    file, path = ModelFile.open(model), out or pack_file.beside(model)
    # Asked before anything is compiled.
    before = inside(file) if embedded else beside(path)
    variants = needed(file, (mode,) if mode else MODES, caches)
    archs = sorted({each.arch for each in wanted} | {nvrtc.VIRTUAL})
    with progress() as report:
        made, compiled = parallel.compiled(variants, archs, report)
    pack = Pack(kernels.versions(), kernels.source_digest(), made)
    paths = write_inside(file, pack, before, out or model) if embedded else [write_beside(pack, before, path)]
    seconds = perf_counter() - started
    rows = [row for variant in variants for row in facts(pack, variant, wanted)]
    if as_json:
        packs = [{"path": str(path), "bytes": size, "digest": digest} for path, size, digest in paths]
        click.echo(json.dumps({"packs": packs, "compiled": compiled, "seconds": seconds, "kernels": rows}, indent=1))
        return
    show(rows)
    for path, size, digest in paths:
        archs_of = f"{len(variants)} kernels for {', '.join(archs)}"
        note(f"{path}: {archs_of}, {size / 1e6:.1f} MB; {seconds:.1f} s, {compiled} compiled")
        note(f"on another machine: edgeq run {model.name} --trust-kernels, if the digest that it shows is {digest}")


def goal(name: str) -> Goal:
    """InputError: neither a GPU of `edgeq devices` nor an architecture that is compiled for."""
    device = DEVICES.get(name.lower())
    wanted = device.isa if device is not None else name.lower()
    if wanted == nvrtc.VIRTUAL:
        return Goal(wanted)
    capability = re.fullmatch(r"sm_(\d{2,3})", wanted, re.ASCII)
    # Of a GPU that this compiler does not know, the driver makes machine code from PTX.
    if capability and int(capability[1]) >= min(nvrtc.COMPILED_FOR):
        return Goal(nvrtc.arch_for(int(capability[1])), device)
    archs = ", ".join(f"sm_{sm}" for sm in nvrtc.COMPILED_FOR)
    gpus = ", ".join(known.name for known in DEVICES.values() if known.isa.startswith("sm_"))
    raise InputError(f"--for {name}: not a GPU that is compiled for; supported: {archs} and later, {nvrtc.VIRTUAL}, {gpus}")


def here() -> Goal:
    """The GPU of this machine.  InputError: there is none that can be used."""
    from edgeq.targets.cuda.device.discover import find

    gpus = find()
    if gpus.first is None:
        raise InputError(f"--for is needed, as this machine has no GPU to build for: {gpus.refused}")
    return Goal(nvrtc.arch_for(gpus.first.sm))


def needed(file: ModelFile, modes: Sequence[Mode], caches: Sequence[str]) -> list[Variant]:
    """The kernels that a model launches in these modes, with these caches and any adapter; those of its vision tower too."""
    found: dict[Variant, None] = {}
    for kv in caches:
        codec = file.metadata.kv if kv == "file" else KvCodec(kv)  # type: ignore[arg-type]
        options = Options(modes[0], max_logits=MAX_LOGITS, kv=codec, requantize=chosen(None, file) is not None)
        # An adapter that is given when the model runs adds low-rank parts.
        for each in (file, with_every_part(file)):
            if each is not None:
                found.update(dict.fromkeys(plan.variants(decoder(each.metadata), each, options, modes)))
    if file.metadata.config.vision:
        own = file.metadata.vision_mode
        options = Options(own or modes[0], max_logits=MAX_LOGITS)
        try:
            found.update(dict.fromkeys(plan.variants(tower(file.metadata), file, options, (own,) if own else modes)))
        except UnsupportedError as error:
            note(f"without the vision tower: {error}")
    return sorted(found, key=lambda variant: variant.symbol)


Written = tuple[Path, int, str]
"""Path, bytes and digest of a pack."""


def beside(path: Path) -> dict[str, Pack]:
    """The pack that is there, by the name of its file.  InputError: what is there is no pack, or not trusted."""
    data = pack_file.read(path)
    if data is not None and data[:8] != pack_file.MAGIC:
        raise InputError(f"{path}: exists and is no pack of kernels; it is not replaced: choose another name with -o")
    pack = usable(supply.examined(str(path), data)) if data is not None else None
    return {path.name: pack} if pack else {}


def inside(file: ModelFile) -> dict[str, Pack]:
    """The packs inside a model file, by architecture.  InputError: one is not trusted."""
    found = {
        arch: usable(supply.examined(f"{file.path} ({arch})", file.segment(index).data))
        for arch, index in file.metadata.kernels.items()
    }
    return {arch: pack for arch, pack in found.items() if pack}


def usable(found: supply.Found) -> Pack | None:
    """A pack that new kernels may join; None: it is of another version, or damaged, and is replaced.

    InputError: it is not trusted: its machine code would become this machine's own.
    """
    if found.refused is None:
        return found.pack
    if found.pack is not None and not trusted(found.digest):
        raise InputError(f"{found.refused}; or give another name with -o")
    note(f"it will be replaced: {found.refused}")
    return None


def write_beside(pack: Pack, before: dict[str, Pack], path: Path) -> Written:
    for other in before.values():
        pack = other.joined(pack)
    written = pack_file.encode(pack)
    try:
        write_whole(path, written)
    except OSError as error:
        raise InputError(f"{path}: cannot write it: {error.strerror}") from None
    return path, len(written), own(written)


def write_inside(file: ModelFile, pack: Pack, before: dict[str, Pack], out: Path) -> list[Written]:
    """Write the model with a pack for each architecture in it."""
    packs: dict[str, bytes] = {}
    for arch in pack.archs:
        mine = pack.only(arch)
        packs[arch] = pack_file.encode(before[arch].joined(mine) if arch in before else mine)
    embed(file, packs, out)
    return [(out, len(data), own(data)) for data in packs.values()]


def own(data: bytes) -> str:
    """The digest of a pack, which this machine made and therefore trusts."""
    digest = digest_of(data)
    try:
        supply.remember(digest)
    except InputError as error:
        note(str(error))
    return digest


def facts(pack: Pack, variant: Variant, wanted: Sequence[Goal]) -> list[dict[str, Any]]:
    """A line for each GPU that a kernel was compiled for; bytes."""
    kernel = pack.kernels[variant]
    threads, lines = occupancy.threads_of(kernel.generated), []
    for each in wanted:
        image = kernel.images[each.arch]
        blocks = occupancy.blocks_held(image, threads)
        in_flight = occupancy.bytes_in_flight(variant, blocks, threads) if blocks else None
        lines.append(
            {
                "kernel": variant.symbol,
                "for": each.device.name if each.device else each.arch,
                "arch": each.arch,
                "bytes": len(image.image),
                "registers": image.registers,
                "shared": image.shared,
                "spilled": image.spilled,
                "threads": threads,
                "blocks": blocks,
                "in_flight": in_flight,
                "needed": occupancy.bytes_needed(each.device) if each.device and in_flight else None,
            }
        )
    return lines


def show(rows: list[dict[str, Any]]) -> None:
    """Per kernel and GPU; blocks and bytes in flight are those of a multiprocessor."""
    table = Table(box=None, pad_edge=False)
    columns = ("kernel", "for", "KB", "registers", "shared", "spilled", "blocks", "in flight", "needed")
    for name in columns:
        table.add_column(name, justify="left" if name in ("kernel", "for") else "right", no_wrap=True)
    for row in rows:
        numbers = [str(row[name]) if row["registers"] else "" for name in ("registers", "shared", "spilled")]
        sizes = [f"{row[name]:,}" if row[name] else "" for name in ("in_flight", "needed")]
        table.add_row(row["kernel"], row["for"], f"{row['bytes'] / 1e3:.1f}", *numbers, str(row["blocks"] or ""), *sizes)
    # A narrow terminal would cut names off: lines that are too long go on in the next one instead.
    console = Console(highlight=False, soft_wrap=True, width=max(120, Console().width))
    console.print(table)
    console.print("blocks, and bytes of weights in flight: of a multiprocessor, computed from the numbers before them")
