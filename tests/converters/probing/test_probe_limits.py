"""What a probe refuses, promises and keeps; and that plans by hand ask for no probe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edgeq.converters.budget.budget import Budget
from edgeq.converters.calibration.compute import LOGIT_BYTES
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.head import head_slabs
from edgeq.converters.convert import carry_out, convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.probing import record as records
from edgeq.converters.probing.allocate import allocate
from edgeq.converters.probing.measurements import probe_rows
from edgeq.converters.probing.probe import Probe
from edgeq.converters.probing.record import Divergences, Record
from edgeq.errors import CheckpointError, InputError
from edgeq.tools.measure.report import bits_per_weight, in_tower, overall_bits
from tests.checkpoints.vision import build

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128)


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama_gqa", num_hidden_layers=1)


def test_one_pass_of_the_text_serves_all_parts_of_a_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, tokens = preflight(str(folder), SMALL), list[int]()
    rows = probe_rows(plan)
    for name in ("watch", "advance"):
        whole = getattr(BlockForward, name)

        def counted(self: BlockForward, *args: object, whole: Callable[..., None] = whole, **named: object) -> None:
            tokens.append(self.hidden[..., 0].numel())
            whole(self, *args, **named)

        monkeypatch.setattr(BlockForward, name, counted)
    layer = [part for part in plan.parts() if part.layer == 0]
    (found,) = Probe(plan, layer, lambda part: part.candidates()[:1], rows[:2], silent).run()
    assert sorted(tokens) == [256, 1024] and len(found) == len(layer) == 4
    # In as many passes as the memory for moments asks for, the same is measured.
    monkeypatch.setattr("edgeq.converters.probing.probe.MOMENT_BYTES", 1)
    (again,) = Probe(plan, layer, lambda part: part.candidates()[:1], rows[:2], silent).run()
    assert sorted(tokens[2:]) == [256, 1024, 1024, 1024, 1024] and again == found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_divergence_that_is_no_number_is_refused_by_part_and_codec(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    plan = preflight(str(folder), SMALL)
    monkeypatch.setattr(
        "edgeq.converters.probing.probe.divergences_through",
        lambda plan, exact, ends: [0.1, value] + [0.1] * (len(ends) - 2),
    )
    layers = Probe(plan, plan.parts(), lambda part: part.candidates()[:2], probe_rows(plan), silent).run()
    with pytest.raises(CheckpointError, match=r"layers.0.qkv in i4 g32 zero the KL divergence .* --plan"):
        next(layers)


def test_a_model_whose_outputs_are_not_finite_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = preflight(str(folder), SMALL)
    run = BlockForward.run
    monkeypatch.setattr(BlockForward, "run", lambda *args: run(*args).mul(float("inf")))
    with pytest.raises(CheckpointError, match="outputs of its last layer.*not finite"):
        next(Probe(plan, plan.parts(), lambda part: part.candidates()[:1], probe_rows(plan), silent).run())


def test_a_plan_by_hand_takes_any_text(folder: Path, tmp_path: Path) -> None:
    wanted = {part.name: "i4 g64 zero" for part in preflight(str(folder), SMALL).parts()}
    plan = preflight(str(folder), replace(SMALL, calibration_rows=2, allocation=wanted))
    assert probe_rows(plan).shape == (2, 128)
    measured = carry_out(plan, tmp_path / "a.edgeq", silent).file.metadata.provenance["measured"]
    assert isinstance(measured, dict) and measured["kl"] > 0 and "kl_predicted" not in measured


def test_bits_of_a_budget_are_those_of_the_summary_without_the_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build(tmp_path / "sees", "padded")

    def run(self: Probe) -> Iterator[Divergences]:
        yield {part.name: {codec.name: 0.01 / (2**codec.bits - 1) ** 2 for codec in self.grid(part)} for part in self.missing}

    monkeypatch.setattr(Probe, "run", run)
    plan = preflight(str(source), replace(SMALL, budget=Budget("bits", 3.4)))
    found = allocate(plan, silent, pytest.fail)
    metadata = found.plan.metadata()
    assert overall_bits(metadata) == pytest.approx(found.point.bits) and 3.1 < found.point.bits <= 3.4
    assert bits_per_weight(metadata, in_tower) > 8


def test_records_that_were_not_used_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(name: int) -> Record:
        record = Record.of({"name": name})
        assert record.keep({"head": {"i4 g64 zero": 0.5}})
        return record

    kept = [keep(name) for name in range(4)]
    for age, record in enumerate(kept):
        os.utime(record.path, ns=(age, age))
    # What a killed process had begun to write.
    begun = kept[0].path.with_name(f"{kept[0].path.name}.5.new")
    begun.write_text("x")
    os.utime(begun, ns=(0, 0))
    # Reading is using.
    assert Record.of({"name": 0}).divergences
    monkeypatch.setattr(records, "MAX_KEPT_BYTES", 3 * kept[0].path.stat().st_size)
    last = keep(4)
    assert [record.path.exists() for record in (*kept, last)] == [True, False, False, True, True] and not begun.exists()


def test_logits_in_memory_are_bounded_however_large_the_vocabulary(checkpoint: Callable[..., Path]) -> None:
    plan = preflight(str(checkpoint("llama_gqa")), SMALL)
    config, tokens = plan.method.config, 1024
    whole = list(head_slabs(plan.checkpoint.rows, config, tokens))
    few = list(head_slabs(plan.checkpoint.rows, config, LOGIT_BYTES // 4 // 64))
    assert len(whole) == 1 and len(few) > 1 and max(map(len, few)) <= 64
    assert torch.equal(torch.cat([torch.from_numpy(rows) for rows in few]), torch.from_numpy(whole[0]))


def test_promises_count_logits_and_shared_experts(checkpoint: Callable[..., Path]) -> None:
    text = replace(SMALL, method="rtn", calibration="built-in")
    small, large = (
        preflight(str(checkpoint("llama_gqa", hidden_size=64, vocab_size=size)), text).memory_bytes for size in (2048, 65536)
    )
    # Five arrays of logits, 64 MB each.
    assert 250 << 20 < large - small < 340 << 20
    narrow, wide = (
        preflight(str(checkpoint("qwen2_moe", shared_expert_intermediate_size=size)), ConvertOptions(method="ttq")).memory_bytes
        for size in (96, 4096)
    )
    assert wide - narrow > 4 * 4 * (3 * 16 + 16) * 2 * (4096 - 512)


MEASURE = """
import re, sys, threading
from pathlib import Path
import torch
from edgeq.converters.convert import ConvertOptions, convert, preflight
torch.set_num_threads(1)
options = ConvertOptions(method="rtn", calibration="built-in", calibration_rows=4, calibration_length=512)
peak, done = 0, threading.Event()
def sample():
    global peak
    while not done.wait(0.01):
        peak = max(peak, 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
sampler = threading.Thread(target=sample)
sampler.start()
convert(sys.argv[1], Path(sys.argv[2]), options, lambda *_: None)
done.set()
sampler.join()
print(peak, preflight(sys.argv[1], options).memory_bytes)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs RssAnon of Linux")
def test_measuring_a_head_of_many_entries_keeps_the_promise(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("llama_gqa", hidden_size=64, vocab_size=65536, max_position_embeddings=512)
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "o.edgeq")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, promised = map(int, re.findall(r"\d+", printed))
    # The logits of all entries for all tokens would be five times 0.5 GB.
    assert 300 << 20 < peak < promised < 2 << 30


def test_a_file_of_other_code_is_not_taken_for_the_present_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o.edgeq"
    first = convert(str(folder), output, ConvertOptions(), silent)
    assert carry_out(preflight(str(folder), ConvertOptions()), output, silent).already_there
    monkeypatch.setattr("edgeq.converters.planning.plan.quantizing_code", lambda: "other")
    with pytest.raises(InputError, match=r"made by other code of edgeq .*, whose files may differ; pass --force"):
        convert(str(folder), output, ConvertOptions(), silent)
    again = convert(str(folder), output, ConvertOptions(force=True), silent)
    assert again.metadata.provenance["code"] == "other" and again.identity != first.identity


def test_a_conversion_that_other_code_began_is_not_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o.edgeq"

    def stop(done: float, total: float, label: str) -> None:
        if label == "norm and head":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(str(folder), output, ConvertOptions(), stop)
    monkeypatch.setattr("edgeq.converters.planning.plan.quantizing_code", lambda: "other")
    with pytest.raises(InputError, match=r"other code of edgeq .* had begun; pass --restart to start over"):
        convert(str(folder), output, ConvertOptions(), silent)
    convert(str(folder), output, ConvertOptions(restart=True), silent)
