"""Runs calibration pictures through a vision tower, one block at a time: patches, layers, projector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor, nn

from edgeq.config import VisionConfig
from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.forward import Batch, Forward, WholeReader
from edgeq.converters.calibration.samples import PictureFile
from edgeq.converters.calibration.torch_decoder import angles_at
from edgeq.converters.calibration.torch_tower import Patches, Projector
from edgeq.converters.families import Family
from edgeq.converters.slabs import Tensors
from edgeq.frames import FRAME, WINDOW, Frame
from edgeq.manifest import patch_contents, projector_contents


class TowerForward(Forward):
    """A batch is a picture, its patches in the order of a run (edgeq/frames.py); block 0 are the patches, the last one is the
    projector, whose outputs are the features in the order of the picture.
    """

    def __init__(self, family: Family, config: VisionConfig, pictures: Sequence[PictureFile], tensors: Tensors) -> None:
        """CheckpointError: a picture is no longer what it was."""
        super().__init__(family, config, tensors, Compute())
        self.vision = config
        self._frames = [Frame.of(picture.grid, config) for picture in pictures]
        self._states = [
            torch.from_numpy(picture.read().patches[frame.order])[None]
            for picture, frame in zip(pictures, self._frames, strict=True)
        ]

    @property
    def states(self) -> Sequence[Tensor]:
        return self._states

    @property
    def blocks(self) -> int:
        return self.vision.num_hidden_layers + 2

    def batches(self, index: int) -> Iterator[Batch]:
        config = self.vision
        for place, frame in enumerate(self._frames):
            x, arguments = self._states[place], {}
            if 0 < index < self.blocks - 1:
                span = frame.spans[WINDOW if index - 1 in config.window_layers else FRAME]
                places = torch.from_numpy(frame.places).long()
                arguments = {
                    "position_embeddings": angles_at(config.rope, config.head_dim, places),
                    "attention_mask": _seen(torch.from_numpy(span).long()),
                }
            yield Batch(x, arguments)

    def prefix(self, index: int) -> str:
        return f"{self.family.prefix}layers.{index - 1}." if 0 < index < self.blocks - 1 else self.family.prefix

    def load(self, index: int, read: WholeReader | None = None) -> nn.Module:
        if 0 < index < self.blocks - 1:
            return self.load_layer(index - 1, self.prefix(index), read)
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
        if index == self.blocks - 1:
            together = self.vision.merge**2
            for place, frame in enumerate(self._frames):
                tokens = torch.from_numpy(frame.order[::together] // together).long()
                self._states[place] = self._states[place][:, torch.argsort(tokens)]

    def few(self, count: int) -> TowerForward:
        found, step = copy(self), -(-len(self._states) // count)
        found._frames = self._frames[::step]
        found._states = [x.clone() for x in self._states[::step]]
        return found


def _seen(span: Tensor) -> Tensor | None:
    """Mask bool [1, 1, patches, patches] of what patches see from span[0] to span[1]; None: every patch sees all."""
    begins, ends = span[:, :, None]
    slots = torch.arange(len(begins))
    mask = (slots >= begins) & (slots < ends)
    return None if bool(mask.all()) else mask[None, None]
