"""Runs calibration text through the model, one decoder layer at a time, in torch (torch_decoder.py).

Only the layer at hand is in memory, on the device that computes (compute.py).  The inputs of a layer are the outputs of the
layer before it, unquantized as in AWQ, or as it is stored as in GPTQ: the method decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.config import ModelConfig
from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.torch_decoder import Angles, DecoderLayer, angles
from edgeq.converters.checkpoint import Checkpoint
from edgeq.converters.families import EMBEDDING, POSITIONS, Family
from edgeq.converters.slabs import Tensors
from edgeq.rope import Rope

WholeReader = Callable[[str], NDArray[np.float32]]
"""Tensor name -> the whole tensor in float32."""


def token_activations(c: ModelConfig) -> int:
    """Numbers that a decoder layer computes from a token."""
    mlps = c.num_experts_per_tok + bool(c.shared_expert_intermediate_size)
    inner = max(c.num_experts_per_tok, 1) * c.intermediate_size + c.shared_expert_intermediate_size
    return (8 + 3 * mlps) * c.hidden_size + c.query_size + 2 * inner


class BlockForward:
    """Holds the hidden states that enter the next decoder layer: float32 [rows, tokens, hidden], on the CPU."""

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
        self._family, self._config, self.compute = family, config, compute or Compute()
        self._tensors: Tensors = tensors or checkpoint
        ropes = {config.layer_rope(layer) for layer in range(config.num_hidden_layers)}
        self._angles = {rope: rope and self._put_angles(rope, tokens.shape[1]) for rope in ropes}
        self.hidden = self._embed(tokens)

    def _put_angles(self, rope: Rope, length: int) -> Angles:
        cosines, sines = angles(rope, self._config.head_dim, length)
        return self.compute.put(cosines), self.compute.put(sines)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Only the rows of the embedding that occur are read."""
        unique, inverse = torch.unique(tokens, return_inverse=True)
        rows = [torch.from_numpy(self._tensors.rows(EMBEDDING, int(i), int(i) + 1)) for i in unique]
        x = torch.cat(rows)[inverse] * self._config.embedding_multiplier
        if self._config.rope.kind == "learned":
            x = x + torch.from_numpy(self._tensors.rows(POSITIONS, 0, tokens.shape[1]))
        return x

    def attention_arguments(self, layer: int) -> dict[str, Any]:
        """Rotary tables and the mask: causal, and only the last `window` positions where the layer has a window."""
        length, window = self.hidden.shape[1], self._config.window(layer)
        positions = torch.arange(length, device=self.compute.device)
        distance = positions[:, None] - positions[None]
        mask = (distance >= 0) & (distance < window if window else True)
        return {"position_embeddings": self._angles[self._config.layer_rope(layer)], "attention_mask": mask[None, None]}

    def load(self, index: int, read: WholeReader | None = None) -> nn.Module:
        """Decoder layer `index` with its weights in float32; `read`: where they come from, None: the model's."""
        with torch.device("meta"):
            layer = DecoderLayer(self._config, self._family.description.biases)
        names, read = self._family.layer_tensors(index), read or self._tensors.whole
        prefix = f"model.layers.{index}."
        put = self.compute.put
        state = {name.removeprefix(prefix): put(torch.from_numpy(read(name))) for name in names.values()}
        layer.load_state_dict(state, strict=True, assign=True)
        return layer.requires_grad_(False).eval()

    @torch.no_grad()
    def advance(self, index: int, layer: nn.Module) -> None:
        """Run the layer as it is: its outputs take the place of its inputs in `hidden`."""
        arguments = self.attention_arguments(index)
        for batch in self.batches():
            # Batches are views.
            batch.copy_(layer(self.compute.put(batch), **arguments))

    @torch.no_grad()
    def watch(self, index: int, layer: nn.Module, observers: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Run the layer without advancing; `observers`: module path -> called with its inputs [rows, tokens, channels]."""
        hooks = [
            layer.get_submodule(path).register_forward_hook(_input_hook(f), with_kwargs=True) for path, f in observers.items()
        ]
        arguments = self.attention_arguments(index)
        for batch in self.batches():
            layer(self.compute.put(batch), **arguments)
        for hook in hooks:
            hook.remove()

    @torch.no_grad()
    def run(self, index: int, layer: nn.Module, inputs: Tensor) -> Tensor:
        """The outputs of the layer for `inputs` [rows, tokens, hidden]; nothing is advanced."""
        arguments = self.attention_arguments(index)
        compute = self.compute
        return torch.cat([layer(compute.put(batch), **arguments).cpu() for batch in compute.batches(inputs)])

    def batches(self) -> tuple[Tensor, ...]:
        """Views of the hidden states, as many rows at a time as the device computes."""
        return self.compute.batches(self.hidden)

    def unload(self, layer: nn.Module) -> None:
        layer.to("meta")


def _input_hook(observer: Callable[[Tensor], None]) -> Callable[..., None]:
    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        observer(args[0] if args else kwargs["hidden_states"])

    return observe
