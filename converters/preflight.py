"""A conversion as data: what will be read, quantized and written, in which steps, how large and with how much memory.

`preflight` reads text files and tensor headers and refuses what cannot be converted; `edgeq.converters.convert` carries it out.

Memory promise, beside Python and torch themselves (BASELINE): one slab of rows of at most 64 MB in float32, working copies of
it, and the scales of one matrix; with calibration text also four times one decoder layer in float32 and the calibration
activations of one layer; and what the method says it needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import edgeq
from edgeq.codec import GROUP_SIZES, Codec, Kind
from edgeq.config import ModelConfig
from edgeq.container import DATA_OFFSET
from edgeq.converters.calibration.choose_precision import Verdict
from edgeq.converters.calibration.dataset import MAX_ROWS, ROW_TOKENS, Calibration, calibration
from edgeq.converters.calibration.forward import BATCH_ROWS, token_activations
from edgeq.converters.checkpoint import Checkpoint, HubAccess
from edgeq.converters.families import EMBEDDING, HEAD, NORM, NORM_BIAS, POSITIONS, Family, recognise
from edgeq.converters.items import ArrayItem, BlobItem, Contents, Item
from edgeq.converters.linears import LinearItem, Recipe
from edgeq.converters.method import Method
from edgeq.converters.methods import METHODS
from edgeq.converters.options import HEADS, ConvertOptions, HeadBits
from edgeq.converters.slabs import SLAB_BYTES
from edgeq.converters.tokenizer import Text, read_text
from edgeq.errors import InputError, ResourceError, UnsupportedError
from edgeq.machine import available_bytes
from edgeq.manifest import FLOAT_PARTS, layer_contents
from edgeq.metadata import Metadata

BASELINE = 500 << 20
"""Anonymous memory of Python, torch and transformers with their thread pools."""


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
    method: Method
    text: Text
    calibration: Calibration | None
    steps: tuple[Step, ...]
    verdict: Verdict | None = None

    @cached_property
    def contents(self) -> Contents:
        return Contents.of([item for step in self.steps for item in step.items])

    def heads(self) -> dict[HeadBits, Codec | None]:
        """The codecs among which the head's is chosen: one, where the options say it."""
        candidates: tuple[HeadBits, ...] = (self.options.head,) if self.options.head else HEADS[:-1]
        return {bits: head_codec(bits, self.method.config.hidden_size) for bits in candidates}

    def decided(self, verdict: Verdict) -> Plan:
        """This plan with what was measured; only its last step can change."""
        options = replace(self.options, head=verdict.head)
        method = type(self.method)(options, self.method.family, self.method.config)
        return replace(self, options=options, steps=_steps(self.checkpoint, method, self.text), verdict=verdict)

    @property
    def output_bytes(self) -> int:
        """Size of the file, its metadata estimated at 512 bytes a segment."""
        return DATA_OFFSET + self.contents.nbytes + 512 * self.contents.segments

    @property
    def memory_bytes(self) -> int:
        """The promise: anonymous memory that the conversion will not exceed."""
        scales = max(item.scale_bytes for step in self.steps for item in step.items if isinstance(item, LinearItem))
        tokens = 0 if self.calibration is None else self.calibration.rows.numel()
        streaming = BASELINE + 6 * SLAB_BYTES + scales + self.method.memory_bytes(tokens)
        if self.calibration is None:
            return streaming
        c, (_, length) = self.method.config, self.calibration.rows.shape
        layer = 4 * sum(math.prod(shape) for _, shape in self.method.family.layer_parts(0).values())
        hidden = 3 * 4 * tokens * c.hidden_size
        # Scores of attention, where torch keeps them whole, and what a layer computes from a batch.
        batch = 4 * BATCH_ROWS * length * (3 * c.num_attention_heads * length + token_activations(c))
        return streaming + 4 * layer + hidden + batch

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
            "quantizer": None if self.options.bits is None else self.method.preset.title(self.method.codec),
            **({"details": self.method.details} if self.method.details else {}),
        }
        contents = self.contents
        return Metadata(
            config=self.method.stored_config,
            generation=self.text.generation,
            provenance=provenance,
            default_mode=self.verdict.mode if self.verdict else self.method.mode or "a16",
            linears=contents.linears,
            arrays=contents.arrays,
            blobs=contents.blobs,
            kv=self.method.kv,
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
    method = METHODS[options.method](options, family, config)
    rows = _calibration(method, text)
    checkpoint.open_weights()
    checkpoint.arrange(family.sources())
    _check_tensors(checkpoint, family, config)
    plan = Plan(options, checkpoint, method, text, rows, _steps(checkpoint, method, text))
    available = available_bytes()
    if plan.memory_bytes > available:
        raise ResourceError(
            f"{source}: converting needs {plan.memory_bytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; "
            + ("--method rtn without --calibration needs less" if rows else "close other programs or use a larger machine")
        )
    return plan


def _calibration(method: Method, text: Text) -> Calibration | None:
    """The calibration text, where the method or the options want one."""
    options, longest = method.options, method.config.max_position_embeddings
    if not (method.calibrates or method.studies or options.calibration):
        if options.calibration_rows or options.calibration_length:
            raise InputError(f"--method {options.method} reads no calibration text unless --calibration names one")
        return None
    if (options.calibration_length or 0) > longest:
        raise InputError(f"--calibration-length {options.calibration_length}: this model takes at most {longest} tokens")
    length = options.calibration_length or min(ROW_TOKENS, longest)
    return calibration(options.calibration, text, length, options.calibration_rows or MAX_ROWS)


def _check_tensors(checkpoint: Checkpoint, family: Family, config: ModelConfig) -> None:
    """CheckpointError unless the tensors are exactly those of the configuration, in name, shape and type."""
    expected = family.tensor_shapes(config)
    for name, shape in expected.items():
        checkpoint.tensor(name, shape)
        checkpoint.dtype(name)
    # A tied model may carry its head a second time.
    unknown = [n for n in checkpoint.tensors if n not in expected and n != HEAD and not n.endswith(family.row.derived)]
    if unknown:
        raise UnsupportedError(
            f"{checkpoint.folder}: tensor {min(unknown)} has no place in a {family.architecture}; "
            "if it is an adapter, merge it into the model first"
        )


def _steps(checkpoint: Checkpoint, method: Method, text: Text) -> tuple[Step, ...]:
    """In execution order: text and embedding, decoder layers, norm and head."""
    family, config, stored_config = method.family, method.config, method.stored_config
    shapes = family.tensor_shapes(config)
    tied, options = config.tie_word_embeddings, method.options

    def stored(*names: str) -> Kind:
        kinds = {checkpoint.dtype(name) for name in names}
        kind: Kind = "f32" if len(kinds) > 1 or "f32" in kinds else "f16" if "f16" in kinds else "bf16"
        return kind

    def array(name: str, part: str, tensor: str) -> ArrayItem:
        return ArrayItem(name, tensor, shapes[tensor], method.dtype(part, stored(tensor)))

    def decoder_layer(index: int) -> Step:
        names, p = family.layer_tensors(index), f"layers.{index}."

        def fused(part: str, parts: tuple[str, ...]) -> LinearItem:
            tensors, name = [names[x] for x in parts], p + part
            biases = [names[f"{x}.bias"] for x in parts if f"{x}.bias" in names]
            columns = shapes[tensors[0]][1]
            kind = stored(*tensors)
            floats = part in FLOAT_PARTS
            recipe = Recipe(Codec(cast(Kind, method.dtype(part, kind)))) if floats else method.recipe(name, columns, kind)
            recipe.check(name, columns)
            bias_dtype = method.dtype(f"{part}.bias", stored(*biases)) if biases else "f32"
            rows = tuple((tensor, shapes[tensor][0]) for tensor in tensors)
            return LinearItem(name, rows, columns, recipe, tuple((b, shapes[b][0]) for b in biases), bias_dtype)

        items: list[Item] = []
        for name, content in layer_contents(config, index).items():
            part = name.removeprefix(p)
            if part == "o":
                items += [ArrayItem(extra, extra, shape, dtype) for extra, (dtype, shape) in method.extras(index).items()]
            if isinstance(content, tuple):
                items.append(array(name, part, names[part]))
            else:
                items.append(fused(part, tuple(x.removeprefix(p) for x in content)))
        return Step(f"layer {index + 1} of {config.num_hidden_layers}", tuple(items), index)

    first: list[Item] = [BlobItem(name, data) for name, data in text.blobs.items()]
    if not stored_config.tie_word_embeddings:
        first.append(array("embedding", "embedding", EMBEDDING))
    if config.rope.kind == "learned":
        first.append(array("positions", "positions", POSITIONS))
    table = EMBEDDING if stored_config.tie_word_embeddings else HEAD
    codec = None if options.bits is None else head_codec(options.head or 8, config.hidden_size)
    activation = method.head_activation if codec else None
    recipe = Recipe(codec or Codec(options.dtype or stored(EMBEDDING if tied else HEAD)), activation=activation)
    head = LinearItem("head", ((table, config.vocab_size),), config.hidden_size, recipe)
    norms = [array("norm", "norm", NORM)]
    if config.layer_norm:
        norms.append(array("norm_bias", "norm_bias", NORM_BIAS))
    return (
        Step("text and embedding", tuple(first)),
        *(decoder_layer(i) for i in range(config.num_hidden_layers)),
        Step("norm and head", (*norms, head)),
    )


def head_codec(bits: int, columns: int) -> Codec | None:
    """Symmetric integers in the largest groups that fit; None for 16 bits: floats as stored."""
    if bits == 16:
        return None
    group_size = next((g for g in reversed(GROUP_SIZES) if columns % g == 0), 0)
    return Codec("int", bits, group_size, symmetric=True)
