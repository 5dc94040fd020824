"""What a vision tower's projector reads and computes: which norms, means and layers go together."""

from __future__ import annotations

from typing import Protocol

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.json_records import check_positive
from edgeq.network.mlp import PLAIN

PROJECT_NORMS = ("patch", "joined", "none")
NO_ACTIVATION = "none"
"""The activation of a projector of one layer."""


class Projects(Protocol):
    """What is looked at of a VisionConfig."""

    @property
    def project_norm(self) -> str: ...

    @property
    def project_eps(self) -> float: ...

    @property
    def project_size(self) -> int: ...

    @property
    def project_act(self) -> str: ...

    @property
    def averaged(self) -> bool: ...

    @property
    def mean_scaled(self) -> bool: ...

    @property
    def class_row(self) -> bool: ...

    @property
    def tap_layers(self) -> tuple[int, ...]: ...


def check_projector(config: Projects) -> None:
    """FormatError, UnsupportedError: a setting that is not known, or that does not go with the others."""
    if config.project_norm not in PROJECT_NORMS:
        raise UnsupportedError(f"project_norm {config.project_norm!r} is not known; supported: {', '.join(PROJECT_NORMS)}")
    if config.project_size == 0 and (config.project_act != NO_ACTIVATION or config.tap_layers):
        raise UnsupportedError(
            f"a project_size of 0, which is a projector of one layer, is supported with project_act {NO_ACTIVATION!r}, "
            "without tap_layers"
        )
    if config.averaged and (config.project_norm == "joined" or config.tap_layers or config.class_row):
        raise UnsupportedError(
            "averaged is supported with a project_norm over every 'patch' or with none, without tap_layers and class_row"
        )
    if config.mean_scaled and not config.averaged:
        raise FormatError("config vision: mean_scaled without averaged: there is no mean")
    if config.project_eps != 0:
        check_positive("project_eps", config.project_eps)
        if config.project_norm == "none" or config.averaged or config.tap_layers:
            raise UnsupportedError("project_eps is supported with a project_norm, without averaged and tap_layers")
    if config.project_size and config.project_act not in PLAIN:
        raise UnsupportedError(f"project_act {config.project_act!r} is not supported; supported: {', '.join(PLAIN)}")
