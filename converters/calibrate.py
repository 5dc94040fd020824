"""The unquantized model, one decoder layer at a time, through transformers' own modules.

Of the network only the layer at hand has weights; the rest stays on torch's meta device.  The inputs of a layer are the outputs
of the unquantized layer before it, as in AWQ: errors of finished layers do not reach the statistics of later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.config import ModelConfig
from edgeq.converters.checkpoint import Checkpoint
from edgeq.converters.families import EMBEDDING, Family

WholeReader = Callable[[str], NDArray[np.float32]]
"""Tensor name -> the whole tensor in float32."""
BATCH_ROWS = 4
"""Calibration rows in one forward: bounds what a layer holds inside."""


@dataclass
class Observed:
    """What the inspected modules of one unquantized decoder layer saw and gave, over all calibration rows.

    inputs, outputs: module path -> float32 [rows, tokens, channels].  `attention` are the keyword arguments of self_attn.
    """

    attention: dict[str, Any]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def run(self, path: str, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """(output of `module` as it is now, output observed) of its observed inputs, batch by batch."""
        arguments = self.attention if path == "self_attn" else {}
        for x, y in zip(_batches(self.inputs[path]), _batches(self.outputs[path]), strict=True):
            yield _first(module(x, **arguments)), y


class BlockForward:
    """Holds the hidden states that enter the next decoder layer: float32 [rows, tokens, hidden]."""

    def __init__(
        self, checkpoint: Checkpoint, family: Family, config: ModelConfig, tokens: Tensor, weights: WholeReader | None = None
    ) -> None:
        """`weights`: where those of the layers come from; None: the checkpoint."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self._checkpoint, self._family, self._config = checkpoint, family, config
        self._weights = weights or checkpoint.whole
        settings = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
        settings._attn_implementation = "sdpa"
        auto: Any = AutoModelForCausalLM
        with torch.device("meta"):
            self._model: Any = auto.from_config(settings).eval().float()
        rotary = type(self._model.model.rotary_emb)(settings)
        positions = torch.arange(tokens.shape[1])[None]
        self._rope = rotary(torch.zeros(1), positions)
        self.hidden = self._embed(tokens)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Only the rows of the embedding that occur are read."""
        unique, inverse = torch.unique(tokens, return_inverse=True)
        rows = [torch.from_numpy(self._checkpoint.rows(EMBEDDING, int(i), int(i) + 1)) for i in unique]
        return torch.cat(rows)[inverse]

    def attention_arguments(self, layer: int) -> dict[str, Any]:
        """Rotary tables and the mask: causal, and only the last `window` positions where the layer has a window."""
        length, window = self.hidden.shape[1], self._config.window(layer)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        mask = (distance >= 0) & (distance < window if window else True)
        return {"position_embeddings": self._rope, "attention_mask": mask[None, None]}

    def load(self, index: int) -> nn.Module:
        """Decoder layer `index` with its weights in float32."""
        layer: nn.Module = self._model.model.layers[index]
        names = self._family.layer_tensors(index)
        prefix = f"model.layers.{index}."
        state = {name.removeprefix(prefix): torch.from_numpy(self._weights(name)) for name in names.values()}
        layer.load_state_dict(state, strict=True, assign=True)
        return layer.requires_grad_(False)

    @torch.no_grad()
    def advance(self, index: int, layer: nn.Module, inspected: tuple[str, ...] = ()) -> Observed:
        """Run the unquantized layer: its outputs become the next layer's inputs; `inspected` modules are observed meanwhile."""
        observed = Observed(self.attention_arguments(index))
        seen: dict[str, list[Tensor]] = {path: [] for path in inspected}
        given: dict[str, list[Tensor]] = {path: [] for path in inspected}
        hooks = [
            layer.get_submodule(path).register_forward_hook(_observer(seen[path], given[path]), with_kwargs=True)
            for path in inspected
        ]
        batches = [_first(layer(batch, **observed.attention)) for batch in _batches(self.hidden)]
        for hook in hooks:
            hook.remove()
        self.hidden = torch.cat(batches)
        for path in inspected:
            observed.inputs[path], observed.outputs[path] = torch.cat(seen.pop(path)), torch.cat(given.pop(path))
        return observed

    def unload(self, layer: nn.Module) -> None:
        layer.to("meta")


def _observer(seen: list[Tensor], given: list[Tensor]) -> Callable[..., None]:
    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        given.append(_first(output))

    return observe


def _batches(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, BATCH_ROWS)


def _first(output: Any) -> Tensor:
    """Attention modules return (output, weights)."""
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
