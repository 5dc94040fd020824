"""Devices that emulate a GPU, and what the tests need for it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from edgeq.errors import EdgeqError
from edgeq.targets.cuda.supply import build
from tests.cuda import emulated, real, sanitized
from tests.cuda.asked import Asked
from tests.cuda.first_run import carried
from tests.runtime.conftest import model_path

__all__ = ["model_path"]

ASKED = pytest.StashKey[Asked]()
HERE = Path(__file__).parent
WITHOUT_GPU = {"device", "supply"}
"""The rooms whose tests are no tests of kernels."""


def without_gpu(path: Path) -> bool:
    """True for a room without tests of kernels and for what lies in it."""
    return HERE in path.parents and path.relative_to(HERE).parts[0] in WITHOUT_GPU


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the kernels of a pack on this machine's GPU")
    parser.addoption("--pack", type=Path, default=carried.PACK, help="of --gpu; `make kernels` makes it")
    parser.addoption("--record-kernels", action="store_true", help="list the kernels that the tests ask for (asked.py)")


def pytest_configure(config: pytest.Config) -> None:
    # Before the tests import the device that they run on.
    if config.getoption("--gpu", default=False):
        try:
            real.take_the_place(emulated, build, config.getoption("--pack"))
        except EdgeqError as error:
            raise pytest.UsageError(str(error)) from None
    recording = config.getoption("--record-kernels", default=False)
    if recording and config.getoption("numprocesses", default=None) and config.getoption("dist") != "loadfile":
        raise pytest.UsageError("--record-kernels needs all tests of a file in one process: add --dist loadfile or drop -n")
    config.stash[ASKED] = asked = Asked(recording)
    emulated.EmulatedDevice.on_load = asked.ask


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """All of a test, with the fixtures that it shares with others."""
    item.config.stash[ASKED].tests = None if without_gpu(item.path) else item.path
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    # Before `-m` is applied.
    for item in items:
        if sanitized.chosen(item.nodeid):
            item.add_marker("sanitize")
    config.stash[ASKED].partly |= {Path(arg.partition("::")[0]).stem for arg in config.args if "::" in arg}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped:
        # What it asks for elsewhere stays in the list.
        item.config.stash[ASKED].partly.add(item.path.stem)
    return report


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash[ASKED].partly.add(item.path.stem)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK:
        session.config.stash[ASKED].write()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--gpu", default=False) and without_gpu(collection_path) else None


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
