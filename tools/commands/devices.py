"""`edgeq devices`: this machine, the target and instruction set used on it and why, and the devices of `convert --for`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgeq.system import machine
from edgeq.system.devices import DEVICES, GIB
from edgeq.targets import TARGETS, load
from edgeq.targets.hardware import Hardware, InstructionSet
from edgeq.tools.cli.terminal import progress


def devices(as_json: bool) -> None:
    """Tables, or one JSON object, to standard output."""
    facts = collect()
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        show(facts)


def collect() -> dict[str, Any]:
    """Everything that is shown, as plain values: memory in bytes, bandwidth in bytes per second."""
    cpu, memory = machine.cpu(), machine.memory()
    refusals = {name: load(name).refusal() for name in TARGETS}
    chosen = next(name for name in TARGETS if refusals[name] is None)
    here = load("cpu").hardware() if refusals["cpu"] is None else Hardware()
    isas = here.instruction_sets()
    used = next((isa for isa in isas if isa.reason), None) if chosen == "cpu" else None
    with progress() as report:
        report(0, 0, "measuring how fast memory is read")
        bandwidth = {str(n): read for n in sorted({1, cpu.cores}) if (read := here.read_bandwidth(n))}
    return {
        "machine": {"cpu": cpu.name, "arch": cpu.arch, "cores": cpu.cores, "features": sorted(cpu.features)},
        "memory": {"total": memory.total, "available": memory.available},
        "read_bandwidth": {threads: read.bytes_per_s for threads, read in bandwidth.items()},
        "read_within_cache": any(read.in_cache for read in bandwidth.values()),
        "targets": [{"name": name, "refused": refusals[name]} for name in TARGETS],
        "gpus": [asdict(gpu) for name in TARGETS for gpu in load(name).gpus()],
        "isas": [instruction_set(isa) for isa in isas],
        "used": {"target": chosen, "isa": used.name if used else None, "reason": used.reason if used else None},
        "profiles": [asdict(device) for device in DEVICES.values()],
    }


def instruction_set(isa: InstructionSet) -> dict[str, Any]:
    return {"name": isa.name, "label": isa.label, "missing": list(isa.missing), "refused": isa.refused}


def labelled(isas: list[dict[str, Any]]) -> str:
    """Instruction sets as people call them, each with the names that options take and what the processor lacks for it."""
    groups: dict[tuple[str, str], list[str]] = {}
    for isa in isas:
        needs = f"; needs {', '.join(isa['missing'])}" if isa["missing"] else ""
        groups.setdefault((isa["label"], needs), []).append(isa["name"])
    return ", ".join(f"{label} ({' or '.join(names)}{needs})" for (label, needs), names in groups.items())


def gpu_line(gpu: dict[str, Any]) -> str:
    shared = ", shares its memory with the processor" if gpu["integrated"] else ""
    speed = f", reads {gpu['read_bandwidth'] / 1e9:.0f} GB/s (measured)" if gpu["read_bandwidth"] else ""
    return (
        f"GPU {gpu['ordinal']}: {escape(gpu['name'])}, sm_{gpu['sm']}, {gpu['multiprocessors']} multiprocessors, "
        f"{gpu['memory'] / GIB:.1f} GiB{shared}, driver of CUDA {gpu['driver'] // 1000}.{gpu['driver'] % 1000 // 10}{speed}: "
        f"{escape(gpu['refused'] or 'can be used')}"
    )


def show(facts: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(highlight=False, soft_wrap=True)
    cpu, memory, used = facts["machine"], facts["memory"], facts["used"]
    console.print(f"{escape(cpu['cpu'])}, {cpu['arch']}, {cpu['cores']} cores")
    console.print(f"memory {memory['total'] / GIB:.1f} GiB, {memory['available'] / GIB:.1f} GiB available")
    of_cache = " within the cache: too little memory is free" if facts["read_within_cache"] else ""
    for threads, bandwidth in facts["read_bandwidth"].items():
        console.print(
            f"reads {bandwidth / 1e9:.1f} GB/s with {threads} thread{'s' if threads != '1' else ''} (measured{of_cache})"
        )
    for item in facts["targets"]:
        console.print(f"target {item['name']}: {escape(item['refused'] or 'can be used')}")
    for gpu in facts["gpus"]:
        console.print(gpu_line(gpu))
    if facts["isas"]:
        here, others = (labelled([i for i in facts["isas"] if bool(i["missing"]) is lacking]) for lacking in (False, True))
        console.print(f"instruction sets, by the names that --isa takes: {here}; not here: {others or 'none'}")
    chosen = labelled([isa for isa in facts["isas"] if isa["name"] == used["isa"]])
    isa = f" with {chosen}: {used['reason']}" if chosen else ""
    console.print(f"will be used: {used['target']}{escape(isa)}")
    console.print()
    table = Table(box=None, pad_edge=False)
    for name in ("--for", "isa", "cores", "SMs", "GiB", "GB/s", "read GB/s"):
        table.add_column(name, justify="left" if name in ("--for", "isa") else "right")
    for d in facts["profiles"]:
        read = f"{d['read_bandwidth'] / 1e9:.1f}" if d["read_bandwidth"] else ""
        counts = [str(d[name] or "") for name in ("cores", "multiprocessors")]
        table.add_row(d["name"], d["isa"], *counts, f"{d['memory'] / GIB:.0f}", f"{d['bandwidth'] / 1e9:.1f}", read)
    console.print(table)
