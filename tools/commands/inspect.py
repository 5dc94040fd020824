"""`edgeq inspect`: what is in a file, and how fast memory allows it to be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgeq.errors import InputError
from edgeq.format.container import VERSION, ModelFile
from edgeq.format.records import LinearSpec
from edgeq.system import machine, measurements
from edgeq.targets import TARGETS, load
from edgeq.tools.cli.terminal import progress, write
from edgeq.tools.measure.report import bits_per_weight, in_decoder, in_draft, in_expert, in_tower, overall_bits


def inspect(*, model: Path, verify: bool, as_json: bool, shown: str | None) -> None:
    """Tables, or one JSON object, or the text of one of the file's blobs, to standard output.

    InputError, FormatError, UnsupportedError: as ModelFile.open; FormatError from `verify` names the damaged layer; InputError:
    the file has no such blob.
    """
    file = ModelFile.open(model)
    if verify:
        with progress() as report:
            for done, total in file.verify():
                report(done, total, "verify")
    if shown is not None:
        write(blob_text(file, shown))
        return
    facts = collect(file, verify)
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        show(facts)


def blob_text(file: ModelFile, name: str) -> str:
    """The text of a blob.  InputError: there is no such blob."""
    blob = file.blob(name)
    if blob is None:
        has = ", ".join(sorted(file.metadata.blobs)) or "none"
        raise InputError(f"{file.path}: no {name} in the file; it has {has}")
    text = blob.decode("utf-8", "replace")
    return text if text.endswith("\n") else f"{text}\n"


def collect(file: ModelFile, verified: bool) -> dict[str, Any]:
    """Everything that is shown, as plain values: sizes in bytes, bandwidth in bytes per second."""
    metadata, pooling = file.metadata, file.metadata.config.pooling
    groups = layers(list(metadata.linears.values()))
    blobs, kernels = sizes_of(file, metadata.blobs), sizes_of(file, metadata.kernels)
    arrays = sum(a.nbytes for a in metadata.arrays.values())
    sizes = metadata.bytes_per_token()
    per_token = sizes["weights"] + sizes["head"]
    bandwidth = measurements.known(measurements.READ_BANDWIDTH, machine.cpu().cores)
    return {
        "file": str(file.path),
        "bytes": file.size,
        "version": VERSION,
        "identity": file.identity,
        "verified": verified,
        "segments": len(file.segments),
        "config": asdict(metadata.config) | ({"pooling": pooling.record()} if pooling else {}),
        "default_mode": metadata.default_mode,
        "generation": metadata.generation,
        "provenance": metadata.provenance,
        "layers": groups,
        "arrays": {"count": len(metadata.arrays), "bytes": arrays},
        "blobs": blobs,
        "kernels": kernels,
        "packs": [pack._asdict() for name in TARGETS for pack in load(name).packs(file)],
        "other_bytes": file.size - sum(g["bytes"] for g in groups) - arrays - sum([*blobs.values(), *kernels.values()]),
        "bits_per_weight": {
            "all": overall_bits(metadata),
            "decoder": bits_per_weight(metadata, in_decoder),
            **({"vision": bits_per_weight(metadata, in_tower)} if metadata.config.vision else {}),
            **({"draft": bits_per_weight(metadata, in_draft)} if metadata.config.draft_layers else {}),
            **({"expert": bits_per_weight(metadata, in_expert)} if metadata.config.policy else {}),
            **({"head": bits_per_weight(metadata, lambda name: name == "head")} if "head" in metadata.linears else {}),
        },
        "bytes_per_token": sizes,
        "draft_bytes": metadata.draft_bytes(),
        "expert_bytes": metadata.policy_bytes(),
        "kv": metadata.kv.name,
        "read_bandwidth": bandwidth,
        "ceiling_tokens_per_s": bandwidth / per_token if bandwidth else None,
    }


def sizes_of(file: ModelFile, segments: dict[str, int]) -> dict[str, int]:
    """Bytes of each of the named segments."""
    return {name: file.segments[index].length for name, index in segments.items()}


class Stored(NamedTuple):
    """One part of a layer: what it is, its codec, the shape that it stands for and its bytes."""

    component: str
    codec: str
    rows: int
    columns: int
    nbytes: int


def parts(linear: LinearSpec) -> Iterator[Stored]:
    """Everything that is stored for a layer."""
    for i, weight in enumerate(linear.weights):
        yield Stored("second block" if i else "weights", weight.codec.name, weight.rows, weight.columns, weight.nbytes)
    if linear.low_rank:
        a, b = linear.low_rank.a, linear.low_rank.b
        yield Stored("low rank", b.codec.name, b.rows, b.columns, a.nbytes + b.nbytes)
    if linear.master:
        master = linear.master
        yield Stored("master", master.codec.name, master.rows, master.columns, master.nbytes)
    if linear.transform:
        base, size = linear.transform.base, linear.transform.size
        yield Stored("transform", base.dtype if base else "", size, size, base.nbytes if base else 0)
    scales = linear.activation.scales if linear.activation else None
    split = linear.split_row.row if linear.split_row else None
    arrays = {"input order": linear.input_order, "input scale": linear.input_scale, "bias": linear.bias}
    for name, array in (arrays | {"activation scales": scales, "split row": split}).items():
        if array:
            yield Stored(name, array.dtype, 1, array.shape[0], array.nbytes)


def layers(linears: list[LinearSpec]) -> list[dict[str, Any]]:
    """Parts with the same name and codec of the layers with the same name together, in the order of their first layer."""
    groups: dict[tuple[str, str, str], list[Stored]] = {}
    for linear in linears:
        for part in parts(linear):
            last = linear.name.split(".")[-1]
            # `vision.project.0` is not one of several layers.
            name = f"vision {'project ' * last.isdecimal()}{last}" if in_tower(linear.name) else last
            name = f"draft {last}" if in_draft(linear.name) else f"expert {last}" if in_expert(linear.name) else name
            groups.setdefault((name, part.component, part.codec), []).append(part)
    weighed = ("weights", "second block", "master")
    return [
        {
            "part": name,
            "component": component,
            "codec": codec,
            "count": len(group),
            "rows": group[0].rows,
            "columns": group[0].columns,
            "bytes": sum(part.nbytes for part in group),
            "bits_per_weight": 8 * sum(part.nbytes for part in group) / sum(part.rows * part.columns for part in group)
            if component in weighed
            else None,
        }
        for (name, component, codec), group in groups.items()
    ]


def show(facts: dict[str, Any]) -> None:
    """Print the tables.  Text of a stranger's file is shown as JSON, which has no control characters."""
    # A narrow terminal would break names apart: lines that are too long go on in the next one instead.
    console = Console(highlight=False, soft_wrap=True, width=max(80, Console().width))
    config, bits = facts["config"], facts["bits_per_weight"]
    size = f"{facts['bytes'] / 1e6:,.1f} MB, format {facts['version']}, {facts['segments']} segments"
    console.print(f"{escape(facts['file'])}  {size}")
    console.print(f"identity {facts['identity']}" + ("  every byte verified" if facts["verified"] else ""))
    head = f"{'tied' if config['tie_word_embeddings'] else 'own'} head"
    if config["pooling"]:
        does = "ranks documents" if config["pooling"].get("ranks") else "embeds texts"
        head = f"no head: {does}, {config['pooling']['kind']} pooling"
        head += ", normalized" if config["pooling"]["normalize"] else ", not normalized"
    heads = f"{config['num_attention_heads']} heads of {config['head_dim']} ({config['num_key_value_heads']} key/value)"
    console.print(
        f"{escape(json.dumps(config['model_type']))}: {config['num_hidden_layers']} layers, hidden {config['hidden_size']}, "
        f"inner {config['intermediate_size']}, {heads}, vocabulary {config['vocab_size']}, "
        f"{config['max_position_embeddings']} positions, {head}"
    )
    if config["vision"]:
        console.print(tower_line(config["vision"]))
    if config["policy"]:
        console.print(f"{expert_line(config['policy'])}: {facts['expert_bytes'] / 1e6:,.2f} MB")
    if facts["draft_bytes"]:
        bounds = config.get("draft_tokens") or (0, config["vocab_size"])
        drafted = sum(bounds[1::2]) - sum(bounds[::2])
        console.print(f"a layer that drafts {drafted:,} tokens (--draft mtp): {facts['draft_bytes'] / 1e6:,.2f} MB")
    table = Table(box=None, pad_edge=False)
    for name in ("part", "codec", "layers", "rows x columns", "MB", "bits/weight"):
        table.add_column(name, justify="left" if name in ("part", "codec") else "right")
    for group in facts["layers"]:
        table.add_row(
            group["part"] + ("" if group["component"] == "weights" else f", {group['component']}"),
            group["codec"],
            str(group["count"]),
            f"{group['rows']} x {group['columns']}",
            f"{group['bytes'] / 1e6:,.2f}",
            f"{group['bits_per_weight']:.3f}" if group["bits_per_weight"] else "",
        )
    table.add_row("norms, embedding", "", str(facts["arrays"]["count"]), "", f"{facts['arrays']['bytes'] / 1e6:,.2f}", "")
    for name, size in facts["blobs"].items():
        table.add_row(escape(json.dumps(name)), "", "", "", f"{size / 1e6:,.2f}", "")
    for name, size in facts["kernels"].items():
        table.add_row(escape(json.dumps(name)), "kernels", "", "", f"{size / 1e6:,.2f}", "")
    table.add_row("metadata, padding", "", "", "", f"{facts['other_bytes'] / 1e6:,.2f}", "")
    table.add_row("total", "", "", "", f"{facts['bytes'] / 1e6:,.2f}", "")
    console.print(table)
    of_head = f", head {bits['head']:.3f}" if "head" in bits else ""
    tower = f", vision tower {bits['vision']:.3f}" if "vision" in bits else ""
    draft = f", layer that drafts {bits['draft']:.3f}" if "draft" in bits else ""
    expert = f", expert {bits['expert']:.3f}" if "expert" in bits else ""
    console.print(f"bits per weight: {bits['all']:.3f}; decoder {bits['decoder']:.3f}{of_head}{draft}{expert}{tower}")
    sizes = facts["bytes_per_token"]
    console.print(
        f"read per token: {sizes['weights'] / 1e6:,.2f} MB of layers, {sizes['head'] / 1e6:,.2f} MB of head, "
        f"{sizes['kv_per_position']:,} bytes of {facts['kv']} cache per position; default mode {facts['default_mode']}"
    )
    if line := split_rows_line(facts["provenance"].get("split_rows")):
        console.print(line)
    for pack in facts["packs"]:
        archs = ", ".join(f"{arch} ({count})" for arch, count in pack["archs"].items())
        made_by = ", ".join(f"{name} {version}" for name, version in sorted(pack["versions"].items()))
        console.print(f"pack {escape(json.dumps(pack['name']))}: {pack['kernels']} kernels; {archs}")
        console.print(f"  digest {pack['digest']}; made by {made_by}")
        console.print(f"  {escape(pack['refused'] or 'trusted here')}")
    if facts["read_bandwidth"]:
        bandwidth = f"the {facts['read_bandwidth'] / 1e9:.1f} GB/s that this machine reads from memory"
        console.print(f"at most {facts['ceiling_tokens_per_s']:,.0f} tok/s at {bandwidth}")
    for title in ("provenance", "generation"):
        console.print(f"{title}:")
        for key, value in flat(facts[title]):
            console.print(f"  {escape(key)}: {escape(json.dumps(value))}")


def split_rows_line(layers: Any) -> str | None:
    """In how many layers, of decoder and tower, output channels need the column that is kept apart; None: nothing is known."""
    if not isinstance(layers, dict):
        return None
    said = {name: x.get("outputs_over") for name, x in layers.items() if isinstance(x, dict)}
    shares = {name: x for name, x in said.items() if isinstance(x, float)}
    counts = []
    for of, inside in (("decoder", in_decoder), ("vision tower", in_tower)):
        mine = [share for name, share in shares.items() if inside(name)]
        if mine:
            over = sum(share > 0 for share in mine)
            counts.append(f"{of} {over} of {len(mine)} layers, up to {100 * max(mine):.1f} % of the outputs of one")
    return "split rows that outputs need by equation 9 of MQuant: " + "; ".join(counts) if counts else None


def expert_line(policy: dict[str, Any]) -> str:
    """Sizes of the expert of a policy, and what it makes of what."""
    return (
        f"expert: {policy['num_hidden_layers']} layers, hidden {policy['hidden_size']}, inner {policy['intermediate_size']}, "
        f"{policy['num_attention_heads']} heads of {policy['head_dim']}; {policy['actions']} actions of "
        f"{policy['action_size']} numbers from a state of {policy['state_size']}, in {policy['steps']} steps"
    )


def tower_line(vision: dict[str, Any]) -> str:
    """Sizes of the vision tower, and of the pictures that it takes: two lines."""
    image, edge = vision["image"], vision["patch_size"] * vision["merge"]
    pixels = f"{image['min_pixels']:,} to {image['max_pixels']:,} pixels"
    size = pixels if image["sizing"] == "factor" else f"{image['height']} x {image['width']} pixels"
    return (
        f"vision tower: {vision['num_hidden_layers']} layers, hidden {vision['hidden_size']}, inner "
        f"{vision['intermediate_size']}, {vision['num_attention_heads']} heads of {vision['head_dim']}\n"
        f"patches of {vision['patch_size']}, a token for {edge} x {edge} pixels; pictures of {size}"
    )


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested dictionaries, sorted.  A name from a stranger's file is shown as JSON."""
    for key in sorted(values):
        name = prefix + (key if key.isidentifier() else json.dumps(key))
        if isinstance(values[key], dict) and values[key]:
            yield from flat(values[key], f"{name}.")
        else:
            yield name, values[key]
