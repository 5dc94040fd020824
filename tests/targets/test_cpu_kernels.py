"""The other operations of the cpu target against the reference, and the promises that a run makes."""

import numpy as np
import pytest

from edgeq.errors import ResourceError, UnsupportedError
from edgeq.format.codec import Codec, pack_floats
from edgeq.format.records import KvCodec, LinearSpec, Weight
from edgeq.system import machine
from edgeq.targets import load
from edgeq.targets.cpu import probes
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheSpec,
    CacheWrite,
    Embed,
    Graph,
    HeadNorm,
    Linear,
    RmsNorm,
    RopeRotate,
    Select,
)
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.target import Options
from tests.targets.cases import Arrays, rows_of


def identity(arrays, size):
    q = arrays.add(pack_floats(np.eye(size, dtype=np.float32), "f32"), "f32")
    return LinearSpec(f"identity{size}", (Weight(Codec("f32"), size, size, {"q": q}),))


def shown(arrays, x, operations, out, widths):
    """A graph that embeds x, runs `operations` and gives buffer `out` as its logits."""
    table = arrays.add(x.astype(np.float32), "f32")
    size = widths[out]
    last = (Select(-1, (out,)), Linear(-1, out, identity(arrays, size), "y"))
    buffers = {"x": x.shape[1], **widths, "y": size}
    return Graph(
        buffers, (Embed(-1, table, "x"), *operations, *last), "y", cache=(CacheSpec(2, widths["_dim"], widths["_dim"]),) * 2
    )


def both(graph, arrays, count, chunks=None, threads=2, kv="f16"):
    """The result on the reference in one run, and on the cpu in runs of `chunks` rows over one cache."""
    results = []
    for target, parts in (("reference", [count]), ("cpu", chunks or [count])):
        options = Options("a16", threads if target == "cpu" else 0, None, count, count, 0, KvCodec(kv))
        program = load(target).compile(graph, arrays, options)
        pages, first, seen = [program.new_page() for _ in range((count - 1) // PAGE + 1)], 0, []
        for part in parts:
            rows = rows_of(program, part, first, pages)
            seen.append(program.run(rows).copy())
            first += part
        results.append(np.concatenate(seen))
    return results


@pytest.mark.parametrize("width", [16, 48, 40, 256])
def test_rms_norm(width):
    rng, arrays = np.random.default_rng(width), Arrays()
    x = rng.standard_normal((5, width)) * 10
    gain = arrays.add(rng.standard_normal(width).astype(np.float32), "f32")
    oracle, y = both(shown(arrays, x, [RmsNorm(0, "x", gain, 1e-5, "n")], "n", {"n": width, "_dim": 2}), arrays, 5)
    assert np.abs(y - oracle).max() < 1e-5


def test_swiglu_over_the_whole_range_of_floats():
    x = np.concatenate([np.linspace(-120, 120, 1024), np.full(1024, 1.5)])[None].repeat(3, 0)
    x[1, :1024] /= 30
    arrays = Arrays()
    oracle, y = both(shown(arrays, x, [Activate(0, "x", 1024, "s")], "s", {"s": 1024, "_dim": 2}), arrays, 3)
    assert np.abs(y - oracle).max() <= 3e-7 * np.abs(oracle).max() and np.isfinite(y).all()
    small = np.abs(oracle) < 1
    assert np.abs(y - oracle)[small].max() < 3e-7


ATTENTION = [
    # heads, kv_heads, head_dim, window, positions
    (4, 2, 32, 0, 150),
    (2, 2, 64, 0, 64),
    (6, 2, 16, 70, 200),
    (8, 2, 80, 5, 130),
    (4, 2, 20, 0, 65),
    (2, 2, 128, 1, 20),
]


@pytest.mark.parametrize("heads, kv_heads, dim, window, positions", ATTENTION)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "head-norm"])
@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_attention_over_the_cache(heads, kv_heads, dim, window, positions, normed, kv):
    rng, arrays = np.random.default_rng(dim + window), Arrays()
    q, k = heads * dim, kv_heads * dim
    x = rng.standard_normal((positions, q + 2 * k)) * 2
    frequencies = tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2))
    gains = [arrays.add(rng.uniform(0.5, 2, dim).astype(np.float32), "f32") for _ in range(2)]
    operations = []
    if normed:
        operations += [HeadNorm(1, "x", 0, heads, dim, gains[0], 1e-6), HeadNorm(1, "x", q, kv_heads, dim, gains[1], 1e-6)]
    operations += [
        RopeRotate(1, "x", 0, heads, dim, frequencies),
        RopeRotate(1, "x", q, kv_heads, dim, frequencies),
        CacheWrite(1, "x", q, q + k, kv_heads, dim, cache=1),
        Attention(1, "x", 0, "a", heads, kv_heads, dim, dim**-0.5, window, cache=1),
    ]
    graph = shown(arrays, x, operations, "a", {"a": q, "_dim": dim})
    oracle, y = both(graph, arrays, positions, kv=kv)
    # keys and values are rounded from values that differ in their last f32 bit: now and then one rounds the other way
    step = 1e-3 if kv == "f16" else 0.1
    assert np.abs(y - oracle).max() < 2 * step and np.abs(y - oracle).mean() < 2e-3 * step
    rest = positions - 9
    _, pieces = both(graph, arrays, positions, [5, 1, 3] + ([rest - 1, 1] if rest > 1 else [rest]), kv=kv)
    assert np.array_equal(y, pieces), "chunks must not change a bit"


def test_sessions_in_one_run_give_the_bits_they_give_alone():
    rng, arrays = np.random.default_rng(9), Arrays()
    heads, dim, positions = 4, 32, 90
    x = rng.standard_normal((positions, 3 * heads * dim))
    frequencies = tuple(1000.0 ** (-2 * i / dim) for i in range(dim // 2))
    size = heads * dim
    operations = [
        RopeRotate(0, "x", 0, heads, dim, frequencies),
        RopeRotate(0, "x", size, heads, dim, frequencies),
        CacheWrite(0, "x", size, 2 * size, heads, dim, cache=0),
        Attention(0, "x", 0, "a", heads, heads, dim, dim**-0.5, 0, cache=0),
    ]
    arrays_of = shown(arrays, x, operations, "a", {"a": size, "_dim": dim})
    graph = Graph(arrays_of.buffers, arrays_of.operations, "y", (CacheSpec(heads, dim, dim),))
    program = load("cpu").compile(graph, arrays, Options("a16", 2, None, positions, positions))
    lengths = (70, 20)
    alone, pages = [], []
    for session, length in enumerate(lengths):
        rows = rows_of(program, length)
        rows.tokens = rows.tokens + np.int32(70 * session)
        alone.append(program.run(rows).copy())
    pages = [[program.new_page() for _ in range(2)] for _ in lengths]
    slots = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    order = rng.permutation(90)
    sessions = np.repeat(np.arange(2, dtype=np.int32), lengths)
    every = np.arange(90, dtype=np.int32)
    rows = Rows(every[order], slots[None, order], slots[order], sessions[order], pages, every)
    together = program.run(rows)
    assert np.array_equal(together[np.argsort(order)], np.concatenate(alone))


def test_more_rows_than_compiled_for_are_refused():
    arrays = Arrays()
    graph = shown(arrays, np.ones((4, 16)), [], "x", {"x": 16, "_dim": 2})
    program = load("cpu").compile(graph, arrays, Options("a16", 1, None, 2, 2))
    with pytest.raises(ValueError, match="compiled for 2"):
        program.run(rows_of(program, 3))


def test_tables_too_long_for_a_pool_that_cannot_grow_are_not_kept(monkeypatch):
    from edgeq.targets.cpu import program as module

    def refused(*_):
        raise ResourceError("no threads")

    arrays = Arrays()
    graph = shown(arrays, np.ones((4, 16)), [], "x", {"x": 16, "_dim": 2})
    program = load("cpu").compile(graph, arrays, Options("a16", 2, None, 4, 4))
    wanted = program.run(rows_of(program, 4)).copy()
    # As if the other mode needed more operations.
    program._pool.close()
    program._pool = module.ThreadPool(2, 1, module.RECORD_SLOTS)
    with monkeypatch.context() as patch:
        patch.setattr(program, "_new_pool", refused)
        program.record(True)
        for _ in range(2):
            with pytest.raises(ResourceError):
                program.run(rows_of(program, 4), "a8")
    assert np.array_equal(program.run(rows_of(program, 4), "a8"), wanted)
    assert [each.mode for each in program.recorded()] == ["a8"]


def test_unknown_instruction_set_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="'sse9' is not known; supported: avx512-amx, avx512-pairs, avx512-vnni"):
        choose("sse9")


def test_instruction_set_the_processor_lacks_is_refused_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("old", "x86_64", frozenset({"avx2", "fma", "f16c"}), 1))
    with pytest.raises(UnsupportedError, match="avx512-vnni needs .*avx512_vnni"):
        choose("avx512-vnni")
    isa, reason = choose()
    assert isa.name == "avx2" and "avx512_vnni" in reason and "pairs" not in reason and "amx" not in reason
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("other", "riscv64", frozenset(), 1))
    assert choose()[0].name == "portable" == all_isas()[-1].name


def test_vnni_of_avx_is_chosen_where_it_is_and_runs_where_avx512_has_it(monkeypatch):
    def on(*more):
        monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("some", "x86_64", frozenset({"avx2", "fma", "f16c", *more}), 1))

    on("avx_vnni")
    assert choose()[0].name == "avx-vnni"
    on("avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni")
    monkeypatch.setattr(probes, "winograd_gain", lambda on_measure: 1.0)
    assert choose()[0].name == "avx512-vnni"
    on("avx512_vnni", "avx512vl")
    assert choose("avx-vnni")[0].name == "avx-vnni"
    on("avx512_vnni")
    with pytest.raises(UnsupportedError, match="isa avx-vnni needs avx_vnni, which .* it can run avx2, portable"):
        choose("avx-vnni")


@pytest.mark.parametrize(("gain", "name"), [(1.2, "avx512-pairs"), (1.0, "avx512-vnni")])
def test_products_go_by_pairs_of_channels_where_that_was_measured_to_be_faster(gain, name, monkeypatch):
    features = frozenset.union(*(isa.needs for isa in all_isas() if "x86_64" in isa.machines and not isa.matrix_unit))
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("some", "x86_64", features, 1))
    monkeypatch.setattr(probes, "winograd_gain", lambda on_measure: gain)
    assert choose()[0].name == name
    amx = all_isas()[0].needs
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("some", "x86_64", features | amx, 1))
    assert choose()[0].name == "avx512-amx"
