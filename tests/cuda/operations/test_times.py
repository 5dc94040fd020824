"""What is measured on a device: how fast its memory is read and copied, and the times of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import ResourceError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model
from edgeq.runtime.network.decoder import decoder
from edgeq.targets import TargetChoice
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.device import bandwidth, timed
from edgeq.targets.cuda.device.device import Call, Copy, Mark, Recording
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.cuda.supply import build
from edgeq.targets.target import Options
from edgeq.targets.times import StepTimes
from edgeq.tools.commands import bench
from edgeq.tools.measure import gpu
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.launching import launched
from tests.targets.cases import recording, rows_of

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]


def compiled(device: EmulatedDevice, model_path: Callable[..., Path], name: str = "llama_gqa", **options: bool) -> CudaProgram:
    file = ModelFile.open(model_path(name, {"initializer_range": 0.05}, method="rtn", bits=4, group_size=32))
    settings = Options("a16", max_rows=20, max_logits=20, **options)  # type: ignore[arg-type]
    return CudaTarget(device).compile(decoder(file.metadata, 192), file, settings)


def test_memory_is_read_to_its_last_word() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 3 * 2 * bandwidth.ROUND // 4, dtype=np.uint32)
    (kernel,) = build.kernels([bandwidth.KERNEL])
    out = launched(kernel, {"x": words, "out": np.zeros(2 * 128, np.uint32)}, {"ctas": 2, "rounds": 3})["out"]
    assert np.array_equal(out, np.bitwise_xor.reduce(words.reshape(-1, 2 * 128, 4), axis=(0, 2)))


def test_bandwidths_are_measured_once(
    device: EmulatedDevice, model_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(bandwidth, "MIN_BLOCK", 1 << 20)
    monkeypatch.setattr(bandwidth, "BLOCK", 1 << 20)
    program = compiled(device, model_path)
    assert program.facts().copy_bandwidth is None
    recorded, record = set[tuple[type, ...]](), device.record

    def noted(steps: Sequence[Call | Copy | Mark]) -> Recording:
        recorded.add(tuple(Mark if isinstance(step, Mark) else type(step) for step in steps))
        return record(steps)

    monkeypatch.setattr(device, "record", noted)
    reads = program.read_bandwidth()
    # What the host does between a mark and a launch is not in the time.
    assert recorded == {(Mark, Copy, Mark), (Mark, Call, Mark)}
    copies, count = program.facts().copy_bandwidth, device.launches["read_memory"]
    assert reads and copies and count
    assert program.read_bandwidth() == reads and device.launches["read_memory"] == count
    refreshed = program.read_bandwidth(refresh=True)
    assert refreshed and device.launches["read_memory"] > count


def test_of_a_full_device_nothing_is_measured(
    device: EmulatedDevice, model_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    program = compiled(device, model_path)

    def full(*_: object) -> None:
        raise ResourceError("no room")

    # Taken by another program after it was asked how much is free.
    for name in ("record", "allocate"):
        with monkeypatch.context() as patched:
            patched.setattr(device, name, full)
            assert program.read_bandwidth() is None and program.facts().copy_bandwidth is None
    monkeypatch.setattr(device, "memory", lambda: (1 << 32, bandwidth.MIN_BLOCK))
    assert program.read_bandwidth() is None and program.facts().copy_bandwidth is None


@pytest.mark.parametrize("graphs", [True, False])
def test_operations_of_a_token_are_timed_one_by_one(
    device: EmulatedDevice, model_path: Callable[..., Path], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed, "perf_counter", device.clock.__next__)
    program = compiled(device, model_path, graphs=graphs)
    pages = [program.new_page()]
    program.run(rows_of(program, 20, 0, pages))
    seen, times = list[list[str]](), list[StepTimes]()
    recorded, record = list[int](), device.record

    def counted(steps: Sequence[Call | Copy | Mark]) -> Recording:
        recorded.append(len(steps))
        return record(steps)

    monkeypatch.setattr(device, "record", counted)
    for at in (20, 21, 22):
        with recording(program) as runs:
            logits = program.run(rows_of(program, 1, at, pages)).copy()
        times += runs
        assert np.array_equal(logits, program.run(rows_of(program, 1, at, pages)))
        seen.append([step.kernel for step in times[-1].steps])
    assert seen[0] == seen[1] == seen[2] and not any("fused" in name for name in seen[0])
    assert len(seen[0]) > program.kernels_per_token
    for each in times:
        assert each.seconds.shape == (len(each.steps), 2) and (each.seconds[:, 0] > 0).all() and not each.seconds[:, 1].any()
        assert each.seconds.sum() <= each.run.inside
        assert (np.diff(each.run.threads[0, :, 0]) > 0).all()
    # One recording with times for three tokens, and one without.
    assert len(recorded) == (2 if graphs else 0)


def test_without_memory_for_a_recording_operations_are_timed_all_the_same(
    device: EmulatedDevice, model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(device, model_path)

    def full(*_: object) -> None:
        raise ResourceError("no room")

    monkeypatch.setattr(device, "record", full)
    with recording(program) as times:
        program.run(rows_of(program, 1, 0, [program.new_page()]))
    assert (times[0].seconds[:, 0] > 0).all()


def test_experts_are_timed_each(device: EmulatedDevice, model_path: Callable[..., Path]) -> None:
    program = compiled(device, model_path, "qwen2_moe")
    with recording(program) as times:
        program.run(rows_of(program, 1, 0, [program.new_page()]))
    assert (times[0].seconds[:, 0] > 0).all() and any(step.kernel == "gather_add" for step in times[0].steps)


def test_records_of_a_bench_say_what_they_are_of(
    device: EmulatedDevice, model_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeq.system.measurements.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(CudaTarget(device), []))
    monkeypatch.setattr(gpu, "RELEASE", tmp_path / "no board")
    monkeypatch.setattr(gpu, "queried", lambda: "")
    path = model_path("llama_gqa", {"initializer_range": 0.05}, method="rtn", bits=4, group_size=32)
    with Model.load(path, target="cuda", mode="a16", context=64, max_rows=32) as model:
        test, bytes_per_s = bench.Test("tg", 2, 0), model.program.read_bandwidth()
        record = bench.measure(model, test, 1, bytes_per_s, lambda *_: None)
        row = bench.Row(record, 0.0, bench.where_time_goes(model, test, 1))
        fields = bench.fields(row)
        assert fields["launches_per_token"] == model.program.kernels_per_token  # type: ignore[attr-defined]
        assert fields["copy_bandwidth"] > 0 and fields["read_bandwidth"] == bytes_per_s and fields["timed_apart"]
    assert fields["incomplete"][-4:] == ["GPU driver", "GPU clock", "GPU temperature", "GPU power limit or mode"]
    assert "operations one by one" in bench.markdown([row])
