"""Devices that emulate a GPU, and what the tests need for it."""

from __future__ import annotations

import pytest

from edgeq.targets.cuda import build
from tests.cuda import emulated
from tests.cuda.emulated import EmulatedDevice


@pytest.fixture
def needs_emulator() -> None:
    if reason := emulated.refusal():
        pytest.skip(reason)


@pytest.fixture
def needs_generator() -> None:
    if reason := build.refusal():
        pytest.skip(reason)


@pytest.fixture
def device(needs_emulator: None, needs_generator: None) -> EmulatedDevice:
    return EmulatedDevice()
