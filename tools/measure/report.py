"""Labels and numbers that several commands print about a file and its speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from edgeq import __version__
from edgeq.format.container import ModelFile
from edgeq.format.metadata import Metadata
from edgeq.network.config import VisionConfig
from edgeq.network.draft_stack import DraftStack
from edgeq.network.policy_stack import PolicyStack
from edgeq.runtime import Model
from edgeq.system import machine
from edgeq.tools.measure import conditions


def model_name(metadata: Metadata) -> str:
    """The name of the source as the converter recorded it.  A stranger's file may hold anything: quoted unless printable."""
    name = metadata.provenance.get("source")
    return name if isinstance(name, str) and name.isprintable() and len(name) <= 200 else repr(name)[:200]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of plain text, its cells two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def decoder_codec(metadata: Metadata) -> str:
    """The codec of most decoder weights."""
    sizes: dict[str, int] = {}
    for name, linear in metadata.linears.items():
        if in_decoder(name):
            codec = linear.weights[0].codec.name
            sizes[codec] = sizes.get(codec, 0) + linear.nbytes
    return max(sizes, key=sizes.__getitem__)


def in_decoder(name: str) -> bool:
    """Whether a linear layer is one of the decoder's: neither the head, nor the embedding, nor of what is beside it."""
    return name not in ("head", "embedding") and not in_tower(name) and not in_draft(name) and not in_expert(name)


def in_tower(name: str) -> bool:
    """Whether a linear layer is one of the vision tower or its projector."""
    return name.startswith(VisionConfig.prefix)


def in_draft(name: str) -> bool:
    """Whether a linear layer is of the layer that drafts."""
    return name.startswith(DraftStack.prefix)


def in_expert(name: str) -> bool:
    """Whether a linear layer is one of the expert of a policy."""
    return name.startswith(PolicyStack.prefix)


def head_codec(metadata: Metadata) -> str:
    """The codec of the head; where the model embeds texts and has none, that of its embedding."""
    table = metadata.linears.get("head") or metadata.linears.get("embedding")
    return table.weights[0].codec.name if table else metadata.arrays["embedding"].dtype


def codec_label(metadata: Metadata) -> str:
    """The codec of most decoder weights and that of the head, or of the embedding: "i4 g128 zero, head i8 g128"."""
    return f"{decoder_codec(metadata)}, {'head' if 'head' in metadata.linears else 'embedding'} {head_codec(metadata)}"


def bits_per_weight(metadata: Metadata, wanted: Callable[[str], bool]) -> float:
    """Effective bits per weight of the layers whose name is wanted; scales, zero points, padding and bias count.

    An embedding, whose rows are read one at a time, is none of them.
    """
    layers = [x for name, x in metadata.linears.items() if wanted(name) and name != "embedding"]
    return 8 * sum(x.nbytes for x in layers) / sum(x.rows * x.columns for x in layers)


def overall_bits(metadata: Metadata) -> float:
    """Effective bits per weight of decoder and head, as `--bits` asks for them: what is beside them is counted apart."""
    return bits_per_weight(metadata, lambda name: name == "head" or in_decoder(name))


def describe(file: ModelFile) -> str:
    """Name, codec and size in one line."""
    return f"{model_name(file.metadata)}, {codec_label(file.metadata)}, {file.size / 1e6:,.1f} MB"


def identification(model: Model) -> dict[str, Any]:
    """What a result depends on, as fields of JSON: program, machine, file and settings; bytes and seconds."""
    metadata, program, cpu = model.file.metadata, model.program, machine.cpu()
    runs = program.facts()
    return {
        "version": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": cpu.name,
        "arch": cpu.arch,
        "model": model_name(metadata),
        "codec": decoder_codec(metadata),
        "head_codec": head_codec(metadata),
        "file_bytes": model.file.size,
        "identity": model.file.identity,
        "target": model.target,
        "isa": runs.isa,
        "device": runs.device,
        "device_bytes": runs.device_bytes,
        "copy_bandwidth": runs.copy_bandwidth,
        "timed_apart": runs.timed_apart,
        "launches_per_token": runs.launches_per_token,
        "mode": program.options.mode,
        "kv": program.options.kv.name,
        "kv_bytes_per_position": model.position_bytes,
        "threads": program.threads,
        "threads_prefill": program.options.threads_prefill,
        "load_s": model.load_s,
    }


def facts(model: Model) -> dict[str, Any]:
    """What a record depends on: identification and the present conditions."""
    own = identification(model)
    return {**own, **conditions.facts(own["device"])}


def cache_label(model: Model) -> str:
    """The codec of cached keys and values, and their bytes per position in all layers."""
    return f"{model.program.options.kv.name}, {model.position_bytes:,} bytes per position"


def step_bytes(model: Model, length: int, texts: int = 1) -> float:
    """Bytes read to decode the token at position `length` - 1 of each of `texts` texts at once."""
    return model.weight_bytes + texts * model.position_bytes * model.config.positions_read(length)


IMPLAUSIBLE = 1.05
"""More than this share of the read bandwidth is not what a model larger than the processor's cache can read: the bandwidth was
measured while something else ran."""


def read_bandwidth(model: Model, refresh: bool = False, reached: float = 0.0) -> float | None:
    """Bytes per second that the model's target reads with its threads; measured in about a second if not known yet.

    None where the target does not measure it.  `reached`: bytes per second that were read meanwhile; where they exceed the
    bandwidth, and no cache explains it, the bandwidth is measured again and the larger number counts.
    """
    bandwidth, cache = model.program.read_bandwidth(refresh), machine.last_level_cache()
    if bandwidth and reached > IMPLAUSIBLE * bandwidth and cache is not None and model.weight_bytes > cache:
        return max(bandwidth, model.program.read_bandwidth(refresh=True) or 0.0)
    return bandwidth
