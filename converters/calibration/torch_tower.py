"""What a vision tower has before and after its layers in torch: patches of pixels with their positions, and the projector.

Its layers are those of torch_decoder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.converters.calibration.torch_decoder import ACTIVATIONS, Norm
from edgeq.converters.calibration.torch_states import Gain
from edgeq.converters.families import LINEARS
from edgeq.network.config import VisionConfig
from edgeq.pictures.frames import Grid, table_positions


def limit_layers(layer: nn.Module, config: VisionConfig, index: int) -> None:
    """Make the linear layers of layer `index` keep to their bounds, so that whoever observes one sees what its weights read."""
    for part, clip in config.clips_of(index).items():
        module = layer.get_submodule(LINEARS[part])
        if clip.inputs is not None:
            module.register_forward_pre_hook(partial(_limited_inputs, clip.inputs))
        if clip.outputs is not None:
            module.register_forward_hook(partial(_limited_outputs, clip.outputs))


def _limited_inputs(bounds: tuple[float, float], module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].clamp(*bounds),)


def _limited_outputs(bounds: tuple[float, float], module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output.clamp(*bounds)


class Table(nn.Module):
    """A learned table [rows, channels]."""

    def __init__(self, rows: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, channels))


class Patches(nn.Module):
    """Pixels [1, patches, patch_width] -> [1, patches, hidden], those of a class row before them being zeros."""

    def __init__(self, config: VisionConfig, biases: tuple[str, ...]) -> None:
        super().__init__()
        self._config = config
        self.patch = nn.Linear(config.patch_width, config.hidden_size, bias="patch" in biases)
        self.positions = Table(config.position_rows, config.hidden_size) if config.position_rows else None
        self.pre_norm = Norm(config, config.hidden_size, config.layer_norm) if config.pre_norm else None

    def forward(self, x: Tensor, grid: Grid, order: NDArray[np.int32]) -> Tensor:
        """grid, order   of the picture (edgeq.pictures.frames.Frame)"""
        found: Tensor = self.patch(x)
        if self.positions is not None:
            table: Tensor = self.positions.weight
            if self._config.placed_by_grid:
                table = torch.from_numpy(table_positions(table.numpy(), grid, self._config)[order])
            found = found + table
        return found if self.pre_norm is None else self.pre_norm(found)


class Projection(nn.Module):
    """project.1(act(project.0(x))), or project.1(x), normed before or after those that are joined lie side by side: of the last
    layer, or of a tap."""

    def __init__(self, config: VisionConfig, biases: tuple[str, ...], norm: str) -> None:
        super().__init__()
        joined, inner = config.joined_size, config.project_size
        self._joined, self._norm_first = joined, norm == "patch"
        self.activation = ACTIVATIONS[config.project_act] if inner else None
        size = config.hidden_size if self._norm_first else joined
        self.mean_scale, self.mean_shift = (Gain(config.token_size) if config.mean_scaled else None for _ in range(2))
        self.mean_norm = Norm(config, config.token_size) if config.averaged else None
        eps = config.project_eps
        if eps and self._norm_first:
            self.joined_norm: Norm | None = Norm(config, joined, True, eps)
            eps = 0.0
        else:
            self.joined_norm = None
        self.norm = None if norm == "none" else Norm(config, size, config.layer_norm or eps > 0, eps)
        joined = config.token_size
        first = {"0": nn.Linear(joined, inner, bias="project.0" in biases)} if inner else {}
        last = nn.Linear(inner or joined, config.out_hidden_size, bias="project.1" in biases)
        self.project = nn.ModuleDict({**first, "1": last})

    def projected(self, x: Tensor) -> Tensor:
        """[1, patches, hidden] -> [1, tokens, width]."""
        if self._norm_first and self.norm is not None:
            x = self.norm(x)
        x = x.reshape(1, -1, self._joined)
        if self.mean_norm is not None:
            x = x.unflatten(-1, (-1, self.mean_norm.weight.shape[0])).mean(-2)
            if self.mean_scale is not None and self.mean_shift is not None:
                x = x * self.mean_scale.weight + self.mean_shift.weight
            x = self.mean_norm(x)
        last = self.joined_norm if self._norm_first else self.norm
        if last is not None:
            x = last(x)
        if self.activation is not None:
            x = self.activation(self.project["0"](x))
        found: Tensor = self.project["1"](x)
        return found


class Tap(Projection):
    def forward(self, x: Tensor) -> Tensor:
        return self.projected(x)


class Projector(Projection):
    """Outputs of the last layer and of those that are tapped, [1, patches, hidden] each, patches that are joined one after
    another -> features [1, tokens, width], those of the taps beside the first."""

    def __init__(self, config: VisionConfig, biases: tuple[str, ...]) -> None:
        super().__init__(config, biases, config.project_norm)
        self._dropped = int(config.class_row and not config.class_feature)
        self.taps = nn.ModuleList([Tap(config, biases, "joined") for _ in config.tap_layers])

    def forward(self, x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        parts = [self.projected(x[:, self._dropped :]), *(tap(y) for tap, y in zip(self.taps, tapped, strict=True))]
        return torch.cat(parts, -1)
