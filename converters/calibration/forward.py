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

from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.torch_decoder import Angles, DecoderLayer, angles
from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import EMBEDDING, POSITIONS, Family
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope
from edgeq.network.stack import Stack

WholeReader = Callable[[str], NDArray[np.float32]]
"""Tensor name -> the whole tensor in float32."""


def token_activations(c: Stack) -> int:
    """Numbers that a decoder layer computes from a token."""
    mlps = c.num_experts_per_tok + bool(c.shared_expert_intermediate_size)
    inner = max(c.num_experts_per_tok, 1) * c.intermediate_size + c.shared_expert_intermediate_size
    return (8 + 3 * mlps) * c.hidden_size + c.query_size + 2 * inner


@dataclass(frozen=True)
class CalibrationBatch:
    """Rows that go through a layer together.

    x           float32 [rows, tokens, channels], advanced in place
    arguments   of the layer's attention
    visual      bool [tokens], those of a decoder that bring a picture; None: there is one kind of rows
    """

    x: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)
    visual: Tensor | None = None


class Forward(ABC):
    """Holds what enters the next block of a stack.

    states   float32 [rows, tokens, channels] of each batch
    """

    def __init__(self, family: Family, config: Stack, tensors: Tensors, compute: Compute) -> None:
        """`compute`: where blocks run; the states stay on the CPU."""
        self.family, self.config, self._tensors, self.compute = family, config, tensors, compute

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
        ropes = {config.layer_rope(layer) for layer in range(config.num_hidden_layers)}
        self._angles = {rope: rope and self._put_angles(rope, tokens.shape[1]) for rope in ropes}
        self.tokens = self.compute.batches(tokens)
        self.hidden = self._embed(config, tokens)

    def _put_angles(self, rope: Rope, length: int) -> Angles:
        cosines, sines = angles(rope, self.config.head_dim, length)
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
        """Rotary tables and the mask: causal, and only the last `window` positions where the layer has a window."""
        mask = self.compute.put(causal(self.hidden.shape[1], self.config.window(layer)))
        return {"position_embeddings": self._angles[self.config.layer_rope(layer)], "attention_mask": mask}

    def batches(self, index: int) -> Iterator[CalibrationBatch]:
        arguments = self.attention_arguments(index)
        # Batches are views.
        return (CalibrationBatch(x, arguments) for x in self.states)

    def passed(self, index: int) -> None:
        """Nothing: text goes from layer to layer."""

    def few(self, count: int) -> BlockForward:
        found = copy(self)
        step = -(-len(self.hidden) // count)
        found.hidden, found.tokens = self.hidden[::step].clone(), self.compute.batches(torch.cat(list(self.tokens))[::step])
        return found

    @torch.no_grad()
    def run(self, index: int, layer: nn.Module, inputs: Tensor) -> Tensor:
        """The outputs of the layer for `inputs` [rows, tokens, hidden]; nothing is advanced."""
        arguments = self.attention_arguments(index)
        compute = self.compute
        return torch.cat([layer(compute.put(batch), **arguments).cpu() for batch in compute.batches(inputs)])


def embedded(tensors: Tensors, config: ModelConfig, tokens: Tensor) -> Tensor:
    """Embeddings float32 [..., hidden] of tokens; only the rows of the table that occur are read."""
    unique, inverse = torch.unique(tokens, return_inverse=True)
    rows = [torch.from_numpy(tensors.rows(EMBEDDING, int(i), int(i) + 1)) for i in unique]
    return torch.cat(rows)[inverse] * config.embedding_multiplier


def causal(length: int, window: int) -> Tensor:
    """Mask bool [1, 1, length, length]: a token sees itself and those before it, the last `window` of them; 0: all."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    return ((distance >= 0) & (distance < window if window else True))[None, None]


def _input_hook(observer: Callable[[Tensor], None]) -> Callable[..., None]:
    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        observer(args[0] if args else kwargs["hidden_states"])

    return observe
