"""Runs the expert of a policy, one layer at a time, over what it is calibrated with: states of a robot and actions on their way
from noise, after texts that the decoder has read.

A policy's data are not at hand.  States, actions and noise are normal, as the data that policies are trained with are
normalized, and actions are as far as each step of Euler's method begins with: x = t noise + (1 - t) actions (Black et al. 2024,
arXiv 2410.24164, section III).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edgeq.converters.calibration.attention_parts import KeptRows, KeysValues
from edgeq.converters.calibration.forward import (
    BlockForward,
    CalibrationBatch,
    Forward,
    WholeReader,
    angles_at,
)
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import Family
from edgeq.network.policy_stack import PolicyStack

TEXTS = 16
"""Calibration texts, evenly spaced, after each of which actions are made."""
SEED = 0


class ExpertForward(Forward):
    """A row of a batch is a state and the actions of one step after one text.

    The decoder goes through its layers beside the expert: keys and values of one layer are in memory.
    """

    def __init__(
        self, family: Family, config: PolicyStack, decoder: BlockForward, tensors: Tensors, read: WholeReader | None
    ) -> None:
        """decoder   with the texts before its first layer
        read      where its weights come from; None: the model's
        """
        super().__init__(family, config, tensors, decoder.compute)
        self._decoder, self._read = decoder, read
        texts, self._length = decoder.hidden.shape[:2]
        # The text that each row comes after.
        self._texts = torch.arange(texts).repeat_interleave(config.steps)
        self._held: tuple[int, KeysValues] | None = None
        self._hidden = _entering(config, tensors, texts)

    @property
    def states(self) -> Sequence[Tensor]:
        return self.compute.batches(self._hidden)

    def batches(self, index: int) -> Iterator[CalibrationBatch]:
        kept, put = self._keys_of(index), self.compute.put
        arguments = {"position_embeddings": self._angles(index), "attention_mask": put(self._mask())}
        for x, texts in zip(self.states, self.compute.batches(self._texts), strict=True):
            yield CalibrationBatch(x, arguments | {"before": KeptRows(kept, texts)})

    def passed(self, index: int) -> None:
        """Nothing: the rows go from layer to layer."""

    def few(self, count: int) -> ExpertForward:
        found, step = copy(self), -(-len(self._hidden) // count)
        found._decoder = self._decoder.few(len(self._decoder.hidden))
        found._hidden, found._texts = self._hidden[::step].clone(), self._texts[::step]
        return found

    @torch.no_grad()
    def _keys_of(self, index: int) -> KeysValues:
        """The texts' keys and values in the decoder's layer `index`, after which they enter the next one."""
        if self._held is None or self._held[0] != index:
            assert index == (0 if self._held is None else self._held[0] + 1)
            self._held = None
            layer = self._decoder.load(index, self._read)
            self._held = index, self._decoder.advance_keeping(index, layer)
            self._decoder.unload(layer)
        return self._held[1]

    def _angles(self, index: int) -> Any:
        rope, count = self.config.layer_rope(index), self._hidden.shape[1]
        if rope is None:
            return None
        cosines, sines = angles_at(rope, self.config.heads_of(index).head_dim, torch.arange(count)[None] + self._length)
        return self.compute.put(cosines), self.compute.put(sines)

    def _mask(self) -> Tensor:
        """Mask bool [1, 1, rows, keys]: the state sees the text and itself, actions see all."""
        count = self._hidden.shape[1]
        mask = torch.ones(count, self._length + count, dtype=torch.bool)
        mask[0, self._length + 1 :] = False
        return mask[None, None]


def drawn(config: PolicyStack, texts: int) -> tuple[Tensor, Tensor, list[float]]:
    """States float32 [rows, state_size], actions on their way float32 [rows, actions, action_size] and times: after each text a
    row for every step."""
    rows, generator = texts * config.steps, torch.Generator().manual_seed(SEED)
    states = torch.randn(rows, config.state_size, generator=generator)
    actions, noise = torch.randn(2, rows, config.actions, config.action_size, generator=generator)
    times = [1 - step / config.steps for step in range(config.steps)] * texts
    share = torch.tensor(times)[:, None, None]
    return states, share * noise + (1 - share) * actions, times


def _entering(config: PolicyStack, tensors: Tensors, texts: int) -> Tensor:
    """What enters the expert's first layer, float32 [rows, 1 + actions, hidden]."""
    states, actions, times = drawn(config, texts)
    mixed = _linear(tensors, config, "time_action", _linear(tensors, config, "action_in", actions))
    turned = torch.from_numpy(np.stack([config.angles(time) for time in times]))
    mixed = mixed + _linear(tensors, config, "time_in", turned)[:, None]
    mixed = _linear(tensors, config, "time_out", functional.silu(mixed))
    return torch.cat((_linear(tensors, config, "state_in", states)[:, None], mixed), 1)


def _linear(tensors: Tensors, config: PolicyStack, part: str, x: Tensor) -> Tensor:
    """x through a linear layer of the expert's input, of which `time_action` alone has no bias."""
    weight = torch.from_numpy(tensors.whole(f"{config.prefix}{part}.weight"))
    bias = None if part == "time_action" else torch.from_numpy(tensors.whole(f"{config.prefix}{part}.bias"))
    return functional.linear(x, weight, bias)
