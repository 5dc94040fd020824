"""Computed GPU speeds, from the prediction that `edgeq fit` makes; tests/cuda/supply/test_occupancy.py has the whole page."""

from __future__ import annotations

import pytest

from edgeq.system.devices import DEVICES
from edgeq.tools.lab.gpu_roofline import BARS, CODEC, MODELS, config_of, speed_up, speeds
from edgeq.tools.measure.random_file import bytes_per_token


def test_speeds_are_those_of_fit_and_fall_with_launches() -> None:
    device, config = DEVICES["rtx-4090"], config_of("llama-3.2-1b")
    least, most, (few, many) = speeds(device, config, 100)
    assert (least, most) == device.decode_range(bytes_per_token(config, CODEC), 0)
    assert many < few < 1 / device.decode_seconds(bytes_per_token(config, CODEC)) < most
    assert 1 / many - 1 / few == pytest.approx(400e-6)


def test_a_draft_that_costs_a_token_gains_nothing_and_a_free_one_at_most_its_length() -> None:
    for beta in (0.5, 0.99):
        assert speed_up(beta, 4, 1.0, 1.0) < 1 < speed_up(beta, 4, 0.0, 1.0) < 5
    assert speed_up(0.5, 1, 0.0, 1.0) == 1.5


def test_bars_are_of_devices_and_shapes_of_the_page() -> None:
    assert {bar.device for bar in BARS} <= set(DEVICES) and {bar.model for bar in BARS} <= set(MODELS)
    assert {bar.trust for bar in BARS} <= {"A", "B"}
