"""Runs calibration samples, text with pictures in it, through a decoder one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.forward import CalibrationBatch, TokenForward, angles_at, embedded, visible
from edgeq.converters.calibration.samples import PictureSample
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import Family
from edgeq.network.config import ModelConfig
from edgeq.pictures.prompt import positions
from edgeq.pictures.whole_pictures import seen_ends


def whole_ends(config: ModelConfig, sample: PictureSample) -> Tensor | None:
    """int64 [tokens], the place after the last token that each sees, where tokens of a picture see all of it; None: they see
    what is before them."""
    if not config.whole_pictures:
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

    @property
    def states(self) -> Sequence[Tensor]:
        return self._states

    def batches(self, index: int) -> Iterator[CalibrationBatch]:
        config, rope = self.config, self.config.layer_rope(index)
        for x, sample, visual in zip(self._states, self._samples, self._visual, strict=True):
            angles, length = None, len(sample.tokens)
            if rope is not None:
                at = torch.from_numpy(positions(sample.places, 0, length, rope.axes)).long()
                angles = angles_at(rope, config.head_dim, at)
            mask = visible(length, config.window(index), ends=whole_ends(config, sample))
            yield CalibrationBatch(x, {"position_embeddings": angles, "attention_mask": mask}, visual)

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
        return found
