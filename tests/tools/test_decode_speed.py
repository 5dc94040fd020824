"""The measured decode of this machine, and what is predicted from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeq.converters.budget.part_names import part_of
from edgeq.converters.probing.decode_times import MEASURED, SMALL_GROUPS, SMALL_RINGS, TRELLISES, WIDTHS, DecodeTimes
from edgeq.errors import ResourceError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope
from edgeq.runtime import Model
from edgeq.system.devices import GIB, DeviceSpec
from edgeq.tools.commands import bench
from edgeq.tools.commands.convert import decoded
from edgeq.tools.measure import decode_speed, random_file
from edgeq.tools.measure.random_file import bytes_per_token, with_layers, write_random

CODEC = Codec("int", 4, 64, symmetric=False)
DENSE = ModelConfig(
    model_type="random",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope=Rope(10000.0),
    max_position_embeddings=256,
    tie_word_embeddings=False,
    sliding_windows=(0, 16, 0),
    layers_without_rope=(1, 2),
)
SPARSE = replace(DENSE, num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=32, tie_word_embeddings=True)


TIMES = DecodeTimes(
    {
        codec: (bytes_per_token(DENSE, codec), 1.0 + codec.bits + (0.5 if codec in (SMALL_GROUPS, SMALL_RINGS) else 0.0))
        for codec in MEASURED
    }
)
"""A second that is not read, a second for each bit; half a second for groups of 16."""


def sizes(*names: str) -> list[Callable[[Codec], float]]:
    """Bytes of layers of the files of DENSE, by codec."""

    def of(name: str) -> Callable[[Codec], float]:
        return lambda codec: {name: codec.nbytes(*shape) for name, shape, codec in random_file._linears(DENSE, codec)}[name]

    return [of(name) for name in names]


def test_parts_add_up_to_a_token_and_each_takes_the_time_of_its_width() -> None:
    names = [name for name, _, _ in random_file._linears(DENSE, CODEC) if name != "embedding"]
    for codec in MEASURED:
        assert sum(TIMES.seconds(codec, part) for part in sizes(*names)) == pytest.approx(TIMES.whole[codec][1])
    # 6 bits that take longer than 8: a part in them takes longer, whatever its bytes.
    slow = replace(TIMES, whole=TIMES.whole | {MEASURED[4]: (TIMES.whole[MEASURED[4]][0], 20.0)})
    (part,) = sizes("layers.0.down")
    assert slow.seconds(MEASURED[4], part) > slow.seconds(MEASURED[6], part)
    # Groups of 128 take less than those of 64, and small ones that were measured to be faster no less than nothing.
    coarse = replace(CODEC, group_size=128)
    assert TIMES.seconds(coarse, part) < TIMES.seconds(CODEC, part)
    fast = replace(TIMES, whole=TIMES.whole | {SMALL_GROUPS: (TIMES.whole[SMALL_GROUPS][0], 1.0)})
    assert fast.seconds(coarse, part) == fast.seconds(CODEC, part)
    # A trellis has a time of its own, and so have its small groups, however few bytes their scales are.
    rings = Codec("trellis", 3, 64)
    slow = replace(TIMES, whole=TIMES.whole | {rings: (TIMES.whole[rings][0], 20.0)})
    assert slow.seconds(rings, part) > slow.seconds(WIDTHS[-1], part) and rings in TRELLISES
    steps = [TIMES.seconds(replace(codec, group_size=16), part) - TIMES.seconds(codec, part) for codec in (rings, CODEC)]
    assert steps == [pytest.approx(steps[1], rel=0.1)] * 2 and steps[0] > 0


def test_a_file_that_was_decoded_is_expected_to_be_as_fast() -> None:
    board = DeviceSpec("board", "avx2", 2, GIB, 1e9, 1e9, (200, 4.0))
    assert (board.decode_seconds(200), board.decode_seconds(200, 95e7)) == (4.0, pytest.approx(5.0))
    assert board.decode_range(200, 0.0) == (pytest.approx(0.9 / 4), pytest.approx(1.1 / 4))
    assert replace(board, decoded=None).decode_seconds(95e7) == 1.0


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_a_random_file_is_one_of_its_shape(tmp_path: Path, config: ModelConfig) -> None:
    path = tmp_path / "random.edgeq"
    shorter = with_layers(config, 2)
    write_random(path, shorter, CODEC)
    metadata = ModelFile.open(path).metadata
    assert metadata.config == shorter and shorter.layers_without_rope == (1,) and shorter.sliding_windows == (0, 16)
    sizes, arrays = metadata.bytes_per_token(), sum(array.nbytes for array in metadata.arrays.values())
    assert sizes["weights"] + sizes["head"] - arrays == pytest.approx(bytes_per_token(shorter, CODEC), abs=1)
    assert random_file.file_bytes(shorter, CODEC) == sum(linear.nbytes for linear in metadata.linears.values())


def test_decode_of_the_shape_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(decode_speed, "ALONE", 0.0)
    monkeypatch.setattr(decode_speed, "SECONDS", 0.0)
    monkeypatch.setattr(decode_speed, "MEASURED", (CODEC,))
    run = decode_speed.run

    def timed(*arguments: Any) -> Iterator[float]:
        """Tokens that are decoded here, whatever the machine takes for them, in two milliseconds each."""
        for _ in run(*arguments):
            yield 2e-3

    monkeypatch.setattr(decode_speed, "run", timed)
    found = decode_speed.times_here(DENSE, "a8").whole
    read, seconds = found[CODEC]
    assert read == bytes_per_token(DENSE, CODEC) and seconds == pytest.approx(2e-3)
    monkeypatch.setattr(decode_speed, "write_random", None)
    assert decode_speed.times_here(DENSE, "a8").whole == found


def test_every_codec_is_measured_in_turn_and_the_median_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Codec]()

    def seconds(config: ModelConfig, codec: Codec, mode: str) -> tuple[float, bool]:
        asked.append(codec)
        disturbed = codec.bits == 5 and asked.count(codec) == 1
        return (9.0, False) if disturbed else (float(codec.bits), True)

    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(decode_speed, "_seconds", seconds)
    found = decode_speed.times_here(DENSE, "a8").whole
    assert asked == [*MEASURED] * decode_speed.ROUNDS
    assert [taken for _, taken in found.values()] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 4.0, 1.0, 2.0, 3.0, 2.0]
    # Each time is kept as it is found, but for those that were disturbed.
    asked.clear()
    decode_speed.times_here(DENSE, "a8")
    assert [codec.bits for codec in asked] == [5]


def test_a_killed_measurement_goes_on_with_the_time_after_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Codec]()

    def seconds(config: ModelConfig, codec: Codec, mode: str) -> tuple[float, bool]:
        asked.append(codec)
        if len(asked) == 11:
            raise KeyboardInterrupt
        return float(codec.bits), True

    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(decode_speed, "_seconds", seconds)
    with pytest.raises(KeyboardInterrupt):
        decode_speed.times_here(DENSE, "a8")
    decode_speed.times_here(DENSE, "a8")
    assert len(asked) == 11 + decode_speed.ROUNDS * len(MEASURED) - 10


def test_parts_of_experts_add_up_to_a_token_with_its_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(decode_speed, "_seconds", lambda config, codec, mode: (float(codec.bits), True))
    here = decode_speed.times_here(SPARSE, "a8")
    parts = [(name, shape) for name, shape, stored in random_file._linears(SPARSE, CODEC) if stored.kind == "int"]

    def seconds(codec: Codec, name: str, shape: tuple[int, int]) -> float:
        share = SPARSE.num_experts_per_tok / SPARSE.num_experts if ".experts." in name else 1.0
        return here.seconds(codec, lambda other: share * other.nbytes(*shape))

    for codec in MEASURED:
        assert sum(seconds(codec, *part) for part in parts) == pytest.approx(codec.bits, rel=1e-4)


@pytest.mark.parametrize("other", [Codec("int", 3, 32, symmetric=False), Codec("table", 4, 32)], ids=lambda codec: codec.name)
@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_parts_of_a_random_file_have_codecs_of_their_own(tmp_path: Path, config: ModelConfig, other: Codec) -> None:
    path = tmp_path / "random.edgeq"
    part = "layers.1.experts.down" if config.num_experts else "layers.1.down"
    write_random(path, config, CODEC, {part: other, "head": Codec("int", 8, 64, symmetric=False), "embedding": other})
    stored = {name: linear.weights[0].codec for name, linear in ModelFile.open(path).metadata.linears.items()}
    assert {part_of(name) for name, codec in stored.items() if codec == other} == {part}
    assert stored["head"].bits == 8 and stored["layers.0.qkv"] == CODEC


def test_a_token_is_timed_as_bench_times_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, share, texts = tmp_path / "random.edgeq", [1.0], list[bench.Test]()
    write_random(path, with_layers(DENSE, 3), CODEC)

    def run(model: Model, test: bench.Test, count: int) -> Iterator[float]:
        """Tokens of a millisecond, of all of which `share` is the processor's."""
        texts.append(test)
        for _ in range(count):
            clock[0] += 1e-3
            yield 1e-3

    clock = [0.0]
    monkeypatch.setattr(decode_speed.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(decode_speed.time, "process_time", lambda: share[0] * clock[0] * model.program.threads)
    monkeypatch.setattr(decode_speed, "run", run)
    with Model.load(path, context=128) as model:
        assert decode_speed.decoded(model, 0.3) == (pytest.approx(1e-3), True)
        # A warm-up, then whole texts until the time is over; of a text that takes longer its beginning.
        assert texts == 4 * [bench.Test("tg", 128, 0)]
        began = clock[0]
        assert decode_speed.decoded(model, 0.05) == (pytest.approx(1e-3), True)
        assert clock[0] - began == pytest.approx(0.004 + 0.051, abs=0.002)
        share[0] = 0.6
        assert decode_speed.decoded(model, 0.05) == (pytest.approx(0.6e-3), False)


def test_what_else_runs_does_not_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations are timed beside the first one, in turns that nothing disturbed, and short models stand for deep ones."""
    slower, calm, turns = [1.0], [True], [0]

    def found(models: dict[str, object], *_: object) -> dict[str, list[tuple[float, bool]]]:
        turns[0] += 1
        # Every other turn is disturbed, and far off.
        alone = calm[0] and turns[0] % 2 == 0
        this = 0.1 if models["first"] is models["this"] else 0.08
        return {"first": [(0.1 * slower[0], alone)], "this": [(this * slower[0] if alone else 9.0, alone)]}

    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(decode_speed, "times_here", lambda config, mode: TIMES)
    monkeypatch.setattr(decode_speed, "in_turn", found)
    parts = [part_of(name) for name, _, _ in random_file._linears(DENSE, CODEC)]
    mixtures = [dict.fromkeys(parts, codec) for codec in (MEASURED[2], MEASURED[4])]
    with decode_speed.AllocationsHere(DENSE, "a8", False) as here:
        # With the whole model in 4 bits TIMES has 5 seconds for it, with 6 bits 7.
        assert here.ratio(mixtures[0]) == pytest.approx(0.1 / 5, rel=1e-3) and here.alone
        assert turns[0] == 2 * decode_speed.TURNS
        # 0.8 of the first one, both as fast as in the median moment.
        slower[0] = 1.5
        assert here.ratio(mixtures[1]) == pytest.approx(0.8 * (0.1 + 0.15) / 2 / 7, rel=1e-3)
        asked = turns[0]
        here.ratio(mixtures[1])
        assert turns[0] == asked
        calm[0] = False
        here.ratio(dict.fromkeys(parts, MEASURED[0]))
        assert not here.alone and turns[0] == asked + decode_speed.MAX_TURNS
    # Of a model of 40 layers of which 8 are decoded, the predicted seconds of those 8 count.
    deep = with_layers(replace(DENSE, sliding_windows=(), layers_without_rope=()), 40)
    room = random_file.file_bytes(with_layers(deep, 8), WIDTHS[-1])
    monkeypatch.setattr("edgeq.system.machine.available_bytes", lambda: decode_speed.MEMORY_SHARE * room)
    whole = {codec: (bytes_per_token(deep, codec, floats=False), 10.0) for codec in MEASURED}
    monkeypatch.setattr(decode_speed, "times_here", lambda config, mode: DecodeTimes(whole))
    calm[0], slower[0] = True, 1.0
    with decode_speed.AllocationsHere(deep, "a8", False) as here:
        codecs = {part_of(name): CODEC for name, _, _ in random_file._linears(deep, CODEC)}
        share = bytes_per_token(with_layers(deep, 8), CODEC) / bytes_per_token(deep, CODEC)
        assert here.ratio(codecs) == pytest.approx(0.1 / (10 * share), rel=1e-3)


def test_a_model_too_large_to_write_is_measured_in_two_depths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def seconds(config: ModelConfig, codec: Codec, mode: str) -> tuple[float, bool]:
        asked.append(config.num_hidden_layers)
        return 1.0 + 0.25 * config.num_hidden_layers + codec.bits, False

    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(decode_speed, "_seconds", seconds)
    deep, largest = with_layers(replace(DENSE, sliding_windows=(), layers_without_rope=()), 40), WIDTHS[-1]
    room = random_file.file_bytes(with_layers(deep, 8), largest)
    monkeypatch.setattr("edgeq.system.machine.available_bytes", lambda: decode_speed.MEMORY_SHARE * room)
    found = decode_speed.times_here(deep, "a8").whole
    assert set(asked) == {4, 8} and [*found] == [*MEASURED]
    for codec, point in found.items():
        assert point == (bytes_per_token(deep, codec), pytest.approx(1 + 0.25 * 40 + codec.bits))
    monkeypatch.setattr("edgeq.system.machine.available_bytes", lambda: 1000)
    with pytest.raises(ResourceError, match=r"measuring 2 layers of this model .* give the bytes of a token with --read"):
        decode_speed.times_here(deep, "a8")
    # What bounds it is said, and one layer is enough for a model that has no more.
    monkeypatch.setattr("edgeq.system.machine.available_bytes", lambda: 1 << 50)
    monkeypatch.setattr(decode_speed, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ResourceError, match=r"and 0\.0 GB are the most"):
        decode_speed.times_here(deep, "a8")
    monkeypatch.setattr(decode_speed, "MAX_FILE_BYTES", 4 << 30)
    asked.clear()
    decode_speed.times_here(replace(with_layers(DENSE, 1), sliding_windows=(16,)), "a8")
    assert set(asked) == {1}


def test_a_file_that_does_not_fit_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "random.edgeq"
    write_random(path, with_layers(DENSE, 2), CODEC)
    monkeypatch.setattr("edgeq.system.machine.available_bytes", lambda: 1000)
    monkeypatch.setattr(decode_speed, "seconds_per_token", None)
    assert decoded(ModelFile.open(path), 12.0) is None
