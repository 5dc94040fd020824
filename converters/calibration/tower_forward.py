"""Runs calibration pictures through a vision tower, one block at a time: patches, layers, projector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.forward import CalibrationBatch, Forward, WholeReader, angles_at
from edgeq.converters.calibration.samples import PictureFile
from edgeq.converters.calibration.torch_tower import Patches, Projector, limit_layers
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import Family
from edgeq.format.manifest import patch_contents, projector_contents
from edgeq.network.config import VisionConfig
from edgeq.pictures.frames import FRAME, WINDOW, Frame


class TowerForward(Forward):
    """A batch is a picture, its patches in the order of a run (edgeq/pictures/frames.py), after a class row where there is
    one; block 0 are the patches, the last one is the projector, whose outputs are the features in the order of the picture.
    """

    def __init__(self, family: Family, config: VisionConfig, pictures: Sequence[PictureFile], tensors: Tensors) -> None:
        """CheckpointError: a picture is no longer what it was."""
        super().__init__(family, config, tensors, Compute())
        self.vision = config
        self._pictures = [(picture.grid, Frame.of(picture.grid, config)) for picture in pictures]
        self._states = [
            torch.from_numpy(picture.read().patches[frame.order])[None]
            for picture, (_, frame) in zip(pictures, self._pictures, strict=True)
        ]
        if config.class_row:
            self._states = [nn.functional.pad(x, (0, 0, 1, 0)) for x in self._states]
        # The states after each tapped layer, picture by picture.
        self._tapped: list[list[Tensor]] = [[] for _ in pictures]

    @property
    def states(self) -> Sequence[Tensor]:
        return self._states

    @property
    def blocks(self) -> int:
        return self.vision.num_hidden_layers + 2

    def batches(self, index: int) -> Iterator[CalibrationBatch]:
        for place, (grid, frame) in enumerate(self._pictures):
            if index == 0:
                arguments: dict[str, Any] = {"grid": grid, "order": frame.order}
            elif index < self.blocks - 1:
                arguments = self._attention_arguments(index - 1, frame)
            else:
                arguments = {"tapped": self._tapped[place]}
            yield CalibrationBatch(self._states[place], arguments)

    def _attention_arguments(self, layer: int, frame: Frame) -> dict[str, Any]:
        config = self.vision
        if config.rope.kind == "learned":
            return {"position_embeddings": None, "attention_mask": None}
        places = torch.from_numpy(frame.places).long()
        span = torch.from_numpy(frame.spans[WINDOW if layer in config.window_layers else FRAME]).long()
        return {"position_embeddings": angles_at(config.rope, config.head_dim, places), "attention_mask": _seen(span)}

    def prefix(self, index: int) -> str:
        return f"{self.family.prefix}layers.{index - 1}." if 0 < index < self.blocks - 1 else self.family.prefix

    def load(self, index: int, read: WholeReader | None = None) -> nn.Module:
        if 0 < index < self.blocks - 1:
            layer = self.load_layer(index - 1, self.prefix(index), read)
            limit_layers(layer, self.vision, index - 1)
            return layer
        first, biases = index == 0, self.family.description.biases
        with torch.device("meta"):
            block = Patches(self.vision, biases) if first else Projector(self.vision, biases)
        contents = patch_contents(self.vision) if first else projector_contents(self.vision)
        names, read = [name for name, _ in self.family.end_parts(contents).values()], read or self._tensors.whole
        state = {name.removeprefix(self.family.prefix): torch.from_numpy(read(name)) for name in names}
        block.load_state_dict(state, strict=True, assign=True)
        return block.requires_grad_(False).eval()

    @torch.no_grad()
    def advance(self, index: int, layer: nn.Module) -> None:
        for place, batch in enumerate(self.batches(index)):
            self._states[place] = layer(batch.x, **batch.arguments)
        if index == self.blocks - 1 and not self.vision.class_row:
            together = self.vision.merge**2
            for place, (_, frame) in enumerate(self._pictures):
                tokens = torch.from_numpy(frame.order[::together] // together).long()
                self._states[place] = self._states[place][:, torch.argsort(tokens)]
        self.passed(index)

    def passed(self, index: int) -> None:
        if index - 1 in self.vision.tap_layers:
            for tapped, x in zip(self._tapped, self._states, strict=True):
                tapped.append(x.clone())

    def few(self, count: int) -> TowerForward:
        found, step = copy(self), -(-len(self._states) // count)
        found._pictures, found._tapped = self._pictures[::step], [list(tapped) for tapped in self._tapped[::step]]
        found._states = [x.clone() for x in self._states[::step]]
        return found


def _seen(span: Tensor) -> Tensor | None:
    """Mask bool [1, 1, patches, patches] of what patches see from span[0] to span[1]; None: every patch sees all."""
    begins, ends = span[:, :, None]
    slots = torch.arange(len(begins))
    mask = (slots >= begins) & (slots < ends)
    return None if bool(mask.all()) else mask[None, None]
