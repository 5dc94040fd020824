"""What is known of this machine: processor, memory, a container's share of both."""

import sys

import pytest

from edgeq import machine


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
