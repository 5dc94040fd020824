"""Runs what a model is calibrated with through it, one layer at a time, in torch (torch_decoder.py).

Only the layer at hand is in memory, on the device that computes (compute.py).  The inputs of a layer are the outputs of the
layer before it, unquantized as in AWQ, or as it is stored as in GPTQ: the method decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.converters.calibration.attention_parts import Angles, KeptRows, KeysValues
from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.torch_decoder import DecoderLayer, Norm
from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import EMBEDDING, EMBEDDING_NORM, LAYER_ROWS, POSITIONS, ROW_CONTEXT, ROW_CONTEXT_NORM, Family
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope, frequencies, rotation
from edgeq.network.stack import Stack

WholeReader = Callable[[str], NDArray[np.float32]]
"""Tensor name -> the whole tensor in float32."""


def token_activations(c: Stack) -> int:
    """Numbers that a decoder layer computes from a token."""
    mlps = c.num_experts_per_tok + bool(c.shared_expert_intermediate_size)
    widest = max(map(c.mlp_size, range(c.num_hidden_layers)))
    inner = max(c.num_experts_per_tok, 1) * widest + c.shared_expert_intermediate_size
    heads = max(c.heads_of(layer).query_size for layer in range(c.num_hidden_layers))
    return (8 + 3 * mlps) * c.hidden_size + heads + 2 * inner


def kept_numbers(c: Stack, tokens: int) -> int:
    """Numbers that are kept of a text of so many tokens: keys and values that later layers read, and rows of a layer."""
    read = {c.cache_layer(layer) for layer in range(c.num_hidden_layers) if c.shares_cache(layer)}
    size = c.hidden_size_per_layer_input
    return tokens * (sum(2 * c.heads_of(layer).kv_size for layer in read) + (c.hidden_size + 2 * size if size else 0))


@dataclass(frozen=True)
class CalibrationBatch:
    """Rows that go through a layer together.

    x           float32 [rows, tokens, channels], advanced in place
    arguments   of the layer: those of its attention, and `rows`, its own for the tokens
    visual      bool [tokens], those of a decoder that bring a picture; None: there is one kind of rows
    """

    x: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)
    visual: Tensor | None = None

    @property
    def attention(self) -> dict[str, Any]:
        """The arguments of the layer's attention."""
        return {name: each for name, each in self.arguments.items() if name != "rows"}

    @property
    def rows(self) -> Tensor | None:
        found: Tensor | None = self.arguments.get("rows")
        return found


class Forward(ABC):
    """Holds what enters the next block of a stack.

    states   float32 [rows, tokens, channels] of each batch
    massive  (index of a block, path of a module) -> what a massive token counts in the moments of its inputs; others: 1
    """

    def __init__(self, family: Family, config: Stack, tensors: Tensors, compute: Compute) -> None:
        """`compute`: where blocks run; the states stay on the CPU."""
        self.family, self.config, self._tensors, self.compute = family, config, tensors, compute
        self.massive: Mapping[tuple[int, str], float] = {}

    @property
    @abstractmethod
    def states(self) -> Sequence[Tensor]: ...

    @abstractmethod
    def batches(self, index: int) -> Iterator[CalibrationBatch]:
        """`states` as block `index` takes them."""

    @abstractmethod
    def few(self, count: int) -> Forward:
        """A copy that holds about `count` rows of them, evenly spaced."""

    def prefix(self, index: int) -> str:
        """What the names of the tensors of block `index` begin with, before the paths of modules."""
        return f"{self.family.prefix}layers.{index}."

    def load(self, index: int, read: WholeReader | None = None) -> nn.Module:
        """Block `index` with its weights in float32; `read`: where they come from, None: the model's."""
        return self.load_layer(index, self.prefix(index), read)

    def load_layer(self, number: int, prefix: str, read: WholeReader | None) -> nn.Module:
        with torch.device("meta"):
            layer = DecoderLayer(self.config, self.family.description.biases, number)
        names, read, put = self.family.layer_tensors(number), read or self._tensors.whole, self.compute.put
        state = {name.removeprefix(prefix): put(torch.from_numpy(read(name))) for name in names.values()}
        layer.load_state_dict(state, strict=True, assign=True)
        return layer.requires_grad_(False).eval()

    @torch.no_grad()
    def advance(self, index: int, layer: nn.Module) -> None:
        """Run the layer as it is: its outputs take the place of its inputs in `states`."""
        for batch in self.batches(index):
            batch.x.copy_(layer(self.compute.put(batch.x), **batch.arguments))
        self.passed(index)

    @abstractmethod
    def passed(self, index: int) -> None:
        """What the network does between blocks: `states` were advanced through block `index`."""

    @torch.no_grad()
    def outputs(self, index: int, layer: nn.Module) -> list[Tensor]:
        """The outputs of the layer; nothing is advanced."""
        return [layer(self.compute.put(batch.x), **batch.arguments).cpu() for batch in self.batches(index)]

    @torch.no_grad()
    def swap(self, states: Sequence[Tensor]) -> None:
        """Exchange `states` with others, in both places."""
        for mine, theirs in zip(self.states, states, strict=True):
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)

    @torch.no_grad()
    def watch(
        self, index: int, layer: nn.Module, observers: Mapping[str, Callable[[Tensor], None]], advance: bool = False
    ) -> None:
        """Run the layer; `observers`: module path -> called with its inputs [rows, tokens, channels].

        advance   its outputs take the place of its inputs in `states`
        """
        hooks = [
            layer.get_submodule(path).register_forward_hook(_input_hook(f), with_kwargs=True) for path, f in observers.items()
        ]
        for batch in self.batches(index):
            outputs = layer(self.compute.put(batch.x), **batch.arguments)
            if advance:
                batch.x.copy_(outputs)
        if advance:
            self.passed(index)
        for hook in hooks:
            hook.remove()

    def unload(self, layer: nn.Module) -> None:
        layer.to("meta")


class TokenForward(Forward):
    """What enters a decoder.

    tokens   int64 [rows, tokens] of each batch
    """

    config: ModelConfig
    tokens: Sequence[Tensor]


class BlockForward(TokenForward):
    """Calibration text.

    hidden   float32 [rows, tokens, hidden]: the states
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        config: ModelConfig,
        tokens: Tensor,
        tensors: Tensors | None = None,
        compute: Compute | None = None,
    ) -> None:
        """`tensors`: those of the model; None: the checkpoint's own.  `compute`: where layers run; None: on the CPU."""
        super().__init__(family, config, tensors or checkpoint, compute or Compute())
        layers = range(config.num_hidden_layers)
        ropes = {(config.layer_rope(layer), config.heads_of(layer).head_dim) for layer in layers}
        length = tokens.shape[1]
        self._angles = {(rope, size): rope and self._put_angles(rope, size, length) for rope, size in ropes}
        read = {config.cache_layer(layer) for layer in layers if config.shares_cache(layer)}
        self._kept = {layer: KeysValues(len(tokens)) for layer in read}
        self._rows = LayerRows(self._tensors, config, tokens) if config.hidden_size_per_layer_input else None
        self.tokens = self.compute.batches(tokens)
        self.hidden = self._embed(config, tokens)

    def _put_angles(self, rope: Rope, head_dim: int, length: int) -> Angles:
        cosines, sines = angles(rope, head_dim, length)
        return self.compute.put(cosines), self.compute.put(sines)

    def _embed(self, config: ModelConfig, tokens: Tensor) -> Tensor:
        x = embedded(self._tensors, config, tokens)
        if config.rope.kind == "learned":
            x = x + torch.from_numpy(self._tensors.rows(POSITIONS, 0, tokens.shape[1]))
        return x

    @property
    def states(self) -> Sequence[Tensor]:
        return self.compute.batches(self.hidden)

    def attention_arguments(self, layer: int) -> dict[str, Any]:
        """Rotary tables and the mask: causal or both ways, and only `window` positions where the layer has a window.

        What a policy reads is a prompt, all of it.
        """
        config = self.config
        both = config.bidirectional or (config.policy is not None and config.bidirectional_prompt)
        mask = self.compute.put(visible(self.hidden.shape[1], config.window(layer), both))
        turns = self._angles[config.layer_rope(layer), config.heads_of(layer).head_dim]
        return {"position_embeddings": turns, "attention_mask": mask}

    def arguments(self, layer: int, rows: Tensor | None = None) -> Iterator[dict[str, Any]]:
        """The arguments of the layer for each portion of `rows` of the text, int64 [rows]; None: of all."""
        found, kept = self.attention_arguments(layer), self._kept.get(self.config.cache_layer(layer))
        of_tokens, inverse = (self._rows.of(layer), self._rows.inverse) if self._rows else (None, self.hidden)
        for places in self.compute.batches(torch.arange(len(self.hidden)) if rows is None else rows):
            of_kept = {} if kept is None else {"kept": KeptRows(kept, places)}
            of_rows = {} if of_tokens is None else {"rows": self.compute.put(of_tokens[inverse[places]])}
            yield found | of_kept | of_rows

    def batches(self, index: int) -> Iterator[CalibrationBatch]:
        # Batches are views.
        return (CalibrationBatch(x, each) for x, each in zip(self.states, self.arguments(index), strict=True))

    def passed(self, index: int) -> None:
        """Nothing: text goes from layer to layer."""

    def advance_keeping(self, index: int, layer: nn.Module) -> KeysValues:
        """Advance, and give the keys and values of the layer."""
        found = self._kept[index] = KeysValues(len(self.hidden))
        self.advance(index, layer)
        del self._kept[index]
        return found

    def few(self, count: int) -> BlockForward:
        found = copy(self)
        step = -(-len(self.hidden) // count)
        found.hidden, found.tokens = self.hidden[::step].clone(), self.compute.batches(torch.cat(list(self.tokens))[::step])
        found._kept = {layer: each.few(step) for layer, each in self._kept.items()}
        found._rows = self._rows and self._rows.few(step)
        return found

    @torch.no_grad()
    def run(self, index: int, layer: nn.Module, inputs: Tensor) -> Tensor:
        """The outputs of the layer for `inputs` [rows, tokens, hidden] in place of its own; nothing is advanced."""
        compute = self.compute
        portions = zip(compute.batches(inputs), self.arguments(index), strict=True)
        return torch.cat([layer(compute.put(batch), **arguments).cpu() for batch, arguments in portions])


class LayerRows:
    """The rows that layers have for the tokens of a text; those of a layer are made when they are first asked for, and kept
    until another layer's are.

    inverse   int64 [rows, tokens]: which of the rows is a token's
    """

    def __init__(self, tensors: Tensors, config: ModelConfig, tokens: Tensor, entering: Tensor | None = None) -> None:
        """entering   float32 [rows, tokens, hidden], what enters the first layer, where pictures stand in for some tokens;
        None: their embeddings
        """
        self._tensors, self._config = tensors, config
        if entering is None:
            self._tokens, self.inverse = torch.unique(tokens, return_inverse=True)
            self._embedded = embedded(tensors, config, self._tokens)
        else:
            self._tokens, self.inverse = tokens.flatten(), torch.arange(tokens.numel()).view(tokens.shape)
            self._embedded = entering.flatten(0, -2)
        self._last: tuple[int, Tensor] | None = None

    def of(self, layer: int) -> Tensor:
        """norm(row_context(x)) + table[token] sqrt(size / 2) of each different token, float32 [tokens, size]."""
        if self._last is None or self._last[0] != layer:
            # Let go of before, as the memory that is promised has room for those of one layer.
            self._last = None
            self._last = layer, self._made(layer)
        return self._last[1]

    def _made(self, layer: int) -> Tensor:
        size, read = self._config.hidden_size_per_layer_input, self._tensors.rows
        begin, end = layer * size, (layer + 1) * size
        made = self._embedded @ torch.from_numpy(read(ROW_CONTEXT, begin, end)).T
        eps = self._config.rms_norm_eps * self._config.hidden_size
        gain = torch.from_numpy(self._tensors.whole(ROW_CONTEXT_NORM))
        made *= torch.rsqrt(made.square().mean(-1, keepdim=True) + eps) * gain
        stored = np.stack([read(LAYER_ROWS, token, token + 1)[0, begin:end] for token in self._tokens.tolist()])
        rows: Tensor = made + torch.from_numpy(stored) * (size / 2) ** 0.5
        return rows

    def few(self, step: int) -> LayerRows:
        """Those of every `step`-th row of the text."""
        found = copy(self)
        found.inverse = self.inverse[::step]
        return found


def embedded(tensors: Tensors, config: ModelConfig, tokens: Tensor) -> Tensor:
    """Embeddings float32 [..., hidden] of tokens; only the rows of the table that occur are read."""
    unique, inverse = torch.unique(tokens, return_inverse=True)
    rows = [torch.from_numpy(tensors.rows(EMBEDDING, int(i), int(i) + 1)) for i in unique]
    x = torch.cat(rows)[inverse] * config.embedding_multiplier
    if not config.embedding_norm:
        return x
    with torch.no_grad():
        normed: Tensor = stored_norm(tensors, config, EMBEDDING_NORM)(x)
    return normed


def stored_norm(tensors: Tensors, config: ModelConfig, name: str) -> Norm:
    """A norm of the stream whose tensors are `name`.weight and, of a LayerNorm, `name`.bias."""
    norm = Norm(config, config.hidden_size, config.layer_norm)
    norm.load_state_dict({kind: torch.from_numpy(tensors.whole(f"{name}.{kind}")) for kind in norm.state_dict()})
    return norm


def visible(length: int, window: int, bidirectional: bool = False, ends: Tensor | None = None) -> Tensor:
    """Mask bool [1, 1, length, length]: a token sees itself and those before it, the last `window` of them; 0: all.

    bidirectional   and as many after it
    ends            int64 [length], how far each sees instead: up to the token before
    """
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    distance = distance.abs() if bidirectional else distance
    seen = distance >= 0 if ends is None else torch.arange(length)[None] < ends[:, None]
    return (seen & (distance < window if window else True))[None, None]


def _input_hook(observer: Callable[[Tensor], None]) -> Callable[..., None]:
    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        observer(args[0] if args else kwargs["hidden_states"])

    return observe


def angles(rope: Rope, head_dim: int, length: int) -> Angles:
    """Cosines and sines of positions 0 ... length - 1 in a session of that length."""
    found = torch.outer(torch.arange(length).double(), torch.tensor(frequencies(rope, head_dim, length), dtype=torch.float64))
    return (found.cos() * rope.attention_factor).float(), (found.sin() * rope.attention_factor).float()


def angles_at(rope: Rope, head_dim: int, positions: Tensor) -> Angles:
    """Cosines and sines of tokens at `positions` int64 [axes, tokens]."""
    per_position, axes = rotation(rope, head_dim)
    turns = positions[list(axes)] if axes else positions[:1]
    found = turns.T.double() * torch.tensor(per_position, dtype=torch.float64)
    return (found.cos() * rope.attention_factor).float(), (found.sin() * rope.attention_factor).float()
