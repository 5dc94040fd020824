"""Runs calibration samples, text with pictures in it, through a decoder one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgeq.converters.calibration.attention_parts import KeptRows, KeysValues
from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.forward import CalibrationBatch, LayerRows, TokenForward, angles_at, embedded, visible
from edgeq.converters.calibration.samples import PictureSample
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import Family
from edgeq.network.config import ModelConfig
from edgeq.pictures.prompt import positions
from edgeq.pictures.whole_pictures import seen_ends


def whole_ends(config: ModelConfig, layer: int, sample: PictureSample) -> Tensor | None:
    """int64 [tokens], the place after the last token that each sees in this layer, where tokens of a picture see all of it;
    None: they see what is before them."""
    if config.window(layer) not in config.picture_ranges:
        return None
    return torch.from_numpy(seen_ends(sample.places, np.arange(len(sample.tokens), dtype=np.int32))).long()


class SampleForward(TokenForward):
    """A batch is a sample, one row."""

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        samples: Sequence[PictureSample],
        features: Sequence[Tensor],
        tensors: Tensors,
    ) -> None:
        """`features`: float32 [1, tokens, hidden] of each picture, sample by sample; beside them what taps of the tower add."""
        super().__init__(family, config, tensors, Compute())
        self._samples, waiting = list(samples), iter(features)
        self.tokens = [torch.tensor([sample.tokens]) for sample in samples]
        self._visual = [torch.zeros(len(sample.tokens), dtype=torch.bool) for sample in samples]
        self._states = [embedded(tensors, config, tokens) for tokens in self.tokens]
        self._taps = len(config.vision.tap_layers) if config.vision else 0
        # Of each sample what the taps add to its pictures, one after another.
        self._added: list[list[Tensor]] = [[] for _ in samples]
        for state, visual, sample, added in zip(self._states, self._visual, samples, self._added, strict=True):
            for place in sample.places:
                found = next(waiting)
                state[:, place.start : place.end] = found[..., : config.hidden_size]
                visual[place.start : place.end] = True
                if self._taps:
                    added.append(found[..., config.hidden_size :])
        layers = range(config.num_hidden_layers)
        self._kept = {config.cache_layer(i): [KeysValues(1) for _ in samples] for i in layers if config.shares_cache(i)}
        width, together = config.hidden_size_per_layer_input, zip(self.tokens, self._states, strict=True)
        self._rows = [LayerRows(tensors, config, tokens, x.clone()) for tokens, x in together] if width else []

    @property
    def states(self) -> Sequence[Tensor]:
        return self._states

    def batches(self, index: int) -> Iterator[CalibrationBatch]:
        config, rope, head_dim = self.config, self.config.layer_rope(index), self.config.heads_of(index).head_dim
        kept = self._kept.get(config.cache_layer(index))
        for number, (x, sample, visual) in enumerate(zip(self._states, self._samples, self._visual, strict=True)):
            angles, length = None, len(sample.tokens)
            if rope is not None:
                at = torch.from_numpy(positions(sample.places, 0, length, rope.axes)).long()
                angles = angles_at(rope, head_dim, at)
            mask = visible(length, config.window(index), ends=whole_ends(config, index, sample))
            arguments: dict[str, Any] = {"position_embeddings": angles, "attention_mask": mask}
            if kept is not None:
                arguments["kept"] = KeptRows(kept[number], torch.tensor([0]))
            if self._rows:
                rows = self._rows[number]
                arguments["rows"] = rows.of(index)[rows.inverse]
            yield CalibrationBatch(x, arguments, visual)

    def passed(self, index: int) -> None:
        """Add to the rows of pictures what the taps of the tower have for them after this layer."""
        hidden = self.config.hidden_size
        if index >= self._taps:
            return
        for state, sample, added in zip(self._states, self._samples, self._added, strict=True):
            for place, found in zip(sample.places, added, strict=True):
                state[:, place.start : place.end] += found[..., index * hidden : (index + 1) * hidden]

    def few(self, count: int) -> SampleForward:
        found, step = copy(self), -(-len(self._states) // count)
        found._samples, found._visual, found.tokens = self._samples[::step], self._visual[::step], self.tokens[::step]
        found._states, found._added = [x.clone() for x in self._states[::step]], self._added[::step]
        found._kept = {layer: [each.few(1) for each in kept[::step]] for layer, kept in self._kept.items()}
        found._rows = self._rows[::step]
        return found
