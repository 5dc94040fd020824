"""A decoder layer over the calibration text in stages: run only as far as the inputs that are asked for.

Its linear layers are quantized in the order of execution, each over inputs that come through those already quantized ("true
sequential" GPTQ).  A forward of the whole layer for each of them would run most of it four times.  Here attention is run to the
input of its output projection, then through it, the MLP likewise: 1.7 forwards, in which no activation but the hidden states
outlives a batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.moments import Moments
from edgeq.converters.calibration.torch_decoder import DecoderLayer, Experts, quantized_linears


class _Reached(Exception):
    """The inputs of the module that was asked for."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


class StagedLayer:
    """Decoder layer `index` of a calibration run, whose `forward.hidden` are its inputs; `finish` leaves those of the next.

    The attention is passed, with its weights as they then are, when inputs within the MLP are first asked for.
    """

    def __init__(self, forward: BlockForward, index: int, layer: nn.Module) -> None:
        assert isinstance(layer, DecoderLayer)
        self._layer, self._forward, self._arguments = layer, forward, forward.attention_arguments(index)
        self._passed = False
        self._kept: tuple[str, Moments] | None = None

    def inputs(self, path: str) -> Iterator[Tensor]:
        """The inputs [tokens, channels] of the module `path` of the layer as it is now, batch by batch.

        What acts on the inputs of modules (`Method.install`) has acted on these.  An expert has only the tokens routed to it.
        """
        if path.startswith("mlp"):
            self._pass_attention()
        module = self._layer.get_submodule(path)

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise _Reached(args[0])

        for batch in self._forward.batches():
            handle = module.register_forward_pre_hook(stop)
            try:
                self._run_to(path, self._forward.compute.put(batch))
            except _Reached as reached:
                x = reached.inputs.reshape(-1, reached.inputs.shape[-1])
                if len(x):
                    yield x
            finally:
                handle.remove()

    def _run_to(self, path: str, batch: Tensor) -> None:
        layer = self._layer
        if not path.startswith("mlp"):
            layer.self_attn(layer.input_layernorm(batch), **self._arguments)
            return
        x = layer.post_attention_layernorm(batch)
        if isinstance(layer.mlp, Experts) and path != "mlp":
            layer.mlp.run_owner(path, x.flatten(0, -2))
        else:
            layer.mlp(x)

    @torch.no_grad()
    def moments(self, path: str) -> Moments:
        """The moments of the inputs of module `path`; of the module asked for last they are kept until `changed`."""
        if self._kept is None or self._kept[0] != path:
            self._kept = None
            found = Moments(self._columns(path), self._forward.compute.device)
            for x in self.inputs(path):
                found.add(x)
            self._kept = path, found
        return self._kept[1]

    def _columns(self, path: str) -> int:
        module = self._layer.get_submodule(path)
        assert isinstance(module, nn.Linear)
        return module.in_features

    def divided(self, path: str, scale: Tensor) -> None:
        """The inputs of module `path` are now divided by `scale`, nothing else has changed."""
        if self._kept and self._kept[0] == path:
            self._kept[1].divide(scale)

    def changed(self) -> None:
        """The function of the layer has changed: moments that are kept no longer hold."""
        self._kept = None

    @torch.no_grad()
    def _pass_attention(self) -> None:
        if self._passed:
            return
        layer = self._layer
        for batch in self._forward.batches():
            x = self._forward.compute.put(batch)
            x += layer.attention_output_norm(layer.self_attn(layer.input_layernorm(x), **self._arguments))
            # Batches are views: the hidden states are advanced in place.
            batch.copy_(x)
        self._passed = True

    @torch.no_grad()
    def finish(self) -> None:
        """Advance the hidden states through what is left of the layer."""
        self._pass_attention()
        self._kept = None
        for batch in self._forward.batches():
            x = self._forward.compute.put(batch)
            x += self._layer.mlp_output_norm(self._layer.mlp(self._layer.post_attention_layernorm(x)))
            batch.copy_(x)


def sites(layer: nn.Module) -> list[tuple[str, ...]]:
    """The modules of linear layers that are rounded, in execution order, those with the same inputs together."""
    found: dict[str, list[str]] = {}
    for path in quantized_linears(layer):
        found.setdefault(path if path.endswith(("o_proj", "down_proj")) else path.rpartition(".")[0], []).append(path)
    return [tuple(paths) for paths in found.values()]
