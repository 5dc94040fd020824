"""The measured decode of this machine, and what is predicted from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeq.codec import Codec
from edgeq.config import ModelConfig
from edgeq.container import ModelFile
from edgeq.converters.allocation.budget import Budget
from edgeq.devices import GIB, Device
from edgeq.errors import InputError, ResourceError
from edgeq.rope import Rope
from edgeq.tools import decode_speed, random_file
from edgeq.tools.budget import measured_here
from edgeq.tools.convert import decoded
from edgeq.tools.lab import decode_prediction
from edgeq.tools.random_file import bytes_per_token, with_layers, write_random

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


def test_between_measured_points_and_beyond_them_time_follows_straight_lines() -> None:
    board = Device("board", "avx2", 2, GIB, 1e9, 1e9, ((100, 2.0), (200, 3.0), (400, 7.0)))
    for weights, seconds in ((50, 1.5), (100, 2.0), (150, 2.5), (200, 3.0), (300, 5.0), (500, 9.0)):
        assert board.decode_seconds(weights) == pytest.approx(seconds)
        assert board.readable(seconds) == pytest.approx(weights)
    assert board.decode_seconds(200, 95e7) == pytest.approx(4.0)
    assert board.decode_range(300, 0.0) == (pytest.approx(0.9 / 5), pytest.approx(1.1 / 5))
    # What is not read takes a second here: nothing decodes twice as fast as that.
    assert board.readable(0.5) < 0 and Budget.of_speed(board, 2.0).amount == 1
    assert Budget.of_speed(board, 0.2).amount == pytest.approx(300)
    one = replace(board, decode_points=((200, 4.0),))
    assert one.decode_seconds(50) == 1.0 and one.readable(8.0) == 400
    assert replace(board, decode_points=()).decode_seconds(95e7) == 1.0


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
    monkeypatch.setattr("edgeq.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(decode_speed, "ALONE", 0.0)
    monkeypatch.setattr(decode_speed, "CODECS", (CODEC,))
    monkeypatch.setattr(decode_speed, "this_machine", lambda: Device("this-machine", "", 1, GIB, 1e9, 1e9))
    found = decode_speed.this_machine_for(DENSE, "a8").decode_points
    (point,) = found
    assert point[0] == bytes_per_token(DENSE, CODEC) and 0 < point[1] < 10
    monkeypatch.setattr(decode_speed, "write_random", None)
    assert decode_speed.this_machine_for(DENSE, "a8").decode_points == found


def test_a_model_too_large_to_write_is_measured_in_two_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def seconds(config: ModelConfig, codec: Codec, mode: str) -> float:
        asked.append(config.num_hidden_layers)
        return 1.0 + 0.25 * config.num_hidden_layers + codec.bits

    monkeypatch.setattr(decode_speed, "_seconds", seconds)
    monkeypatch.setattr(decode_speed, "this_machine", lambda: Device("this-machine", "", 1, GIB, 1e9, 1e9))
    deep, largest = with_layers(replace(DENSE, sliding_windows=(), layers_without_rope=()), 40), decode_speed.CODECS[-1]
    room = random_file.file_bytes(with_layers(deep, 8), largest)
    monkeypatch.setattr("edgeq.machine.available_bytes", lambda: decode_speed.MEMORY_SHARE * room)
    points = decode_speed.this_machine_for(deep, "a8").decode_points
    assert set(asked) == {4, 8} and len(points) == len(decode_speed.BITS)
    for (read, found), codec in zip(points, decode_speed.CODECS, strict=True):
        assert (read, found) == (bytes_per_token(deep, codec), pytest.approx(1 + 0.25 * 40 + codec.bits))
    monkeypatch.setattr("edgeq.machine.available_bytes", lambda: 1000)
    with pytest.raises(ResourceError, match=r"measuring 2 layers of this model .* give the bytes of a token with --read"):
        decode_speed.this_machine_for(deep, "a8")
    # What bounds it is said, and one layer is enough for a model that has no more.
    monkeypatch.setattr("edgeq.machine.available_bytes", lambda: 1 << 50)
    monkeypatch.setattr(decode_speed, "LARGEST", 1000)
    with pytest.raises(ResourceError, match=r"and 0\.0 GB are the most"):
        decode_speed.this_machine_for(deep, "a8")
    monkeypatch.setattr(decode_speed, "LARGEST", 4 << 30)
    asked.clear()
    decode_speed.this_machine_for(replace(with_layers(DENSE, 1), sliding_windows=(16,)), "a8")
    assert set(asked) == {1}


def test_a_speed_beyond_all_bytes_is_refused_as_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Device("this-machine", "", 1, GIB, 1e9, 1e9, ((100, 2.0), (200, 3.0)))
    monkeypatch.setattr(decode_speed, "this_machine_for", lambda config, mode: board)
    plan: Any = SimpleNamespace(method=SimpleNamespace(stored_config=DENSE, mode=None))
    with pytest.raises(
        InputError, match=r"--speed 5: this machine decodes .* at 0\.5 tokens per second in 2 bits.*ask for less"
    ):
        measured_here(plan, 5.0)


def test_a_file_that_does_not_fit_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "random.edgeq"
    write_random(path, with_layers(DENSE, 2), CODEC)
    monkeypatch.setattr("edgeq.machine.available_bytes", lambda: 1000)
    monkeypatch.setattr(decode_speed, "seconds_per_token", None)
    assert decoded(ModelFile.open(path), 12.0) is None


def test_a_disturbed_measurement_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {2: 1.0, 3: 2.0, 4: 1.5, 5: 3.0, 6: 4.0, 7: 4.0, 8: 5.0}
    monkeypatch.setattr(decode_speed, "_seconds", lambda config, codec, mode: times[codec.bits])
    monkeypatch.setattr(decode_speed, "this_machine", lambda: Device("this-machine", "", 1, GIB, 1e9, 1e9))
    found = decode_speed.this_machine_for(DENSE, "a8")
    assert [seconds for _, seconds in found.decode_points] == [1.0, 1.5, 3.0, 4.0, 5.0]
    # The first one does not take the others with it.
    times[2] = 4.5
    found = decode_speed.this_machine_for(DENSE, "a8")
    assert [seconds for _, seconds in found.decode_points] == [1.5, 3.0, 4.0, 5.0]


def test_the_laboratory_has_files_beside_their_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_prediction, "CODECS", (CODEC,))
    files = (tmp_path / "a.edgeq", tmp_path / "b.edgeq")
    for path in files:
        write_random(path, with_layers(DENSE, 3), CODEC)
    found = decode_prediction.measure(files, 1, 1)
    assert [row["file"] for row in found] == [*map(str, files)]
    assert all(row["bytes_per_token"] == decode_prediction.read_bytes(files[0]) for row in found)
    assert found[0]["predicted"] == found[1]["predicted"] > 0 and all(row["decoded"] > 0 for row in found)
    write_random(files[1], with_layers(DENSE, 2), CODEC)
    with pytest.raises(InputError, match="of several shapes or modes"):
        decode_prediction.measure(files, 1, 1)
