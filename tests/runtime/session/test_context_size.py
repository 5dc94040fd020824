"""The context is chosen before anything is allocated, and refused with the largest that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.errors import InputError, ResourceError
from edgeq.format.records import KvCodec
from edgeq.runtime import Model
from edgeq.system import machine as facts
from edgeq.targets.host import buffer_bytes

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc/meminfo that a test writes, and no control group."""
    path = tmp_path / "meminfo"
    monkeypatch.setattr(facts, "MEMINFO", path)
    monkeypatch.setattr(facts, "CGROUP", tmp_path / "cgroup")
    return path


def has(path: Path, available: int) -> None:
    path.write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {available // 1024} kB\nSwapFree: 0 kB\n")


def fixed_bytes(model: Model) -> int:
    sizes = model.file.metadata.bytes_per_token()
    return sizes["weights"] + sizes["head"] + buffer_bytes(model.graph, model.program.options)


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Model:
    return Model.load(tiny_path, target="reference")


def test_available_memory_is_read_in_bytes(machine: Path) -> None:
    has(machine, 3 * MIB)
    assert facts.available_bytes() == 3 * MIB
    machine.unlink()
    assert facts.available_bytes() > 64 * MIB


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [(64 * MIB, 40 * MIB, 34 * MIB), (64 * MIB, 80 * MIB, 0), (64 * MIB, 1 * MIB, 50 * MIB), ("max", 40 * MIB, 50 * MIB)],
)
def test_a_container_has_what_its_control_group_leaves(machine: Path, limit: object, current: int, expected: int) -> None:
    has(machine, 50 * MIB)
    folder = machine.parent / "cgroup"
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile {10 * MIB}\n")
    assert facts.available_bytes() == expected


def test_the_default_context_is_what_the_model_takes(model: Model) -> None:
    assert model.context == model.config.max_position_embeddings == 1024


def test_the_default_context_shrinks_to_what_fits(model: Model, machine: Path, tiny_path: Path) -> None:
    has(machine, fixed_bytes(model) + 3 * model.graph.page_bytes(KvCodec()) + 2048)
    assert Model.load(tiny_path, target="reference").context == 192


def test_a_context_that_does_not_fit_names_the_largest_that_does(model: Model, machine: Path, tiny_path: Path) -> None:
    has(machine, fixed_bytes(model) + 3 * model.graph.page_bytes(KvCodec()) + 2048)
    assert Model.load(tiny_path, target="reference", context=192).context == 192
    with pytest.raises(ResourceError, match="context of 193 .*largest context that fits is 192.*context=192"):
        Model.load(tiny_path, target="reference", context=193)


def test_an_int8_cache_fits_more(model: Model, machine: Path, tiny_path: Path) -> None:
    has(machine, fixed_bytes(model) + 4 * model.graph.page_bytes(KvCodec()) + 2048)
    assert Model.load(tiny_path, target="reference").context == 256
    assert Model.load(tiny_path, target="reference", kv="int8").context == 448  # 36 bytes a head instead of 64


def test_a_machine_too_small_for_the_weights_is_said_so(machine: Path, tiny_path: Path) -> None:
    has(machine, 2 * MIB)
    with pytest.raises(ResourceError, match="no context fits"):
        Model.load(tiny_path, target="reference")


@pytest.mark.parametrize("context", (0, -1, 1025))
def test_a_context_the_model_does_not_take_is_refused(context: int, tiny_path: Path) -> None:
    with pytest.raises(InputError, match="1 to 1024"):
        Model.load(tiny_path, target="reference", context=context)


def test_buffers_count_rows_before_and_logits_after_the_selection(model: Model) -> None:
    few = buffer_bytes(model.graph, model.program.options)
    before = sum(model.graph.buffers[b] for b in ("x", "normed", "qkv", "attended", "gate_up", "inner"))
    after = sum(model.graph.buffers[b] for b in ("x", "qkv", "logits"))
    assert few == 4 * (model.program.options.max_rows * before + model.program.options.max_logits * after)
