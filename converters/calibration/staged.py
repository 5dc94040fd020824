"""A decoder layer over the calibration text in stages: run only as far as the inputs that are asked for.

Its linear layers are quantized in the order of execution, each over inputs that come through those already quantized ("true
sequential" GPTQ).  A forward of the whole layer for each of them would run most of it four times.  Here attention is run to the
input of its output projection, then through it, the MLP likewise: 1.7 forwards, in which no activation but the hidden states
outlives a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from edgeq.converters.calibration.forward import CalibrationBatch, Forward
from edgeq.converters.calibration.moments import Moments, counted
from edgeq.converters.calibration.torch_decoder import DecoderLayer, TorchAttention, TorchExperts
from edgeq.format.manifest import MODALITIES

ATTENDED = ("q_proj", "k_proj", "v_proj")
AFTER_ATTENTION = ("mlp", "rows")
"""Beginnings of the paths of modules that read the stream after attention."""


class _Reached(Exception):
    """The inputs of the module that was asked for."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


class Staged:
    """Block `index` of a calibration run, whose `forward.states` are its inputs; `finish` leaves those of the next.

    largest   module path -> largest |x| of each channel that it reads, float32 [modalities, channels] (text, vision), of the
              modules whose moments were asked for
    """

    def __init__(self, forward: Forward, index: int, block: nn.Module, weighed: bool = False) -> None:
        """`weighed`: tokens count in moments as `weights` and the massive shares of `forward` say."""
        self._block, self._forward, self._index, self._weighed = block, forward, index, weighed
        self._kept: tuple[str, Moments] | None = None
        self.largest: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the block runs."""
        return self._forward.compute.device

    def inputs(self, path: str) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The inputs [tokens, channels] of the module `path` of the block as it is now, batch by batch, and which tokens are of
        pictures, as in Batch.

        What acts on the inputs of modules (`Method.install`) has acted on these.  An expert has only the tokens routed to it.
        """
        module = self._block.get_submodule(path)

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise _Reached(args[0])

        for batch in self._forward.batches(self._index):
            handle = module.register_forward_pre_hook(stop)
            try:
                self._run_to(path, replace(batch, x=self._forward.compute.put(batch.x)))
            except _Reached as reached:
                x = reached.inputs.reshape(-1, reached.inputs.shape[-1])
                if len(x):
                    # An expert's tokens are some of them.
                    yield x, batch.visual if batch.visual is not None and len(batch.visual) == len(x) else None
            finally:
                handle.remove()

    def _run_to(self, path: str, batch: CalibrationBatch) -> None:
        self._block(batch.x, **batch.arguments)

    def weights(self, path: str) -> list[Tensor] | None:
        """What each token of the inputs of module `path` counts, [tokens] of each batch; None: all the same."""
        return None

    def massive_share(self, path: str) -> float:
        """What a massive token counts in the moments of module `path`, where others count 1."""
        return self._forward.massive.get((self._index, path), 1.0)

    @torch.no_grad()
    def moments(self, path: str) -> Moments:
        """The moments of the inputs of module `path`; of the module asked for last they are kept until `changed`."""
        if self._kept is None or self._kept[0] != path:
            self._kept = None
            module, device = self._block.get_submodule(path), self._forward.compute.device
            assert isinstance(module, nn.Linear)
            found, largest = Moments(module.in_features, device), torch.zeros(MODALITIES, module.in_features, device=device)
            weights = self.weights(path) if self._weighed else None
            share = self.massive_share(path) if self._weighed else 1.0
            for number, (x, visual) in enumerate(self.inputs(path)):
                found.add(x, counted(x, weights[number] if weights else None, share))
                add_largest(largest, x, visual)
            self._kept, self.largest[path] = (path, found), largest
        return self._kept[1]

    def divided(self, path: str, scale: Tensor) -> None:
        """The inputs of module `path` are now divided by `scale`, nothing else has changed."""
        if self._kept and self._kept[0] == path:
            self._kept[1].divide(scale)

    def changed(self) -> None:
        """The function of the block has changed: moments that are kept no longer hold."""
        self._kept = None

    @torch.no_grad()
    def finish(self) -> None:
        """Advance the states through what is left of the block."""
        self._kept = None
        self._forward.advance(self._index, self._block)


class StagedLayer(Staged):
    """A layer: its attention is passed, with its weights as they then are, when inputs within the MLP are first asked for."""

    def __init__(self, forward: Forward, index: int, layer: nn.Module, weighed: bool = False) -> None:
        super().__init__(forward, index, layer, weighed)
        assert isinstance(layer, DecoderLayer)
        self._layer, self._passed = layer, False

    def inputs(self, path: str) -> Iterator[tuple[Tensor, Tensor | None]]:
        if path.startswith(AFTER_ATTENTION):
            self._pass_attention()
        return super().inputs(path)

    def weights(self, path: str) -> list[Tensor] | None:
        """For queries, keys and values 1 and what attention takes of the token: an error in the value of one that all others
        look at, often the first, is in all their outputs, and the same in each."""
        attention = self._layer.self_attn
        if not isinstance(attention, TorchAttention) or path.rpartition(".")[2] not in ATTENDED:
            return None
        norm, put = self._layer.input_layernorm, self._forward.compute.put
        batches = self._forward.batches(self._index)
        return [1 + attention.received(norm(put(batch.x)), **batch.attention).flatten() for batch in batches]

    def _run_to(self, path: str, batch: CalibrationBatch) -> None:
        layer = self._layer
        if path.startswith("rows"):
            layer.after_attention(batch.x, batch.rows)
            return
        if not path.startswith("mlp"):
            assert layer.self_attn is not None
            layer.self_attn(layer.input_layernorm(batch.x), **batch.attention)
            return
        assert layer.mlp is not None
        x = layer.mlp_input(batch.x)
        if isinstance(layer.mlp, TorchExperts) and path != "mlp":
            layer.mlp.run_owner(path, x.flatten(0, -2))
        else:
            layer.mlp(x)

    @torch.no_grad()
    def _pass_attention(self) -> None:
        if self._passed:
            return
        layer = self._layer
        for batch in self._forward.batches(self._index):
            # The hidden states are advanced in place.
            batch.x.copy_(layer.to_mlp(self._forward.compute.put(batch.x), **batch.attention))
        self._passed = True

    @torch.no_grad()
    def finish(self) -> None:
        self._pass_attention()
        self._kept = None
        for batch in self._forward.batches(self._index):
            batch.x.copy_(self._layer.after_attention(self._forward.compute.put(batch.x), batch.rows))
        self._forward.passed(self._index)


def staged(forward: Forward, index: int, block: nn.Module, weighed: bool = False) -> Staged:
    """The stages of a layer whose MLP comes after its attention, or another block as a whole; `weighed`: as in Staged."""
    in_stages = isinstance(block, DecoderLayer) and block.parallel == "none"
    return (StagedLayer if in_stages else Staged)(forward, index, block, weighed)


def add_largest(largest: Tensor, x: Tensor, visual: Tensor | None) -> None:
    """Raise `largest` [modalities, channels] to |x| of inputs [tokens, channels] of text and of pictures."""
    parts = (x,) if visual is None else (x[~visual], x[visual])
    for mine, part in zip(largest, parts, strict=False):
        if len(part):
            torch.maximum(mine, part.abs().amax(0), out=mine)


def sites(layer: nn.Module) -> list[tuple[str, ...]]:
    """The modules of linear layers that are rounded, in execution order, those with the same inputs together."""
    found: dict[str, list[str]] = {}
    for path in quantized_linears(layer):
        found.setdefault(path if path.endswith(("o_proj", "out_proj", "down_proj")) else path.rpartition(".")[0], []).append(
            path
        )
    return [tuple(paths) for paths in found.values()]


def quantized_linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that are rounded, by module path in execution order: not what chooses among experts."""
    modules = layer.named_modules()
    return {path: module for path, module in modules if isinstance(module, nn.Linear) and path.endswith("_proj")}
