"""What threads of this machine can do, measured."""

import json
import os

import numpy as np
import pytest

from edgeq.converters.budget.part_names import HEAD
from edgeq.format.codec import Codec
from edgeq.runtime import Model
from edgeq.system import machine, measurements
from edgeq.system.measurements import READ_BANDWIDTH
from edgeq.targets.cpu import probes, program
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.kernels.args import ProductArgs
from edgeq.tools.measure.random_file import write_random
from tests.tools.test_decode_speed import DENSE

ISA = choose()[0]


def test_bandwidth_is_measured_once_per_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # What else runs on the machine of the tests decides nothing here.
    monkeypatch.setattr(probes, "ALONE", 0.0)
    assert measurements.known(READ_BANDWIDTH, 1) is None
    first = probes.read_bandwidth(1)
    assert first > 0 and probes.read_bandwidth(1) == first == measurements.known(READ_BANDWIDTH, 1)
    assert probes.integer_peak(ISA, 1) > 0
    assert 1 <= probes.decode_threads(ISA) <= machine.cpu().cores
    kept = json.loads((tmp_path / "edgeq" / "machine.json").read_text())
    assert first in kept.values() and all(machine.cpu().name in key for key in kept)


@pytest.mark.skipif(not ISA.matrix_unit, reason="this processor has no matrix unit, or its system keeps it")
def test_a_matrix_unit_multiplies_several_times_what_dot_products_do():
    # The fastest of many moments: what else runs must not decide.
    assert max(probes._tile_rates(1, 200, 0.2)[0]) > 2 * max(probes._product_rates(ISA, False, 1, 500, 0.2)[0])


def test_the_best_number_of_threads_is_kept_only_if_nothing_else_ran_meanwhile(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (machine, measurements, probes):
        monkeypatch.setattr(module, "cpu", lambda: machine.Cpu("some", "x86_64", frozenset(), 8))
    monkeypatch.setattr(machine, "big_cores", lambda: [])
    begun, answers = [], iter([(1, False), (6, True)])
    monkeypatch.setattr(probes, "best_decode_threads", lambda isa, most: next(answers))
    assert [probes.decode_threads(ISA, on_measure=lambda: begun.append(1)) for _ in range(3)] == [1, 6, 6] and len(begun) == 2


def test_rates_of_a_busy_moment_are_not_kept_and_the_largest_of_the_others_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe = iter([([2.0, 2, 2], 0.5), ([4.0, 4, 4], 0.95), ([3.0, 3, 3], 1.0), ([8.0, 8, 8], 0.89), ([5.0, 5, 5], 0.9)])
    monkeypatch.setattr(probes, "_rates_and_share", lambda *_: next(probe))
    kept = []
    for refresh in (False, False, True, True, True):
        kept.append((probes.read_bandwidth(1, refresh), measurements.known(READ_BANDWIDTH, 1)))
    assert kept == [(2, None), (4, 4), (3, 4), (8, 4), (5, 5)] and probes.read_bandwidth(1) == 5
    probe = iter([([2.0, 2, 2], 0.5), ([3.0, 3, 3], 1.0)])
    assert [probes.integer_peak(ISA, 1) for _ in range(3)] == [2, 3, 3]


def test_a_gain_that_was_measured_on_a_busy_machine_chooses_no_kernel_for_the_next_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    share = 0.5
    monkeypatch.setattr(probes, "_product_rates", lambda isa, pairs, *_: ([3.0, 4.0] if pairs else [5.0, 2.0], share))
    assert probes.winograd_gain() == 1.6 and measurements.known("winograd_gain", 1) is None
    # One probe of each kind that was alone is enough: the best counts.
    shares = iter([0.2, 0.3, 1.0, 0.5, 0.1, 0.95] + [0.4] * 4)
    monkeypatch.setattr(probes, "_product_rates", lambda isa, pairs, *_: ([4.0] if pairs else [5.0], next(shares)))
    assert probes.winograd_gain() == 1.6 == measurements.known("winograd_gain", 1)


def test_more_threads_than_cores_store_no_bandwidth(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cores, asked = machine.cpu().cores, []
    monkeypatch.setattr(probes, "_read_bandwidth", lambda threads, size: asked.append(threads) or (7.0, True))
    assert probes.read_bandwidth(cores + 1) == probes.read_bandwidth(64 * cores) == probes.read_bandwidth(cores) == 7
    assert asked == [cores] and measurements.known(READ_BANDWIDTH, cores + 1) is None
    (key,) = json.loads((tmp_path / "edgeq" / "machine.json").read_text())
    assert f" {cores} of {cores} cores" in key


def test_threads_that_share_a_core_are_not_alone():
    threads = 4 * (os.cpu_count() or 1)
    table, kept = probes._decode_table(ISA, threads, probes.DECODE_CODEC)
    table[0, -1] = 4 * threads
    assert 0 < probes._rates_and_share(table, threads, 1.0, 0.05)[1] < probes.ALONE and kept


def test_the_array_that_is_read_exceeds_the_cache_or_is_said_to_be_within_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probes, "last_level_cache", lambda: 480 << 20)
    monkeypatch.setattr(probes, "available_bytes", lambda: 16 << 30)
    assert probes.probe_bytes() == 960 << 20 and not probes.within_cache(probes.probe_bytes())
    monkeypatch.setattr(probes, "available_bytes", lambda: 1 << 30)
    assert probes.probe_bytes() == 256 << 20 and probes.within_cache(probes.probe_bytes())
    monkeypatch.setattr(probes, "_read_bandwidth", lambda threads, size: (float(size), True))
    assert probes.read_bandwidth(1) == 256 << 20 and measurements.known(READ_BANDWIDTH, 1) is None
    monkeypatch.setattr(probes, "last_level_cache", lambda: None)
    monkeypatch.setattr(probes, "available_bytes", lambda: 16 << 30)
    assert probes.read_bandwidth(1) == 256 << 20 == measurements.known(READ_BANDWIDTH, 1)


def test_weights_are_asked_for_at_the_distance_that_was_measured_to_be_fastest(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    isa = next(isa for isa in all_isas() if isa.name == "portable")
    isa.prefetch_distances = (4096, 64, 512)
    rates, share = {4096: 1.02, 64: 1.0, 512: 1.01}, 0.5

    def measured(table, threads, work, seconds):
        return [rates[int(table[0, ProductArgs.prefetch_bytes.slot])]] * 3, share

    monkeypatch.setattr(probes, "_rates_and_share", measured)
    begun = []
    # A difference that may be chance changes nothing, and what was measured on a busy machine is not kept.
    assert probes.prefetch_bytes(isa, 1, probes.DECODE_CODEC, on_measure=lambda: begun.append(1)) == 64
    rates[4096], share = 1.05, 1.0
    assert probes.prefetch_bytes(isa, 1, probes.DECODE_CODEC, on_measure=lambda: begun.append(1)) == 4096
    rates[512] = 2.0
    assert probes.prefetch_bytes(isa, 1, probes.DECODE_CODEC, on_measure=lambda: begun.append(1)) == 4096 and len(begun) == 2
    assert probes.prefetch_bytes(isa, 1, probes.DECODE_CODEC, refresh=True) == 512
    isa.prefetch_distances = ()
    assert probes.prefetch_bytes(isa, 1, probes.DECODE_CODEC) == 0


@pytest.mark.exhaustive
def test_every_codec_of_a_file_is_asked_for_at_its_own_distance(tmp_path, monkeypatch):
    write_random(tmp_path / "two.edgeq", DENSE, Codec("int", 6, 64, False), {HEAD: Codec("int", 8, 128)})
    monkeypatch.setattr(program, "MIN_THREAD_BYTES", 1)
    monkeypatch.setattr(program, "prefetch_bytes", lambda isa, threads, codec, on_measure: 64 * codec.bits)
    with Model.load(tmp_path / "two.edgeq", target="cpu") as model:
        records = [each for each in model.program._lowered("a8", "file").records if each.reads_weights]
        found = {(each.origin.linear.weights[0].codec.name, each.args.prefetch_bytes) for each in records}
    assert found == {("i6 g64 zero", 384), ("i8 g128", 512)}


@pytest.mark.parametrize("codec", [Codec("int", 3, 16, False), Codec("int", 5, 64, False), Codec("int", 8, 0)], ids=str)
def test_products_of_any_codec_are_probed_as_they_are_lowered(codec):
    table, kept = probes._decode_table(ISA, 1, codec)
    passes, _ = probes._rates_and_share(table, 1, 1.0, 0.0)
    y = kept[-3].view(np.float32)
    assert len(passes) == 3 and y.size == 64 << 10 and not y.any()
