"""A conversion as data: what will be read, quantized and written, in which steps, how large and with how much memory.

`preflight` reads text files and tensor headers and refuses what cannot be converted; `edgeq.converters.plan` carries it out.

Memory promise, beside Python and torch themselves (BASELINE): `none` and `rtn` hold one slab of rows of at most 64 MB in
float32, working copies of it, and the scales of one matrix; `awq` holds four times one decoder layer in float32 and the
calibration activations of one layer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import edgeq
from edgeq.codec import BITS, GROUP_SIZES, Codec, Kind
from edgeq.config import ModelConfig
from edgeq.container import DATA_OFFSET
from edgeq.converters.checkpoint import Checkpoint, HubAccess
from edgeq.converters.families import DERIVED_SUFFIX, EMBEDDING, HEAD, NORM, Family, recognise
from edgeq.converters.gate import HeadBits, Verdict
from edgeq.converters.methods import METHODS
from edgeq.converters.quantizer import preset
from edgeq.converters.storage import SLAB_BYTES, ArrayItem, BlobItem, Contents, Item, LinearItem
from edgeq.converters.text import ROW_TOKENS, Calibration, calibration
from edgeq.converters.tokenizer import Text, read_text
from edgeq.errors import CheckpointError, InputError, ResourceError, UnsupportedError
from edgeq.linear import Metadata
from edgeq.meminfo import available_bytes

Method = Literal["none", "rtn", "awq"]
BASELINE = 500 << 20
"""Anonymous memory of Python, torch and transformers with their thread pools."""
HEADS: tuple[HeadBits, ...] = (4, 6, 8, 16)


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert; InputError where options do not go together.

    bits          2 to 8
    group_size    16, 32, 64, 128, or 0: one group per row
    dtype         of the weights with method `none`; None: as stored
    head          bits of the head; 16: as stored; None: measured where there is calibration text (gate.py), else 8
    calibration   a UTF-8 text file; None: the built-in text for `awq`, none for `rtn`, which then measures nothing
    device        name of the device profile the file is meant for, recorded in its provenance
    restart       discard an interrupted conversion instead of going on with it
    token, revision, offline   for hub ids, as in huggingface_hub
    """

    method: Method = "rtn"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    dtype: Literal["f32", "f16", "bf16"] | None = None
    head: HeadBits | None = None
    calibration: Path | None = None
    device: str | None = None
    restart: bool = False
    token: str | None = None
    revision: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"method {self.method!r} is not known; supported: {', '.join(METHODS)}")
        if self.bits not in BITS:
            raise InputError(f"{self.bits} bits are not supported; choose 2 to 8")
        if self.group_size not in (0, *GROUP_SIZES):
            raise InputError(
                f"group size {self.group_size} is not supported; choose {', '.join(map(str, GROUP_SIZES))} or 0 (the row)"
            )
        if self.head not in (None, *HEADS):
            raise InputError(f"a head of {self.head} bits is not supported; choose {', '.join(map(str, HEADS))}")
        if self.dtype not in (None, "f32", "f16", "bf16"):
            raise InputError(f"dtype {self.dtype!r} is not supported; choose f32, f16 or bf16")
        if self.method == "none" and self.head is not None:
            raise InputError(
                "--head goes with a quantizing method; with --method none the head is stored like the other weights"
            )
        if self.method != "none" and self.dtype is not None:
            raise InputError(
                "--dtype goes with --method none; a quantized file keeps the checkpoint's type for what stays floating"
            )
        if self.method == "none" and self.calibration is not None:
            raise InputError("--calibration goes with a quantizing method; --method none needs no text")

    def lasting(self) -> dict[str, object]:
        """The options that decide what is in the file."""
        passing = ("calibration", "restart", "token", "offline")
        return {key: value for key, value in asdict(self).items() if key not in passing and value is not None}


@dataclass(frozen=True)
class Step:
    """Items written one after another, then recorded in the journal.  `layer`: the decoder layer they belong to, if any."""

    label: str
    items: tuple[Item, ...]
    layer: int | None = None


@dataclass(frozen=True)
class Plan:
    options: ConvertOptions
    checkpoint: Checkpoint
    family: Family
    config: ModelConfig
    text: Text
    calibration: Calibration | None
    steps: tuple[Step, ...]
    verdict: Verdict | None = None

    @cached_property
    def contents(self) -> Contents:
        return Contents.of([item for step in self.steps for item in step.items])

    @property
    def codec(self) -> Codec:
        return Codec("int", self.options.bits, self.options.group_size, self.options.symmetric)

    def heads(self) -> dict[HeadBits, Codec | None]:
        """The codecs among which the head's is chosen: one, where the options say it."""
        candidates: tuple[HeadBits, ...] = (self.options.head,) if self.options.head else HEADS[:-1]
        return {bits: head_codec(bits, self.config.hidden_size) for bits in candidates}

    def decided(self, verdict: Verdict) -> Plan:
        """This plan with what was measured; only its last step can change."""
        options = replace(self.options, head=verdict.head)
        steps = _steps(self.checkpoint, self.family, self.config, self.text, options)
        return replace(self, options=options, steps=steps, verdict=verdict)

    @property
    def output_bytes(self) -> int:
        """Size of the file, its metadata estimated at 512 bytes a segment."""
        return DATA_OFFSET + self.contents.nbytes + 512 * self.contents.segments

    @property
    def memory_bytes(self) -> int:
        """The promise: anonymous memory that the conversion will not exceed."""
        scales = max(sum(item.nbytes[1:]) for step in self.steps for item in step.items)
        streaming = BASELINE + 6 * SLAB_BYTES + scales
        if self.calibration is None:
            return streaming
        c = self.config
        layer = 4 * (c.hidden_size * (2 * c.query_size + 2 * c.kv_size) + 3 * c.hidden_size * c.intermediate_size)
        activations = 4 * self.calibration.rows.numel() * (8 * c.hidden_size + c.query_size + 2 * c.intermediate_size)
        return streaming + 4 * layer + activations

    def metadata(self) -> Metadata:
        """Of the finished file.  Nothing in it depends on when, where or in how many runs it was made."""
        provenance: dict[str, object] = {
            "source": self.checkpoint.name,
            "source_digest": self.checkpoint.digest(),
            "method": self.options.method,
            "options": {key: value for key, value in self.options.lasting().items() if key != "method"},
            "calibration": None
            if self.calibration is None
            else {
                "source": self.calibration.source,
                "sha256": self.calibration.sha256,
                "tokens": self.calibration.rows.numel(),
            },
            "edgeq": edgeq.__version__,
            "measured": self.verdict.measured if self.verdict else None,
            "quantizer": None if self.options.method == "none" else preset(self.codec),
        }
        contents = self.contents
        return Metadata(
            config=self.config,
            generation=self.text.generation,
            provenance=provenance,
            default_mode=self.verdict.mode if self.verdict else "a16",
            linears=contents.linears,
            arrays=contents.arrays,
            blobs=contents.blobs,
        )

    def fingerprint(self) -> dict[str, object]:
        """Everything the bytes of the result depend on, flat, so that a difference can be named."""
        import torch

        found: dict[str, object] = {"edgeq": edgeq.__version__, "torch": torch.__version__, "source": self.checkpoint.name}
        for path in self.checkpoint.files():
            status = path.stat()
            found[f"file {path.name}"] = [status.st_size, status.st_mtime_ns]
        config = json.dumps(self.checkpoint.config, sort_keys=True)
        found["config.json"] = hashlib.sha256(config.encode()).hexdigest()
        found["calibration text"] = self.calibration.sha256 if self.calibration else None
        return found | {f"option {key}": value for key, value in self.options.lasting().items()}

    def check_disk(self, output: Path, written: int) -> None:
        """ResourceError unless the file, of which `written` bytes are there, fits where it will be written."""
        folder = output.parent
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; make it first")
        free = shutil.disk_usage(folder).free
        if self.output_bytes > free + written:
            raise ResourceError(
                f"{output}: needs {self.output_bytes / 1e6:.0f} MB, {folder} has {(free + written) / 1e6:.0f} MB free; "
                "free some space, choose fewer bits or another disk"
            )


def preflight(source: str, options: ConvertOptions) -> Plan:
    """Everything that can be refused before a weight is read.

    UnsupportedError: the model has something this version does not run, by key.  CheckpointError: files missing or damaged.
    ResourceError: too little memory.  InputError: the calibration text.
    """
    checkpoint = Checkpoint.open(source, HubAccess(options.token, options.revision, options.offline))
    family, config = recognise(checkpoint.config)
    text = read_text(checkpoint, config.vocab_size)
    length = min(ROW_TOKENS, config.max_position_embeddings)
    measured = options.method == "awq" or options.calibration is not None
    rows = calibration(options.calibration, text, length) if measured else None
    checkpoint.open_weights()
    _check_tensors(checkpoint, family, config)
    plan = Plan(options, checkpoint, family, config, text, rows, _steps(checkpoint, family, config, text, options))
    available = available_bytes()
    if plan.memory_bytes > available:
        raise ResourceError(
            f"{source}: converting needs {plan.memory_bytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; "
            + ("--method rtn without --calibration needs less" if rows else "close other programs or use a larger machine")
        )
    return plan


def _check_tensors(checkpoint: Checkpoint, family: Family, config: ModelConfig) -> None:
    """CheckpointError unless the tensors are exactly those of the configuration, in name, shape and type."""
    expected = family.tensor_shapes(config)
    for name, shape in expected.items():
        if name not in checkpoint.tensors:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} is missing; the checkpoint is incomplete or of another kind"
            )
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise CheckpointError(f"{checkpoint.folder}: {name} has the shape {found}; config.json says {shape}")
        checkpoint.dtype(name)
    # A tied model may carry its head a second time.
    unknown = [n for n in checkpoint.tensors if n not in expected and n != HEAD and not n.endswith(DERIVED_SUFFIX)]
    if unknown:
        raise UnsupportedError(
            f"{checkpoint.folder}: tensor {min(unknown)} has no place in a {family.architecture}; "
            "if it is an adapter, merge it into the model first"
        )


def _steps(
    checkpoint: Checkpoint, family: Family, config: ModelConfig, text: Text, options: ConvertOptions
) -> tuple[Step, ...]:
    """In execution order: text and embedding, decoder layers, norm and head."""
    shapes = family.tensor_shapes(config)
    quantized = options.method != "none"
    codec = Codec("int", options.bits, options.group_size, options.symmetric) if quantized else None

    def stored(*names: str) -> Kind:
        kinds = {checkpoint.dtype(name) for name in names}
        kind: Kind = "f32" if len(kinds) > 1 or "f32" in kinds else "f16" if "f16" in kinds else "bf16"
        return kind

    def array(name: str, tensor: str, *, scaled: bool = False) -> ArrayItem:
        small = len(shapes[tensor]) == 1
        wanted = ("f32" if options.dtype == "f32" or scaled else None) if small else options.dtype
        return ArrayItem(name, tensor, shapes[tensor], wanted or stored(tensor))

    def linear(name: str, tensors: list[str], chosen: Codec | None, biases: list[str]) -> LinearItem:
        columns = shapes[tensors[0]][1]
        chosen = chosen or Codec(options.dtype or stored(*tensors))
        try:
            chosen.groups(columns)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {error}") from None
        exact = options.dtype == "f32" or options.method == "awq"
        bias_dtype = "f32" if exact or not biases else stored(*biases)
        rows = tuple((tensor, shapes[tensor][0]) for tensor in tensors)
        return LinearItem(name, rows, columns, chosen, tuple((b, shapes[b][0]) for b in biases), bias_dtype)

    def decoder_layer(index: int) -> Step:
        names, p = family.layer_tensors(index), f"layers.{index}."
        absorbers = {m.absorber for m in family.awq_mappings(config)} if options.method == "awq" else set()

        def fused(name: str, parts: tuple[str, ...]) -> LinearItem:
            biases = [names[f"{part}.bias"] for part in parts if f"{part}.bias" in names]
            return linear(p + name, [names[part] for part in parts], codec, biases)

        def norm(part: str) -> ArrayItem:
            return array(p + part, names[part], scaled=part in absorbers)

        items: list[Item] = [norm("attention_norm"), fused("qkv", ("q", "k", "v"))]
        items += [norm("q_norm"), norm("k_norm")] if family.qk_norm else []
        items += [fused("o", ("o",)), norm("mlp_norm"), fused("gate_up", ("gate", "up")), fused("down", ("down",))]
        return Step(f"layer {index + 1} of {config.num_hidden_layers}", tuple(items), index)

    first: list[Item] = [BlobItem(name, data) for name, data in text.blobs.items()]
    if not config.tie_word_embeddings:
        first.append(array("embedding", EMBEDDING))
    table = EMBEDDING if config.tie_word_embeddings else HEAD
    head = linear("head", [table], head_codec(options.head or 8, config.hidden_size) if quantized else None, [])
    return (
        Step("text and embedding", tuple(first)),
        *(decoder_layer(i) for i in range(config.num_hidden_layers)),
        Step("norm and head", (array("norm", NORM), head)),
    )


def head_codec(bits: int, columns: int) -> Codec | None:
    """Symmetric integers in the largest groups that fit; None for 16 bits: floats as stored."""
    if bits == 16:
        return None
    group_size = next((g for g in reversed(GROUP_SIZES) if columns % g == 0), 0)
    return Codec("int", bits, group_size, symmetric=True)
