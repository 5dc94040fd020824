"""What a conversion writes, in which order: the items of every step, as its method stores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from edgeq.converters.budget.part_names import TABLE
from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.tokenizer import TextAssets
from edgeq.converters.families import EMBEDDING, HEAD, LAYER_ROWS, NORM, NORM_BIAS, POSITIONS, ROW_CONTEXT, ROW_CONTEXT_NORM
from edgeq.converters.families.family import dense_tensor, embedding_norm_tensor
from edgeq.converters.method import Method
from edgeq.converters.planning.items import ArrayItem, BlobItem, Item
from edgeq.converters.rounding.linears import LinearItem, Recipe
from edgeq.converters.rounding.presets import fitting_group_size
from edgeq.format.codec import Codec, Kind
from edgeq.format.manifest import (
    FLOAT_PARTS,
    Shape,
    StackContents,
    dense_shapes,
    draft_input,
    draft_output,
    embedding_norm_shapes,
    layer_contents,
    layer_prefix,
    patch_contents,
    policy_input,
    policy_output,
    projector_contents,
    table_shapes,
)
from edgeq.network.config import VisionConfig
from edgeq.network.draft_stack import DraftStack
from edgeq.network.policy_stack import PolicyStack


@dataclass(frozen=True)
class WriteStep:
    """Items written one after another, then recorded in the journal.

    method   that delivers them
    layer    the decoder layer they belong to, if any
    block    which block of its stack that is, or of a tower: its patches, its layers and its projector; or of an expert
    """

    label: str
    items: tuple[Item, ...]
    method: Method
    layer: int | None = None
    block: int | None = None


def write_steps(
    checkpoint: Checkpoint, method: Method, tower: Method | None, draft: Method | None, text: TextAssets
) -> tuple[WriteStep, ...]:
    """The steps in execution order: text and embedding, vision tower, decoder layers, the one that drafts, norm and head."""
    config, stored_config = method.config, method.stored_config
    tied, options = config.tie_word_embeddings, method.options
    stack = StackItems(checkpoint, method)
    first: list[Item] = [BlobItem(name, data) for name, data in text.blobs.items()]
    if not stored_config.tie_word_embeddings:
        first.append(_embedding(stack, method))
    if config.rope.kind == "learned":
        first.append(stack.array("positions", "positions", POSITIONS))
    first += [stack.array(name, "norm", embedding_norm_tensor(name)) for name in embedding_norm_shapes(stored_config)]
    first += _layer_rows(stack, method)
    table = EMBEDDING if stored_config.tie_word_embeddings else HEAD
    codec = None if options.bits is None else method.allocated("head") or head_codec(options.head or 8, config.hidden_size)
    ends: list[Item] = [stack.array("norm", "norm", NORM)]
    if config.layer_norm:
        ends.append(stack.array("norm_bias", "norm_bias", NORM_BIAS))
    ends += [stack.array(name, "dense", dense_tensor(name)) for name in dense_shapes(config)]
    if config.pooling is None:
        activation = method.head_activation if codec else None
        source, order = EMBEDDING if tied else HEAD, None
        if method.keeps_integers:
            codec, order = stack.codec(source), checkpoint.order(source)
        recipe = Recipe(codec or Codec(options.dtype or stack.kind(source)), order=order, activation=activation)
        ends.append(LinearItem("head", ((table, config.vocab_size),), config.hidden_size, recipe))
    layers = config.num_hidden_layers
    return (
        WriteStep("text and embedding", tuple(first), method),
        *(tower_steps(checkpoint, tower) if tower else ()),
        *(WriteStep(f"layer {i + 1} of {layers}", tuple(stack.layer(i)), method, i, i) for i in range(layers)),
        *(beside_steps(checkpoint, draft) if draft else ()),
        WriteStep("norm and head" if config.pooling is None else "norm", tuple(ends), method),
    )


def _embedding(stack: StackItems, method: Method) -> Item:
    """An embedding that is not the head: a part of its own where parts get their codecs one by one, in the bits of a head where
    there is none, in those that the method gives one that was the head too, else as it is."""
    options, config = method.options, method.config
    pools = config.pooling is not None and options.bits is not None
    bits = (options.head or 8) if pools else method.table_bits
    if options.budget is None and options.allocation is None and bits and (rounded := head_codec(bits, config.hidden_size)):
        return LinearItem(TABLE, ((EMBEDDING, config.vocab_size),), config.hidden_size, Recipe(rounded))
    if method.keeps_integers and (kept := stack.codec(EMBEDDING)).integer:
        return LinearItem(TABLE, ((EMBEDDING, config.vocab_size),), config.hidden_size, Recipe(kept))
    if options.budget is None and options.allocation is None:
        return stack.array(TABLE, TABLE, EMBEDDING)
    codec = method.allocated(TABLE) or Codec(cast(Kind, method.dtype(TABLE, stack.kind(EMBEDDING))))
    return LinearItem(TABLE, ((EMBEDDING, config.vocab_size),), config.hidden_size, Recipe(codec))


def _layer_rows(stack: StackItems, method: Method) -> Iterator[Item]:
    """The table of rows that layers have for each token, in the bits of their weights; what makes such rows of embeddings stays
    as it is."""
    options, tables = method.options, table_shapes(method.config)
    if not tables:
        return
    (rows, width), (_, hidden) = tables.values()
    floats = Codec(options.dtype or stack.kind(LAYER_ROWS))
    codec = method.codec(width) if options.bits is not None else stack.codec(LAYER_ROWS) if method.keeps_integers else floats
    yield LinearItem("layer_rows", ((LAYER_ROWS, rows),), width, Recipe(codec, method.preset))
    kind = cast(Kind, method.dtype("row_context", stack.kind(ROW_CONTEXT)))
    yield LinearItem("row_context", ((ROW_CONTEXT, width),), hidden, Recipe(Codec(kind)))
    yield stack.array("row_context_norm", "row_context_norm", ROW_CONTEXT_NORM)


def tower_steps(checkpoint: Checkpoint, method: Method) -> Iterator[WriteStep]:
    """The steps of a vision tower: patches, layers, projector."""
    config, stack = method.stack, StackItems(checkpoint, method)
    assert isinstance(config, VisionConfig)
    layers = config.num_hidden_layers
    yield WriteStep("vision patches", tuple(stack.ends(patch_contents(config))), method, block=0)
    for i in range(layers):
        yield WriteStep(f"vision layer {i + 1} of {layers}", tuple(stack.layer(i)), method, block=i + 1)
    yield WriteStep("vision projector", tuple(stack.ends(projector_contents(config))), method, block=layers + 1)


def beside_steps(checkpoint: Checkpoint, method: Method) -> Iterator[WriteStep]:
    """The step of the layer that drafts, or the steps of the expert of a policy."""
    config, stack = method.stack, StackItems(checkpoint, method)
    if isinstance(config, DraftStack):
        items = (*stack.ends(draft_input(config)), *stack.layer(0), *stack.ends(draft_output(config)))
        yield WriteStep("layer that drafts", items, method)
        return
    assert isinstance(config, PolicyStack)
    layers = config.num_hidden_layers
    yield WriteStep("expert's input", tuple(stack.ends(policy_input(config))), method)
    for i in range(layers):
        yield WriteStep(f"expert's layer {i + 1} of {layers}", tuple(stack.layer(i)), method, block=i)
    yield WriteStep("expert's output", tuple(stack.ends(policy_output(config))), method)


class StackItems:
    """The items of a decoder, of a tower or of a layer that drafts, as `method` stores them."""

    def __init__(self, checkpoint: Checkpoint, method: Method) -> None:
        self._checkpoint, self._method = checkpoint, method
        self._shapes = method.family.tensor_shapes()

    def kind(self, *tensors: str) -> Kind:
        """The type that holds all of these tensors as the checkpoint has them."""
        kinds = {self._checkpoint.dtype(name) for name in tensors}
        kind: Kind = "f32" if len(kinds) > 1 or "f32" in kinds else "f16" if "f16" in kinds else "bf16"
        return kind

    def codec(self, *tensors: str) -> Codec:
        """How the checkpoint holds these weights: all in the same integers, or in floats."""
        codecs = {self._checkpoint.codec(name) for name in tensors}
        return codecs.pop() if len(codecs) == 1 else Codec(self.kind(*tensors))

    def _kept(self, tensor: str) -> tuple[Codec, bytes]:
        """What the rows of a matrix have in common where they are kept as they are: codec, and order of their columns."""
        order = self._checkpoint.order(tensor)
        return self._checkpoint.codec(tensor), b"" if order is None else order.tobytes()

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
            yield from self._items(p, name, content, names, index)

    def ends(self, contents: StackContents) -> Iterator[Item]:
        """The items of what a tower or a layer that drafts has before or after its layers."""
        names = {part: name for part, (name, _) in self._method.family.end_parts(contents).items()}
        for name, content in contents.items():
            yield from self._items(self._method.stack.prefix, name, content, names)

    def _items(
        self, prefix: str, name: str, content: dict[str, Shape] | tuple[int, ...], names: dict[str, str], layer: int = -1
    ) -> Iterator[Item]:
        """`layer`: which it belongs to; -1: none."""
        part = name.removeprefix(prefix)
        if isinstance(content, tuple):
            yield self.array(name, part, names[part])
            return
        parts = tuple(x.removeprefix(prefix) for x in content)
        stack = self._method.stack
        apart = layer >= 0 and isinstance(stack, VisionConfig) and stack.read_apart(layer, content)
        if apart or (self._method.keeps_integers and len({self._kept(names[x]) for x in parts}) > 1):
            # One matrix has one codec, one order and one input; a file may hold the rows of q, k and v, or gate and up, apart.
            yield from (self._linear(f"{prefix}{x}", x, (x,), names) for x in parts)
        else:
            yield self._linear(name, part, parts, names)

    def _linear(self, name: str, part: str, parts: tuple[str, ...], names: dict[str, str]) -> LinearItem:
        """A layer of the rows of `parts`, whose tensors are in `names`."""
        method, shapes, tensors = self._method, self._shapes, [names[x] for x in parts]
        biases = [names[f"{x}.bias"] for x in parts if f"{x}.bias" in names]
        columns = shapes[tensors[0]][1]
        if part in FLOAT_PARTS:
            recipe = Recipe(Codec(cast(Kind, method.dtype(part, self.kind(*tensors)))))
        else:
            recipe = method.recipe(name, columns, self.codec(*tensors))
            if method.keeps_integers:
                recipe = replace(recipe, order=self._checkpoint.order(tensors[0]))
        bias_dtype = method.dtype(f"{part}.bias", self.kind(*biases)) if biases else "f32"
        rows = tuple((tensor, shapes[tensor][0]) for tensor in tensors)
        return LinearItem(name, rows, columns, recipe, tuple((b, shapes[b][0]) for b in biases), bias_dtype)


def head_codec(bits: int, columns: int) -> Codec | None:
    """Symmetric integers in the largest groups that divide the columns; None for 16 bits: floats as stored."""
    return None if bits == 16 else Codec("int", bits, fitting_group_size(columns), symmetric=True)
