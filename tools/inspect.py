"""`edgeq inspect`: what is in a file, and how fast memory allows it to be."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgeq import machine, measurements
from edgeq.container import VERSION, ModelFile
from edgeq.records import LinearSpec
from edgeq.tools.report import bits_per_weight
from edgeq.tools.terminal import progress


def inspect(*, model: Path, verify: bool, as_json: bool) -> None:
    """Tables, or one JSON object, to standard output.

    InputError, FormatError, UnsupportedError: as ModelFile.open; FormatError from `verify` names the damaged layer.
    """
    file = ModelFile.open(model)
    if verify:
        with progress() as report:
            for done, total in file.verify():
                report(done, total, "verify")
    facts = collect(file, verify)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        show(facts)


def collect(file: ModelFile, verified: bool) -> dict[str, Any]:
    """Everything that is shown, as plain values: sizes in bytes, bandwidth in bytes per second."""
    metadata = file.metadata
    sizes = metadata.bytes_per_token()
    per_token = sizes["weights"] + sizes["head"]
    bandwidth = measurements.known("read_bandwidth", machine.cpu().cores)
    return {
        "file": str(file.path),
        "bytes": file.size,
        "version": VERSION,
        "identity": file.identity,
        "verified": verified,
        "segments": len(file.segments),
        "config": asdict(metadata.config),
        "default_mode": metadata.default_mode,
        "generation": metadata.generation,
        "provenance": metadata.provenance,
        "layers": layers(list(metadata.linears.values())),
        "arrays": {"count": len(metadata.arrays), "bytes": sum(a.nbytes for a in metadata.arrays.values())},
        "blobs": {name: file.segments[index].length for name, index in metadata.blobs.items()},
        "bits_per_weight": {
            "all": bits_per_weight(metadata, lambda name: True),
            "decoder": bits_per_weight(metadata, lambda name: name != "head"),
            "head": bits_per_weight(metadata, lambda name: name == "head"),
        },
        "bytes_per_token": sizes,
        "kv": metadata.kv.name,
        "read_bandwidth": bandwidth,
        "ceiling_tokens_per_s": bandwidth / per_token if bandwidth else None,
    }


def layers(linears: list[LinearSpec]) -> list[dict[str, Any]]:
    """Layers of the same part and codec together, in the order of their first layer."""
    groups: dict[tuple[str, str], list[LinearSpec]] = {}
    for linear in linears:
        part = linear.name.split(".")[-1]
        groups.setdefault((part, linear.weights[0].codec.name), []).append(linear)
    return [
        {
            "part": part,
            "codec": codec,
            "count": len(group),
            "rows": group[0].rows,
            "columns": group[0].columns,
            "bias": group[0].bias is not None,
            "bytes": sum(x.nbytes for x in group),
            "bits_per_weight": 8 * sum(x.nbytes for x in group) / sum(x.rows * x.columns for x in group),
        }
        for (part, codec), group in groups.items()
    ]


def show(facts: dict[str, Any]) -> None:
    """Print the tables.  Text of a stranger's file is shown as JSON, which has no control characters."""
    console, config, bits = Console(highlight=False, soft_wrap=True), facts["config"], facts["bits_per_weight"]
    size = f"{facts['bytes'] / 1e6:,.1f} MB, format {facts['version']}, {facts['segments']} segments"
    console.print(f"{escape(facts['file'])}  {size}")
    console.print(f"identity {facts['identity']}" + ("  every byte verified" if facts["verified"] else ""))
    heads = f"{config['num_attention_heads']} heads of {config['head_dim']} ({config['num_key_value_heads']} key/value)"
    console.print(
        f"{escape(json.dumps(config['model_type']))}: {config['num_hidden_layers']} layers, hidden {config['hidden_size']}, "
        f"inner {config['intermediate_size']}, {heads}, vocabulary {config['vocab_size']}, "
        f"{config['max_position_embeddings']} positions, {'tied' if config['tie_word_embeddings'] else 'own'} head"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("part", "codec", "layers", "rows x columns", "MB", "bits/weight"):
        table.add_column(name, justify="left" if name in ("part", "codec") else "right")
    for group in facts["layers"]:
        table.add_row(
            group["part"] + (" + bias" if group["bias"] else ""),
            group["codec"],
            str(group["count"]),
            f"{group['rows']} x {group['columns']}",
            f"{group['bytes'] / 1e6:,.2f}",
            f"{group['bits_per_weight']:.3f}",
        )
    table.add_row("norms, embedding", "", str(facts["arrays"]["count"]), "", f"{facts['arrays']['bytes'] / 1e6:,.2f}", "")
    for name, size in facts["blobs"].items():
        table.add_row(escape(json.dumps(name)), "", "", "", f"{size / 1e6:,.2f}", "")
    console.print(table)
    console.print(f"bits per weight: {bits['all']:.3f}; decoder {bits['decoder']:.3f}, head {bits['head']:.3f}")
    sizes = facts["bytes_per_token"]
    console.print(
        f"read per token: {sizes['weights'] / 1e6:,.2f} MB of layers, {sizes['head'] / 1e6:,.2f} MB of head, "
        f"{sizes['kv_per_position']:,} bytes of {facts['kv']} cache per position; default mode {facts['default_mode']}"
    )
    if facts["read_bandwidth"]:
        bandwidth = f"the {facts['read_bandwidth'] / 1e9:.1f} GB/s that this machine reads from memory"
        console.print(f"at most {facts['ceiling_tokens_per_s']:,.0f} tok/s at {bandwidth}")
    for title in ("provenance", "generation"):
        console.print(f"{title}: {escape(json.dumps(facts[title], sort_keys=True))}")
