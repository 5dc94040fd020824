"""What is known of this machine: processor, memory, a container's share of both."""

import sys

import pytest

from edgeq.system import machine


def test_processor_and_memory_are_found():
    assert machine.cpu().cores >= 1 and machine.cpu().name
    memory = machine.memory()
    assert 0 < memory.available <= memory.total
    grown = bytearray(50 << 20)
    used = machine.process_memory()  # read once: other threads grow between two readings
    assert not used or used["VmHWM"] >= used["VmRSS"] > len(grown)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("max 100000", sys.maxsize), ("", sys.maxsize)],
)
def test_cores_of_a_container_are_those_that_it_may_keep_busy(limit, cores):
    assert machine.cores_of_share(limit) == cores


def test_the_temperature_is_that_of_the_hottest_zone(tmp_path):
    assert machine.temperature(tmp_path) is None
    for i, text in enumerate(("48000\n", "61500\n", "no\n", "-274000\n")):
        (tmp_path / f"thermal_zone{i}").mkdir()
        (tmp_path / f"thermal_zone{i}" / "temp").write_text(text)
    # A sensor that is off.
    (tmp_path / "thermal_zone4" / "temp").mkdir(parents=True)
    assert machine.temperature(tmp_path) == 61.5
