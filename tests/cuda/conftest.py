"""Devices that emulate a GPU, and what the tests need for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.targets.cuda import build
from tests.cuda import emulated, real
from tests.runtime.conftest import model_path

__all__ = ["model_path"]

WITHOUT_GPU = {
    "test_build.py",
    "test_driver.py",
    "test_emulator.py",
    "test_generated.py",
    "test_mutations.py",
    "test_pack.py",
    "test_pack_file.py",
}
"""What is no test of kernels."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the kernels of build/kernels on this machine's GPU")


def pytest_configure(config: pytest.Config) -> None:
    # Before the tests import the device that they run on.
    if config.getoption("--gpu", default=False):
        real.take_the_place(emulated, build)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--gpu", default=False) and collection_path.name in WITHOUT_GPU else None


@pytest.fixture
def needs_emulator() -> None:
    if reason := emulated.refusal():
        pytest.skip(reason)


@pytest.fixture
def needs_generator() -> None:
    if reason := build.refusal():
        pytest.skip(reason)


@pytest.fixture
def device(needs_emulator: None, needs_generator: None) -> emulated.EmulatedDevice:
    return emulated.EmulatedDevice()
