"""What a vision tower has before and after its layers in torch: patches of pixels, and the projector.

Its layers are those of torch_decoder.py.
"""

from __future__ import annotations

from torch import Tensor, nn

from edgeq.config import VisionConfig
from edgeq.converters.calibration.torch_decoder import ACTIVATIONS, Norm


class Patches(nn.Module):
    """Pixels [1, patches, patch_width] -> [1, patches, hidden]."""

    def __init__(self, config: VisionConfig, biases: tuple[str, ...]) -> None:
        super().__init__()
        self.patch = nn.Linear(config.patch_width, config.hidden_size, bias="patch" in biases)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.patch(x)
        return found


class Projector(nn.Module):
    """Outputs of the layers [1, patches, hidden], those that are joined one after another -> features [1, tokens, width]."""

    def __init__(self, config: VisionConfig, biases: tuple[str, ...]) -> None:
        super().__init__()
        joined, inner = config.joined_size, config.project_size
        self._joined, self._norm_first = joined, config.project_norm == "patch"
        self.activation = ACTIVATIONS[config.project_act]
        self.norm = Norm(config, config.hidden_size if self._norm_first else joined, config.layer_norm)
        self.project = nn.ModuleList(
            [
                nn.Linear(joined, inner, bias="project.0" in biases),
                nn.Linear(inner, config.out_hidden_size, bias="project.1" in biases),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) if self._norm_first else x
        x = x.reshape(1, -1, self._joined)
        x = x if self._norm_first else self.norm(x)
        first, second = self.project
        found: Tensor = second(self.activation(first(x)))
        return found


def refusal(config: VisionConfig) -> str | None:
    """What a tower has that the modules here have not; None: nothing."""
    parts = {
        "learned positions": config.position_rows > 0,
        "a class row": config.class_row,
        "a norm before its first layer": config.pre_norm,
        "taps": bool(config.tap_layers),
        "a projector without a norm": config.project_norm == "none",
    }
    return next((part for part, there in parts.items() if there), None)
