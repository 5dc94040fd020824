"""A conversion as data: what will be read, quantized and written, in which steps, how large and with how much memory.

`edgeq.converters.preflight` makes a plan after all checks; `edgeq.converters.convert` carries it out.

Memory promise, beside Python and torch themselves (BASELINE): one slab of rows of at most 64 MB in float32, working arrays of
its size, and the scales of one matrix; with calibration text also the inputs of a decoder layer for the whole text, twice the
layer in float32, and in place of the slab, where that is more, what the layer computes from a batch; or, where that is more
than all these, what the last measurements take; and what the method declares (`Method.memory_bytes`).  A GPU has a promise of
its own (`ConversionPlan.device_bytes`); that of the host then holds all the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from edgeq.adapter import SOURCE_CHANNELS
from edgeq.codec import Codec, Kind
from edgeq.config import ModelConfig, VisionConfig
from edgeq.container import DATA_OFFSET
from edgeq.converters.allocation.budget import MOST_TOKENS
from edgeq.converters.allocation.parts import TABLE, Part, parts_of
from edgeq.converters.allocation.record import Prediction
from edgeq.converters.calibration.choose_precision import LOGIT_BYTES, ROWS, PrecisionChoice, measurement_bytes
from edgeq.converters.calibration.compute import BATCH_ROWS, Compute
from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.forward import token_activations
from edgeq.converters.calibration.moments import MOMENT_BYTES
from edgeq.converters.calibration.samples import PictureSamples
from edgeq.converters.checkpoint import Checkpoint
from edgeq.converters.code_digest import quantizing_code
from edgeq.converters.families import EMBEDDING, HEAD, NORM, NORM_BIAS, POSITIONS
from edgeq.converters.items import ArrayItem, BlobItem, Contents, Item
from edgeq.converters.journal import ENDING
from edgeq.converters.linears import LinearItem, Recipe
from edgeq.converters.method import Method
from edgeq.converters.options import HEADS, ConvertOptions, HeadBits
from edgeq.converters.quantizer import fitting_group_size
from edgeq.converters.slabs import SLAB_BYTES
from edgeq.converters.tokenizer import TextAssets
from edgeq.converters.tuning_cost import tuning_bytes
from edgeq.manifest import FLOAT_PARTS, Shape, StackContents, layer_contents, layer_prefix, patch_contents, projector_contents
from edgeq.metadata import Metadata
from edgeq.version import __version__

BASELINE = 500 << 20
"""Anonymous memory of Python, torch and transformers with their thread pools."""
DEVICE_BASELINE = 64 << 20
"""Workspaces of a GPU's libraries, and what is lost between the blocks that torch takes of its memory."""


@dataclass(frozen=True)
class WriteStep:
    """Items written one after another, then recorded in the journal.

    method   that delivers them
    layer    the decoder layer they belong to, if any
    block    which block of its stack that is, or of a tower: its patches, its layers and its projector
    """

    label: str
    items: tuple[Item, ...]
    method: Method
    layer: int | None = None
    block: int | None = None


@dataclass(frozen=True)
class ConversionPlan:
    """What will be written and how; `options` are those asked for, `method.options` have the defaults filled in.

    method, tower   of the decoder, and of the vision tower where there is one
    choice          what was measured for the head and the mode
    prediction      of the allocation that the budget led to
    compute         where the calibration text runs
    divergence      mean KL divergence of the finished file on calibration text, in nats; measured with an allocation
    """

    options: ConvertOptions
    checkpoint: Checkpoint
    method: Method
    tower: Method | None
    text: TextAssets
    calibration: Calibration | PictureSamples | None
    steps: tuple[WriteStep, ...]
    choice: PrecisionChoice | None = None
    prediction: Prediction | None = None
    divergence: float | None = None
    compute: Compute = Compute()

    @cached_property
    def contents(self) -> Contents:
        return Contents.of([item for step in self.steps for item in step.items])

    def heads(self) -> dict[int, Codec | None]:
        """The candidates for the head's codec, by bits: only one where the options or the allocation give it."""
        if allocated := self.method.allocated("head"):
            return {allocated.bits or 16: allocated if allocated.bits else None}
        candidates: tuple[int, ...] = (self.options.head,) if self.options.head else HEADS[:-1]
        return {bits: head_codec(bits, self.method.config.hidden_size) for bits in candidates}

    def parts(self) -> tuple[Part, ...]:
        """The parts that an allocation gives a codec each."""
        return parts_of((item for step in self.steps for item in step.items), self.method.config)

    def codecs(self) -> dict[str, Codec]:
        """The codec of every weight of a decoder layer, by tensor; of one with two blocks that of the first."""
        items = (item for step in self.steps if step.layer is not None for item in step.items if isinstance(item, LinearItem))
        return {tensor: item.recipe.codec for item in items for tensor, _ in item.tensors}

    def with_choice(self, choice: PrecisionChoice) -> ConversionPlan:
        """This plan with what was measured; only its last step can change."""
        if self.options.allocation is not None:
            return replace(self, choice=choice)
        options = replace(self.options, head=cast(HeadBits, choice.head))
        method = type(self.method)(options, self.method.family, self.method.config)
        steps = write_steps(self.checkpoint, method, self.tower, self.text)
        return replace(self, options=options, method=method, steps=steps, choice=choice)

    @property
    def output_bytes(self) -> int:
        """Size of the file, its metadata estimated at 512 bytes a segment."""
        return DATA_OFFSET + self.contents.nbytes + 512 * self.contents.segments

    @property
    def memory_bytes(self) -> int:
        """The promise: anonymous memory that the conversion will not exceed."""
        scales = max(item.scale_bytes for step in self.steps for item in step.items if isinstance(item, LinearItem))
        tokens = 0 if self.calibration is None else self.calibration.tokens
        always, writing = BASELINE + self.method.memory_bytes(tokens), 6 * SLAB_BYTES + scales
        if self.calibration is None:
            return always + writing
        c, length = self.method.config, self.calibration.longest
        layer, batch = self.layer_bytes, self.batch_bytes(BATCH_ROWS)
        # When all layers are written, a few rows are run again for what the head and the whole file lose.
        allocates = self.options.budget is not None or self.options.allocation is not None
        measured = min(tokens, max(self.calibration.few(ROWS).tokens, MOST_TOKENS + length if allocates else 0))
        states, logits = measurement_bytes(c, measured)
        # One after another: a layer is tuned, run, written, run again for its report; those few rows, and the head.
        tunes, tuning = bool(self.method.options.tune), tuning_bytes(layer, self.largest_bytes, batch)
        work = (2 * layer + max(batch, tunes * tuning), 2 * layer + writing, layer + batch + states, states + logits + writing)
        pictures = self._picture_bytes(self.calibration) if isinstance(self.calibration, PictureSamples) else 0
        # Tuning has inputs and targets beside the outputs.
        return always + pictures + (1 + 2 * tunes) * 4 * tokens * c.hidden_size + max(work)

    def device_bytes(self, rows: int) -> int:
        """The promise for a GPU that computes so many rows of tokens at a time: the most memory that is taken of it.

        A decoder layer in float32 and its largest matrix once more, what the method declares, and what is computed from a
        batch; or, when head and mode are chosen, slabs of the head, what enters it and its logits.
        """
        assert self.calibration is not None
        c, largest = self.method.config, self.largest_bytes
        # A probe has the moments of all parts of a layer at hand.
        moments = self.method.memory_bytes(self.calibration.tokens) + MOMENT_BYTES * (self.options.budget is not None)
        batch = self.batch_bytes(rows)
        tuning = bool(self.method.options.tune) * tuning_bytes(self.layer_bytes, largest, batch)
        layer = self.layer_bytes + max(largest + moments + batch, tuning)
        tokens = self.calibration.few(ROWS).tokens
        slab = min(c.vocab_size, SLAB_BYTES // (4 * c.hidden_size), LOGIT_BYTES // (4 * tokens))
        head = 4 * (2 * tokens * c.hidden_size + 2 * slab * c.hidden_size + 5 * tokens * slab)
        return max(layer, head) + DEVICE_BASELINE

    @property
    def layer_bytes(self) -> int:
        """A decoder layer in float32."""
        return 4 * sum(math.prod(shape) for _, shape in self.method.family.layer_parts(0).values())

    @property
    def largest_bytes(self) -> int:
        """Its largest matrix."""
        return 4 * max(math.prod(shape) for _, shape in self.method.family.layer_parts(0).values())

    def batch_bytes(self, rows: int) -> int:
        """Scores of attention, where torch keeps them whole, and what a layer computes from so many rows of tokens."""
        assert self.calibration is not None
        c, length = self.method.config, self.calibration.longest
        return 4 * rows * length * (3 * c.num_attention_heads * length + token_activations(c))

    def _picture_bytes(self, samples: PictureSamples) -> int:
        """Memory that a tower takes over calibration pictures."""
        assert self.tower is not None and isinstance(self.tower.stack, VisionConfig)
        c, patches = self.tower.stack, [math.prod(picture.grid) for picture in samples.pictures]
        widest = max(c.patch_width, c.hidden_size)
        layer = 4 * sum(math.prod(shape) for _, shape in self.tower.family.layer_parts(0).values())
        most = max(patches)
        batch = 4 * most * (3 * c.num_attention_heads * most + token_activations(c) + 2 * c.joined_size)
        kept = widest + len(c.tap_layers) * c.hidden_size
        return 4 * sum(patches) * kept + 2 * layer + batch + self.tower.memory_bytes(sum(patches))

    def metadata(self, found: Mapping[str, object] | None = None) -> Metadata:
        """Metadata of the finished file.  Nothing in it depends on when, where or in how many runs it was made.

        found   what linear layers say of the columns that are kept apart, by name
        """
        provenance: dict[str, object] = {
            "source": self.checkpoint.name,
            "source_digest": self.checkpoint.digest(),
            **({"adapter": {"name": a.name, "digest": a.digest}} if (a := self.checkpoint.adapter) else {}),
            "method": self.method.name,
            "options": {key: value for key, value in self.method.options.recorded().items() if key != "method"},
            "calibration": self.calibration and {key: getattr(self.calibration, key) for key in ("source", "sha256", "tokens")},
            **({SOURCE_CHANNELS: True} if self.method.keeps_channels else {}),
            "edgeq": __version__,
            "code": quantizing_code(),
            "measured": self._measured(),
            "quantizer": None
            if self.method.options.bits is None
            else self.method.preset.title(self.method.codec(self.method.config.hidden_size)),
            **({"details": self.method.details} if self.method.details else {}),
            **({"split_rows": dict(found)} if found else {}),
            **({"vision": {"method": self.tower.name, **self.tower.options.recorded()}} if self.tower else {}),
        }
        contents = self.contents
        return Metadata(
            config=self.stored_config,
            generation=self.text.generation,
            provenance=provenance,
            default_mode=self.choice.mode if self.choice else self.method.mode or "a16",
            linears=contents.linears,
            arrays=contents.arrays,
            blobs=contents.blobs,
            kv=self.method.kv,
            vision_mode=self.tower.mode if self.tower else None,
        )

    @property
    def stored_config(self) -> ModelConfig:
        """The network of the file, its tower as that is stored."""
        config = self.method.stored_config
        if self.tower is None:
            return config
        assert isinstance(self.tower.stack, VisionConfig)
        return replace(config, vision=self.tower.stack)

    def _measured(self) -> dict[str, object] | None:
        if self.choice is None:
            return None
        found = dict(self.choice.measured)
        if self.prediction:
            found |= {"kl_predicted": self.prediction.kl, "kl_of_parts": self.prediction.measured}
        return found if self.divergence is None else found | {"kl": self.divergence}

    def fingerprint(self) -> dict[str, object]:
        """Everything the bytes of the result depend on, flat, so that a difference can be named."""
        import torch

        found: dict[str, object] = {"edgeq": __version__, "code": quantizing_code(), "torch": torch.__version__}
        found["source"] = self.checkpoint.name
        found["adapter"] = self.checkpoint.adapter.digest if self.checkpoint.adapter else None
        for path in self.checkpoint.files():
            if path.name.endswith(ENDING):
                # That of an output beside the checkpoint's own files.
                continue
            status = path.stat()
            found[f"file {path.name}"] = [status.st_size, status.st_mtime_ns]
        config = json.dumps(self.checkpoint.config, sort_keys=True)
        found["config.json"] = hashlib.sha256(config.encode()).hexdigest()
        found["calibration text"] = self.calibration.sha256 if self.calibration else None
        options = self.method.options.recorded()
        if self.options.allocation is not None:
            text = json.dumps(self.options.allocation)
            options["allocation"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        if options.get("group_size") and not self.method.group_size_given:
            options["group_size"] = f"at most {options['group_size']}"
        return found | {f"option {key}": value for key, value in options.items()}

    def notes(self) -> list[str]:
        """Lines for the user: why a GPU is not used; the layers whose columns the group size does not divide, and what their
        groups are instead.
        """
        device = [self.compute.note] if self.compute.note else []
        size = self.method.options.group_size
        if not size or self.options.allocation is not None:
            return device
        # (columns, their group size) -> the layers' names without numbers, in order
        layers: dict[tuple[int, int], dict[str, None]] = {}
        for item in (item for step in self.steps if step.layer is not None for item in step.items):
            if isinstance(item, LinearItem) and item.recipe.codec.kind == "int":
                codec, block = item.recipe.blocks(item.columns)[0]
                columns = block.stop - block.start
                if columns % size:
                    part = ".".join(x for x in item.name.split(".")[2:] if not x.isdigit())
                    layers.setdefault((columns, codec.group_size), {})[part] = None
        return [*device, *(_groups_note(size, columns, taken, ", ".join(parts)) for (columns, taken), parts in layers.items())]


def write_steps(checkpoint: Checkpoint, method: Method, tower: Method | None, text: TextAssets) -> tuple[WriteStep, ...]:
    """The steps in execution order: text and embedding, vision tower, decoder layers, norm and head."""
    config, stored_config = method.config, method.stored_config
    tied, options = config.tie_word_embeddings, method.options
    stack = StackItems(checkpoint, method)
    first: list[Item] = [BlobItem(name, data) for name, data in text.blobs.items()]
    if not stored_config.tie_word_embeddings:
        first.append(_embedding(stack, method))
    if config.rope.kind == "learned":
        first.append(stack.array("positions", "positions", POSITIONS))
    table = EMBEDDING if stored_config.tie_word_embeddings else HEAD
    codec = None if options.bits is None else method.allocated("head") or head_codec(options.head or 8, config.hidden_size)
    activation = method.head_activation if codec else None
    recipe = Recipe(codec or Codec(options.dtype or stack.kind(EMBEDDING if tied else HEAD)), activation=activation)
    head = LinearItem("head", ((table, config.vocab_size),), config.hidden_size, recipe)
    norms = [stack.array("norm", "norm", NORM)]
    if config.layer_norm:
        norms.append(stack.array("norm_bias", "norm_bias", NORM_BIAS))
    layers = config.num_hidden_layers
    return (
        WriteStep("text and embedding", tuple(first), method),
        *(tower_steps(checkpoint, tower) if tower else ()),
        *(WriteStep(f"layer {i + 1} of {layers}", tuple(stack.layer(i)), method, i, i) for i in range(layers)),
        WriteStep("norm and head", (*norms, head), method),
    )


def _embedding(stack: StackItems, method: Method) -> Item:
    """An embedding that is not the head: a part of its own where parts get their codecs one by one, else as it is."""
    options, config = method.options, method.config
    if options.budget is None and options.allocation is None:
        return stack.array(TABLE, TABLE, EMBEDDING)
    codec = method.allocated(TABLE) or Codec(cast(Kind, method.dtype(TABLE, stack.kind(EMBEDDING))))
    return LinearItem(TABLE, ((EMBEDDING, config.vocab_size),), config.hidden_size, Recipe(codec))


def tower_steps(checkpoint: Checkpoint, method: Method) -> Iterator[WriteStep]:
    """The steps of a vision tower: patches, layers, projector."""
    config, stack = method.stack, StackItems(checkpoint, method)
    assert isinstance(config, VisionConfig)
    layers = config.num_hidden_layers
    yield WriteStep("vision patches", tuple(stack.ends(patch_contents(config))), method, block=0)
    for i in range(layers):
        yield WriteStep(f"vision layer {i + 1} of {layers}", tuple(stack.layer(i)), method, block=i + 1)
    yield WriteStep("vision projector", tuple(stack.ends(projector_contents(config))), method, block=layers + 1)


class StackItems:
    """The items of a decoder or of a tower, as `method` stores them."""

    def __init__(self, checkpoint: Checkpoint, method: Method) -> None:
        self._checkpoint, self._method = checkpoint, method
        self._shapes = method.family.tensor_shapes()

    def kind(self, *tensors: str) -> Kind:
        """The type that holds all of these tensors as the checkpoint has them."""
        kinds = {self._checkpoint.dtype(name) for name in tensors}
        kind: Kind = "f32" if len(kinds) > 1 or "f32" in kinds else "f16" if "f16" in kinds else "bf16"
        return kind

    def array(self, name: str, part: str, tensor: str) -> ArrayItem:
        return ArrayItem(name, tensor, self._shapes[tensor], self._method.dtype(part, self.kind(tensor)))

    def layer(self, index: int) -> Iterator[Item]:
        """The items of a layer, in execution order."""
        method, stack = self._method, self._method.stack
        p, names = layer_prefix(stack, index), method.family.layer_tensors(index)
        for name, content in layer_contents(stack, index).items():
            if name == f"{p}o":
                extras = method.extras(index).items()
                yield from (ArrayItem(extra, extra, shape, dtype) for extra, (dtype, shape) in extras)
            yield self._item(p, name, content, names)

    def ends(self, contents: StackContents) -> Iterator[Item]:
        """The items of what a tower has before or after its layers."""
        names = {part: name for part, (name, _) in self._method.family.end_parts(contents).items()}
        yield from (self._item(self._method.stack.prefix, name, content, names) for name, content in contents.items())

    def _item(self, prefix: str, name: str, content: dict[str, Shape] | tuple[int, ...], names: dict[str, str]) -> Item:
        part = name.removeprefix(prefix)
        if isinstance(content, tuple):
            return self.array(name, part, names[part])
        return self._linear(name, part, tuple(x.removeprefix(prefix) for x in content), names)

    def _linear(self, name: str, part: str, parts: tuple[str, ...], names: dict[str, str]) -> LinearItem:
        """A layer of the rows of `parts`, whose tensors are in `names`."""
        method, shapes, tensors = self._method, self._shapes, [names[x] for x in parts]
        biases = [names[f"{x}.bias"] for x in parts if f"{x}.bias" in names]
        columns, kind = shapes[tensors[0]][1], self.kind(*tensors)
        floats = part in FLOAT_PARTS
        recipe = Recipe(Codec(cast(Kind, method.dtype(part, kind)))) if floats else method.recipe(name, columns, kind)
        bias_dtype = method.dtype(f"{part}.bias", self.kind(*biases)) if biases else "f32"
        rows = tuple((tensor, shapes[tensor][0]) for tensor in tensors)
        return LinearItem(name, rows, columns, recipe, tuple((b, shapes[b][0]) for b in biases), bias_dtype)


def head_codec(bits: int, columns: int) -> Codec | None:
    """Symmetric integers in the largest groups that divide the columns; None for 16 bits: floats as stored."""
    return None if bits == 16 else Codec("int", bits, fitting_group_size(columns), symmetric=True)


def _groups_note(size: int, columns: int, taken: int, layers: str) -> str:
    """What the groups of `layers` are, where `size` does not divide their columns and `taken` is their group size."""
    rest = columns % taken
    ends = f", the last group of each output channel has {rest}" if rest else ""
    return f"{layers}: group size {size} does not divide {columns} input channels: groups of {taken}{ends}"
