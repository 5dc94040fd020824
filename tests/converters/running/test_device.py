"""The calibration text on a GPU: the same file, what it takes of the GPU's memory, and what happens when that runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from edgeq.converters.budget.budget import Budget
from edgeq.converters.calibration import moments
from edgeq.converters.calibration.compute import BATCH_ROWS, Compute, chosen
from edgeq.converters.convert import carry_out
from edgeq.converters.methods import tuning
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.probing.allocate import allocate
from edgeq.converters.probing.measurements import probe_bytes
from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from tests.converters.running.stand_in import DEVICE, StandIn

SMALL: dict[str, Any] = {"calibration_rows": 8, "calibration_length": 64}
METHODS = (
    ("llama_mha", {"method": "gptq", "act_order": True}),
    ("qwen3", {"method": "smoothquant", "activations": "static"}),
    ("llama_mha", {"method": "mquant", "activations": "static"}),
    ("llama_gqa", {"method": "awq+gptq", "bits": 3, "group_size": 32}),
    ("qwen2_moe", {"method": "awq", "bits": 3, "group_size": 32}),
    ("llama_gqa", {"method": "awq", "bits": 2, "group_size": 32, "half": True, "scale_bits": 4}),
    ("llama_gqa", {"method": "awq+gptq", "bits": 3, "group_size": 32, "table": True, "tune": True}),
    ("opt", {"method": "smoothquant+gptq"}),
    ("llama_mha", {"method": "quarot", "gptq": True}),
    ("llama_gqa", {"method": "resq", "gptq": True, "calibration": "built-in"}),
    ("mistral", {"method": "rtn", "calibration": "built-in"}),
    ("qwen2_moe", {"method": "awq+gptq", "bits": 3, "group_size": 32, "tune": True}),
)


def silent(*_: object) -> None:
    pass


@pytest.fixture
def _one_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU computes as the stand-in does: float32 products, attention in single operations."""
    monkeypatch.setattr(moments, "has_bf16", lambda: False)
    monkeypatch.setattr(tuning, "STEPS", 8)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def planned(folder: Path, **options: Any) -> ConversionPlan:
    return preflight(str(folder), ConvertOptions(**SMALL, **options))


def made(plan: ConversionPlan, output: Path, rows: int = BATCH_ROWS, said: list[str] | None = None) -> ModelFile:
    """The file of `plan`, made on the stand-in."""
    lines: list[str] = [] if said is None else said
    return carry_out(replace(plan, compute=Compute(str(DEVICE), rows)), output, silent, lines.append).file


@pytest.mark.usefixtures("_one_arithmetic")
@pytest.mark.parametrize(
    ("family", "options"),
    [METHODS[0], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in METHODS[1:])],
    ids=lambda x: x["method"] if isinstance(x, dict) else x,
)
def test_a_gpu_makes_the_same_file_within_the_memory_promised(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    plan = planned(checkpoint(family), **options)
    on_cpu = carry_out(plan, tmp_path / "cpu.edgeq", silent).file
    with StandIn() as gpu:
        on_gpu = made(plan, tmp_path / "gpu.edgeq")
    assert on_gpu.path.read_bytes() == on_cpu.path.read_bytes()
    assert 0 < gpu.peak <= plan.device_bytes(BATCH_ROWS)
    # Nothing is left behind.
    assert gpu.used == 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_one_arithmetic")
def test_a_budget_is_measured_on_a_gpu(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128, budget=Budget("bits", 3.4))
    plan = preflight(str(checkpoint("llama_gqa", intermediate_size=128)), options)
    found = []
    for name, compute in (("cpu", Compute()), ("gpu", Compute(str(DEVICE)))):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        with StandIn() as gpu:
            allocated = allocate(replace(plan, compute=compute), silent, silent)
            found.append((allocated.frontier.measured, carry_out(allocated.plan, tmp_path / f"{name}.edgeq", silent).file))
    assert found[0][0] == found[1][0]
    assert found[0][1].path.read_bytes() == found[1][1].path.read_bytes()
    assert 0 < gpu.peak <= plan.device_bytes(BATCH_ROWS) + probe_bytes(plan)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_one_arithmetic")
def test_out_of_memory_halves_the_rows_and_then_goes_on_on_the_cpu(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plan, said = planned(checkpoint("llama_gqa"), method="gptq", bits=3, group_size=32), list[str]()
    with StandIn():
        with_two = made(plan, tmp_path / "two.edgeq", rows=2)
    with StandIn(fails_at=400) as gpu:
        halved = made(plan, tmp_path / "halved.edgeq", rows=4, said=said)
    assert said[0] == "lazy: out of memory with 4 rows of tokens at a time; going on with 2" and gpu.failures == 1
    assert halved.path.read_bytes() == with_two.path.read_bytes()
    said.clear()
    with StandIn(memory=1 << 10):
        fallen = made(plan, tmp_path / "fallen.edgeq", rows=4, said=said)
    steps = [line.partition("; ")[2] for line in said if line.startswith("lazy")]
    assert steps == ["going on with 2", "going on with 1", "going on on the CPU"]
    assert fallen.path.read_bytes() == carry_out(plan, tmp_path / "cpu.edgeq", silent).file.path.read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_memory_that_runs_out_late_costs_no_finished_layer(
    checkpoint: Callable[..., Path], tmp_path: Path, share: float
) -> None:
    """Whenever it does, the work goes on from the last layer that is safe, to a file as good as the others."""
    plan = planned(checkpoint("llama_gqa"), method="awq+gptq", bits=3, group_size=32)
    with StandIn() as gpu:
        whole = made(plan, tmp_path / "whole.edgeq")
    layers, said = list[int](), list[str]()
    with StandIn(fails_at=int(share * gpu.allocations)) as failing:
        on = replace(plan, compute=Compute(str(DEVICE)))
        file = carry_out(on, tmp_path / "o.edgeq", silent, said.append, lambda report: layers.append(report.index)).file
    assert failing.failures == 1 and "lazy: out of memory with 2 rows of tokens at a time; going on with 1" in said
    assert layers == [0, 1]
    # The numbers that provenance has of it may have other lengths.
    assert [s.length for s in file.segments] == [s.length for s in whole.segments]
    for _ in file.verify():
        pass


@pytest.mark.exhaustive
def test_a_probe_that_runs_out_of_memory_goes_on_with_what_it_measured(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128, budget=Budget("bits", 3.4))
    plan = preflight(str(checkpoint("llama_gqa", intermediate_size=128)), options)
    said: list[str] = []
    with StandIn(fails_at=1500) as gpu:
        found = allocate(replace(plan, compute=Compute(str(DEVICE))), silent, said.append)
    assert gpu.failures == 1 and said == ["lazy: out of memory with 2 rows of tokens at a time; going on with 1"]
    assert found.point.bits <= 3.4


def test_other_errors_are_not_taken_for_a_lack_of_memory(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    plan = planned(checkpoint("llama_gqa"), method="gptq", bits=3)
    with StandIn(), pytest.raises(RuntimeError, match="a kernel failed"):
        carry_out(replace(plan, compute=Compute(str(DEVICE))), tmp_path / "o.edgeq", fail)


def test_the_device_is_chosen_by_name_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def needs(rows: int) -> int:
        return 100 + 10 * rows

    for name in ("auto", "cuda"):
        assert chosen(name, needs, lambda device: 1000) == Compute("cuda:0", 16)
        assert chosen(name, needs, lambda device: 150).rows == 4
        short = chosen(name, needs, lambda device: 100)
        assert not short.apart and "cuda: 0.0 GB are needed" in (short.note or "")
    assert not chosen("cpu", needs, lambda device: 1000).apart


def test_a_gpu_that_is_not_there_is_an_error_only_where_it_was_asked_for(checkpoint: Callable[..., Path]) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is a GPU")
    folder = checkpoint("llama_gqa")
    for name in ("cuda", "mps"):
        with pytest.raises(InputError, match=f"--device {name}: no such GPU .* leave --device out"):
            planned(folder, method="gptq", device=name)
    assert planned(folder, method="gptq", device="auto").notes() == []
    with pytest.raises(InputError, match="--device 'tpu': not supported; choose auto, cpu, cuda, mps"):
        planned(folder, method="gptq", device="tpu")
