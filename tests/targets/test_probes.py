"""What threads of this machine can do, measured."""

import json
import os

from edgeq import machine, measurements
from edgeq.targets.cpu import probes
from edgeq.targets.cpu.choose_isa import choose

ISA = choose()[0]


def test_bandwidth_is_measured_once_per_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measurements.known("read_bandwidth", 1) is None
    first = probes.read_bandwidth(1)
    assert first > 0 and probes.read_bandwidth(1) == first == measurements.known("read_bandwidth", 1)
    assert probes.integer_peak(ISA, 1) > 0
    assert 1 <= probes.decode_threads(ISA) <= machine.cpu().cores
    kept = json.loads((tmp_path / "edgeq" / "machine.json").read_text())
    assert first in kept.values() and all(machine.cpu().name in key for key in kept)


def test_the_best_number_of_threads_is_kept_only_if_nothing_else_ran_meanwhile(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (machine, measurements, probes):
        monkeypatch.setattr(module, "cpu", lambda: machine.Cpu("some", "x86_64", frozenset(), 8))
    monkeypatch.setattr(machine, "big_cores", lambda: [])
    begun, answers = [], iter([(1, False), (6, True)])
    monkeypatch.setattr(probes, "best_decode_threads", lambda isa, most: next(answers))
    assert [probes.decode_threads(ISA, on_measure=lambda: begun.append(1)) for _ in range(3)] == [1, 6, 6] and len(begun) == 2


def test_threads_that_share_a_core_are_not_alone():
    threads = 4 * (os.cpu_count() or 1)
    table, kept = probes._decode_table(ISA, threads)
    table[0, -1] = 4 * threads
    assert 0 < probes._rates_and_share(table, threads, 1.0, 0.05)[1] < probes.ALONE and kept
