"""From a budget to a file: what is measured, what is chosen, and that the file keeps to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgeq.converters.budget.budget import Budget, Unit
from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.calibration.head import EMBEDDING_SHARE
from edgeq.converters.calibration.staged import StagedLayer
from edgeq.converters.convert import carry_out, convert
from edgeq.converters.families import EMBEDDING, ScaleMapping, linear_module
from edgeq.converters.methods import gptq
from edgeq.converters.methods.awq import CodecOfModule, search_scale
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.probing import allocate as allocation
from edgeq.converters.probing.allocate import allocate, measured_frontier, with_allocation
from edgeq.converters.probing.decode_times import MEASURED, DecodeTimes
from edgeq.converters.probing.estimate import estimated, grid
from edgeq.converters.probing.frontier import NEIGHBOURS, Frontier
from edgeq.converters.probing.measurements import probe_rows
from edgeq.converters.probing.probe import Probe
from edgeq.converters.probing.record import Divergences, Record
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import Recipe
from edgeq.converters.rounding.presets import MIN_MAX_ZERO_WEIGHED, Preset
from edgeq.converters.rounding.quantizer import fake
from edgeq.converters.running.readback import stored_tensors
from edgeq.errors import InputError
from edgeq.format.codec import Codec, dequantize
from edgeq.format.container import ModelFile
from edgeq.system.devices import DEVICES
from edgeq.system.machine import cache_folder
from edgeq.tools.cli.params import Amount, Bytes
from edgeq.tools.commands import convert as command
from edgeq.tools.measure import decode_speed
from edgeq.tools.measure.report import bits_per_weight

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128)
BUDGET = Budget("bits", 3.4)


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama_gqa", intermediate_size=128)


def plan_of(folder: Path, budget: Budget | None = BUDGET) -> ConversionPlan:
    return preflight(str(folder), replace(SMALL, budget=budget))


def invented(plan: ConversionPlan) -> Frontier:
    """A frontier over made-up measurements: what follows from them needs no probe."""
    random = np.random.default_rng(0)
    measured = {
        part.name: {codec.name: float(10 ** random.uniform(-3, -2)) / (2**codec.bits - 1) ** 2 for codec in grid(part)}
        for part in plan.parts()
    }
    return Frontier(plan.parts(), measured, allocation.fixed_costs(plan, plan.parts()))


def test_a_part_alone_is_measured_as_a_file_with_only_that_part_quantized(folder: Path) -> None:
    plan, record = plan_of(folder), Record.of({})
    rows, codec = probe_rows(plan), Codec("int", 3, 32, symmetric=False)
    assert rows.numel() == 1024 and not record.divergences
    wanted = [part for part in plan.parts() if part.name in ("layers.0.down", "layers.1.qkv", "head")]
    for measured in Probe(plan, wanted, lambda part: (codec,), rows, silent).run():
        record.keep(measured)
    assert {part: [*found] for part, found in record.divergences.items()} == {part.name: [codec.name] for part in wanted}
    assert all(found[codec.name] > 1e-5 for found in record.divergences.values())
    # The whole model by itself: transformers' forward with the table as the file would have it, embedding and head here.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        exact = model(rows).logits.double().log_softmax(-1)
        assert plan.calibration is not None
        inputs = model.model(plan.calibration.rows).last_hidden_state.flatten(0, 1)
        recipe = Recipe(codec, MIN_MAX_ZERO_WEIGHED)
        moments = inputs.T @ inputs
        moments.diagonal().add_(EMBEDDING_SHARE * moments.diagonal().mean())
        factor = factorize(moments, recipe, act_order=False)
        table = model.get_input_embeddings().weight
        table.data = quantize_matrix(table.data, factor, recipe, "head")[1]
        changed = model(rows).logits.double().log_softmax(-1)
    kl = float((exact.exp() * (exact - changed)).sum(-1).mean())
    assert record.divergences["head"][codec.name] == pytest.approx(kl, rel=0.02)


@pytest.mark.exhaustive
def test_a_probe_that_was_killed_goes_on_and_the_file_has_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    straight = convert(str(folder), tmp_path / "a.edgeq", replace(SMALL, budget=BUDGET), silent)
    (kept,) = (tmp_path / "cache" / "edgeq" / "probes").iterdir()
    whole = kept.read_bytes()
    kept.unlink()

    def stop(done: float, total: float, label: str) -> None:
        if label == "probe of layer 2 of 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(str(folder), tmp_path / "b.edgeq", replace(SMALL, budget=BUDGET), stop)
    measured = json.loads(kept.read_text())["divergences"]
    assert {name.split(".")[1] for name in measured} == {"0"}
    labels: list[str] = []
    again = convert(str(folder), tmp_path / "b.edgeq", replace(SMALL, budget=BUDGET), lambda d, t, label: labels.append(label))
    assert "probe of layer 2 of 2" in labels and kept.read_bytes() == whole
    assert (tmp_path / "a.edgeq").read_bytes() == (tmp_path / "b.edgeq").read_bytes()
    assert straight.identity == again.identity


def test_a_second_budget_measures_nothing_and_other_text_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []

    def run(self: Probe) -> Iterator[Divergences]:
        runs.append(len(self.missing))
        for part in self.missing:
            yield {part.name: {codec.name: 0.01 / (2**codec.bits - 1) ** 2 for codec in self.grid(part)}}

    monkeypatch.setattr(Probe, "run", run)
    first = measured_frontier(plan_of(folder), silent, pytest.fail)
    assert runs == [9, 2]
    second = allocate(plan_of(folder, Budget("kl", 1.0)), silent, pytest.fail)
    assert second.frontier.measured == first.measured and second.point.kl <= 1.0 and len(runs) == 2
    text = tmp_path / "other.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 800)
    allocate(preflight(str(folder), replace(SMALL, budget=BUDGET, calibration=text)), silent, pytest.fail)
    assert len(runs) == 4
    # What other sources measured does not count.
    monkeypatch.setattr("edgeq.converters.planning.plan.quantizing_code", lambda: "changed")
    measured_frontier(plan_of(folder), silent, pytest.fail)
    assert len(runs) == 6


def test_without_a_cache_folder_the_user_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(Probe, "run", lambda self: iter([invented(self.plan).measured]))
    warned: list[str] = []
    measured_frontier(plan_of(folder), silent, warned.append)
    assert warned and "not kept" in warned[0]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"settings": {}, "divergences": {"head": 3}}', '{"settings": 1}'])
def test_a_damaged_record_counts_as_none(tmp_path: Path, damage: str) -> None:
    record = Record.of({"a": 1})
    assert record.keep({"head": {"i4 g64 zero": 0.123456789}}) and not Record.of({"a": 2}).divergences
    assert record.divergences == Record.of({"a": 1}).divergences == {"head": {"i4 g64 zero": 0.123457}}
    record.path.write_text(damage)
    assert not Record.of({"a": 1}).divergences


@pytest.mark.parametrize("unit, amount", [("bits", 3.3), ("size", 0.5e6), ("read", 0.25e6)])
def test_a_file_keeps_to_its_budget_and_says_what_it_lost(folder: Path, tmp_path: Path, unit: Unit, amount: float) -> None:
    plan = plan_of(folder, Budget(unit, amount))
    frontier = invented(plan)
    point = frontier.best(Budget(unit, amount))
    file = carry_out(with_allocation(plan, point, frontier), tmp_path / "a.edgeq", silent).file
    linears = file.metadata.linears
    assert {name: linear.weights[0].codec.name for name, linear in linears.items()} == point.names
    sizes = file.metadata.bytes_per_token()
    weights = sum(linear.rows * linear.columns for linear in linears.values())
    bits = 8 * sum(linear.nbytes for linear in linears.values()) / weights
    assert (sizes["weights"] + sizes["head"], bits) == (point.read, pytest.approx(point.bits))
    assert file.size <= point.size < 1.2 * file.size
    found = {"bits": bits, "size": file.size, "read": point.read}[unit]
    assert 0.85 * amount < found <= amount
    provenance = file.metadata.provenance
    options, measured = provenance["options"], provenance["measured"]
    assert isinstance(options, dict) and options["allocation"] == point.names and "group_size" not in options
    assert isinstance(measured, dict) and measured["kl_predicted"] == point.kl and measured["kl"] > 0
    assert measured["kl_of_parts"] == frontier.measured
    # The head is rounded as the probe measures it: by GPTQ, which is not to nearest.
    head = linears["head"].weights[0]
    arrays = {name: file.array(ref) for name, ref in head.arrays.items()}
    assert list(arrays) == [*head.codec.parts(head.rows, head.columns)]
    kinds = {linear.weights[0].codec.kind for linear in linears.values()}
    assert kinds == ({"int"} if unit == "size" else {"int", "trellis"})
    stored = torch.from_numpy(dequantize(head.codec, head.rows, head.columns, arrays))
    assert not torch.equal(stored, fake(torch.from_numpy(plan.checkpoint.whole(EMBEDDING)), head.codec, MIN_MAX_ZERO_WEIGHED))
    assert not torch.equal(stored, fake(torch.from_numpy(plan.checkpoint.whole(EMBEDDING)), head.codec))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "opt", "llama_mha"])
def test_bytes_of_an_allocation_are_those_of_its_file(checkpoint: Callable[..., Path], family: str) -> None:
    plan = plan_of(checkpoint(family))
    frontier = invented(plan)
    names = [part.name for part in plan.parts()]
    assert ("layers.1.experts.gate_up" in names) == ("mo" in family or family == "mixtral") and names[-1] == "head"
    for point in frontier.points(4):
        metadata = with_allocation(plan, point, frontier).metadata()
        sizes = metadata.bytes_per_token()
        assert 0 <= point.read - sizes["weights"] - sizes["head"] <= len(names)
        assert bits_per_weight(metadata, lambda name: True) == pytest.approx(point.bits)


def test_more_bytes_never_lose_more(folder: Path) -> None:
    points = invented(plan_of(folder)).points()
    assert all(a.read < b.read and a.kl > b.kl for a, b in zip(points, points[1:], strict=False)) and len(points) == 10


@pytest.mark.parametrize("unit, amount", [("bits", 1.0), ("size", 1e5), ("read", 4e4), ("kl", 1e-9)])
def test_a_budget_that_cannot_be_met_names_the_nearest_that_can(folder: Path, unit: Unit, amount: float) -> None:
    frontier = invented(plan_of(folder))
    with pytest.raises(InputError, match="cannot be met") as refused:
        frontier.best(Budget(unit, amount))
    if unit != "kl":
        nearest = float(str(refused.value).split("--")[2].split()[1].strip("MB,"))
        frontier.best(Budget(unit, nearest * (1 if unit == "bits" else 1e6)))
    else:
        frontier.best(Budget("kl", 1.01 * float(str(refused.value).split()[-1])))


@pytest.mark.parametrize("unit, amount", [("bits", 1.0), ("size", 1e5), ("read", 4e4)])
def test_a_budget_below_the_cheapest_file_is_refused_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unit: Unit, amount: float
) -> None:
    monkeypatch.setattr(Probe, "run", lambda *_: pytest.fail("measured"))
    with pytest.raises(InputError, match="cannot be met; the nearest that can is --"):
        allocate(plan_of(folder, Budget(unit, amount)), silent, pytest.fail)


def test_text_too_short_for_measuring_says_how_much_is_needed(folder: Path) -> None:
    with pytest.raises(InputError, match="512 tokens.*at least 1024"):
        allocate(preflight(str(folder), replace(SMALL, calibration_rows=4, budget=BUDGET)), silent, silent)


def test_estimates_pass_through_what_was_measured_and_follow_the_law(folder: Path) -> None:
    part = plan_of(folder, replace(BUDGET, trellises=False)).parts()[0]
    measured = {"i2 g64 zero": 0.1, "i3 g64 zero": 0.02, "i4 g64 zero": 0.02 * 49 / 225, "i2 g64 half": 0.09}
    table = {codec.name: value for codec, value in estimated(part, measured).items()}
    assert len(table) == 31 and all(table[name] == pytest.approx(value) for name, value in measured.items())
    assert table["i8 g64 zero"] == pytest.approx(0.02 * 49 / 255**2)
    for bits in (2, 4):
        assert table[f"i{bits} g128 zero"] / table[f"i{bits} g64 zero"] == pytest.approx(1.297, 0.01)
    assert table["i2 g128 half"] / table["i2 g32 half"] == pytest.approx(1.246, 0.01) and "i2 g16 half" not in table
    # A group size measured beside it bends the curve, but half as far: one measurement errs as much as the law does.
    bent = {codec.name: value for codec, value in estimated(part, measured | {"i3 g16 zero": 0.02}).items()}
    assert table["i5 g16 zero"] < bent["i5 g16 zero"] < bent["i5 g64 zero"]


def test_trellises_of_every_width_have_a_curve_of_their_own(folder: Path) -> None:
    part = plan_of(folder).parts()[0]
    assert [codec.name for codec in grid(part)] == ["i4 g64 zero", "t1 g64 s4", "t2 g64 s4", "t3 g64 s4"]
    measured = {"i4 g64 zero": 0.002, "t1 g64 s4": 0.3, "t2 g64 s4": 0.03, "t3 g64 s4": 0.005}
    table = {codec.name: value for codec, value in estimated(part, measured).items()}
    assert len(table) == 32 and all(table[name] == pytest.approx(value) for name, value in measured.items())
    assert table["i8 g64 zero"] == pytest.approx(0.002 * 225 / 255**2)
    for bits in (1, 2, 3):
        assert table[f"t{bits} g128 s4"] / table[f"t{bits} g32 s4"] == pytest.approx(1.271, 0.01)
    # A second measurement bends the curve of its own width alone.
    bent = {codec.name: value for codec, value in estimated(part, measured | {"t2 g16 s4": 0.03}).items()}
    assert table["t2 g32 s4"] < bent["t2 g32 s4"] and table["t3 g32 s4"] == bent["t3 g32 s4"]


def plans(folder: Path) -> dict[str, str]:
    return {part.name: "i4 g64 zero" for part in plan_of(folder, None).parts()}


def test_a_plan_by_hand_is_carried_out_whatever_its_codecs(folder: Path, tmp_path: Path) -> None:
    wanted = plans(folder) | {"layers.0.o": "i8 row", "layers.1.down": "i2 g16 zero", "layers.1.o": "bf16", "head": "i5 g32"}
    file = convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="rtn", allocation=wanted), silent)
    assert {name: linear.weights[0].codec.name for name, linear in file.metadata.linears.items()} == wanted
    assert file.metadata.provenance["measured"] is None
    # In another order it is the same plan; with another codec it is another file.
    other = dict(reversed(wanted.items()))
    assert ModelFile.open(tmp_path / "a.edgeq").identity == file.identity
    assert (
        convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="rtn", allocation=other), silent).identity
        == file.identity
    )
    with pytest.raises(InputError, match="--force"):
        convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="rtn", allocation=other | {"head": "i4 g32"}), silent)


def test_a_weight_in_bf16_is_read_back_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    wanted = plans(folder) | {"layers.1.o": "bf16"}
    file = convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="rtn", allocation=wanted), silent)
    plan = preflight(str(folder), ConvertOptions(method="rtn", allocation=wanted))
    name = "model.layers.1.self_attn.o_proj.weight"
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    np.testing.assert_allclose(read(name), plan.checkpoint.whole(name), rtol=2**-8)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"layers.2.o": "i4 g64"}, "layers.2.o.*does not have.*head"),
        ({"layers.0.o": None}, "leaves out layers.0.o"),
        ({"head": "i9 g64"}, "part head.*9 bits"),
        ({"head": "i4 g48"}, "part head.*48"),
        ({"head": "q4_k"}, "part head.*q4_k.*i4 g128 zero"),
    ],
)
def test_plans_that_do_not_fit_the_model(folder: Path, change: dict[str, str | None], words: str) -> None:
    plan = {name: codec for name, codec in (plans(folder) | change).items() if codec is not None}
    with pytest.raises(InputError, match=words):
        preflight(str(folder), ConvertOptions(method="rtn", allocation=plan))


@pytest.mark.parametrize("given", [{"bits": 4}, {"group_size": 32}, {"head": 8}, {"symmetric": True}])
def test_a_budget_and_one_codec_for_all_exclude_each_other(folder: Path, given: dict[str, int]) -> None:
    with pytest.raises(InputError, match="one codec for all parts"):
        preflight(str(folder), replace(SMALL, budget=BUDGET, **given))  # type: ignore[arg-type]


def test_methods_without_parts_of_their_own_refuse_a_budget(folder: Path) -> None:
    with pytest.raises(InputError, match="goes with --method gptq"):
        preflight(str(folder), ConvertOptions(method="quarot", budget=BUDGET))


def test_scales_before_gptq_are_chosen_in_the_codecs_of_the_allocation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans(folder) | {"layers.0.qkv": "i2 g16 zero", "layers.1.down": "i7 g64 zero"}
    seen: list[tuple[str, str]] = []

    def search(run: StagedLayer, layer: nn.Module, mapping: ScaleMapping, codec: CodecOfModule, preset: Preset) -> Tensor:
        seen.extend((path, codec(path).name) for path in map(linear_module, mapping.consumers))
        return search_scale(run, layer, mapping, codec, preset)

    monkeypatch.setattr(gptq, "search_scale", search)
    options = replace(SMALL, method="awq+gptq", allocation=plan)
    file = convert(str(folder), tmp_path / "o.edgeq", options, silent)
    stored = {name: linear.weights[0].codec.name for name, linear in file.metadata.linears.items()}
    assert stored == plan
    assert seen.count(("self_attn.q_proj", "i2 g16 zero")) == 1 and seen.count(("mlp.down_proj", "i7 g64 zero")) == 1
    parts = {"self_attn.q_proj": "qkv", "mlp.gate_proj": "gate_up", "mlp.down_proj": "down"}
    for path, part in parts.items():
        assert sorted(codec for name, codec in seen if name == path) == sorted(plan[f"layers.{i}.{part}"] for i in range(2))


def times(plan: ConversionPlan) -> DecodeTimes:
    """A nanosecond for every byte, but 6 bits as slow as 9 would be."""
    whole = {codec: sum(part.cost(codec, "read") for part in plan.parts()) for codec in MEASURED}
    return DecodeTimes({codec: (read, 1e-9 * read * (1.5 if codec.bits == 6 else 1.0)) for codec, read in whole.items()})


class Here:
    """A machine that decodes every mixture `slower` times as slowly as is predicted."""

    def __init__(self, plan: ConversionPlan, slower: float = 1.0, alone: bool = True, resumes: bool = False) -> None:
        self.setting, self.times, self.alone, self.resumes = "here", times(plan), alone, resumes
        self.slower, self.decoded = slower, 0

    def ratio(self, codecs: Mapping[str, Codec]) -> float:
        self.decoded += 1
        return self.slower


def test_a_speed_here_is_seconds_of_the_parts(folder: Path) -> None:
    plan = plan_of(folder, Budget.of_speed(None, 4000))
    assert plan.options.budget == Budget("seconds", 1 / 4000)
    frontier = replace(invented(plan), times=times(plan))
    point = frontier.best(Budget("seconds", 1 / 4000))
    assert point.seconds is not None and 0.97 / 4000 < point.seconds <= 1 / 4000
    assert 6 not in {codec.bits for codec in point.codecs.values()}
    assert point.kl < min(x.kl for x in frontier.points() if x.seconds and x.seconds <= point.seconds)
    # What is kept of the options are the codecs: a killed conversion goes on with --plan.
    made = with_allocation(plan, point, frontier)
    by_hand = preflight(str(folder), replace(SMALL, allocation=point.names))
    assert made.fingerprint() == by_hand.fingerprint()


def test_a_speed_that_cannot_be_met_names_the_nearest_that_can(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "run", lambda *_: pytest.fail("measured"))
    plan = plan_of(folder, Budget.of_speed(None, 1e6))
    with pytest.raises(InputError, match="--speed 1000000: cannot be met; the fastest that can is --speed") as refused:
        allocate(plan, silent, pytest.fail, Here(plan))
    replace(invented(plan), times=times(plan)).best(Budget.of_speed(None, float(str(refused.value).split()[-1])))
    with pytest.raises(InputError, match="goes with the decode times of this machine"):
        allocate(plan, silent, pytest.fail)
    with pytest.raises(InputError, match="choose a number of tokens per second above 0"):
        Budget.of_speed(None, 0.0)


def test_codecs_chosen_by_decoding_are_kept_with_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, lines = plan_of(folder, Budget.of_speed(None, 4000)), list[str]()
    monkeypatch.setattr(allocation, "measured_frontier", lambda plan, *_: invented(plan))

    def chosen(here: Here, plan: ConversionPlan = plan) -> dict[str, str]:
        lines.clear()
        point = allocate(plan, silent, lines.append, here).point
        assert point.seconds is not None and 0.97 / 4000 < point.seconds <= 1 / 4000
        return point.names

    # Disturbed: chosen again by the next run, but not by one that goes on with a conversion.
    first = chosen(busy := Here(plan, 1.2, alone=False))
    assert busy.decoded and "--save-plan keeps these" in lines[-1]
    assert chosen(begun := Here(plan, 0.9, resumes=True)) == first and not begun.decoded
    quiet = chosen(Here(plan, 0.9))
    assert quiet != first and chosen(again := Here(plan, 1.2)) == quiet and not again.decoded
    assert lines == ["the codecs are those that were chosen when this speed was asked for before"]
    # What is kept of other parts, or damaged, counts as nothing.
    (path,) = (cache_folder() / "probes").glob("*.json")
    path.write_text(path.read_text().replace("layers.0.qkv", "layers.9.qkv"))
    chosen(other := Here(plan, 0.9))
    assert other.decoded
    path.write_text(path.read_text().replace('"ratio": ', '"ratio": -'))
    chosen(other := Here(plan, 0.9))
    assert other.decoded


@pytest.mark.parametrize(
    ("budget", "shown"),
    [
        (Budget("seconds", 1 / 12345.6), "--speed 12350"),
        (Budget("size", 123.4567e9), "--size 123500MB"),
        (Budget("read", 2.15e6), "--read 2.15MB"),
        (Budget("kl", 1.2345e-5), "--kl 0.0000123"),
        (Budget("bits", 3.4), "--bits 3.4"),
    ],
)
def test_a_budget_is_shown_as_the_command_line_takes_it(budget: Budget, shown: str) -> None:
    assert str(budget) == shown
    option, number = shown.split()
    taken = (Bytes() if number.endswith("MB") else Amount()).convert(number, None, None)
    amount = 1 / budget.amount if option == "--speed" else budget.amount
    assert taken == pytest.approx(amount, rel=5e-3)


def test_the_command_chooses_by_the_seconds_of_this_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chosen codecs are saved, go on as a plan, and every speed that is shown is one of this machine."""
    times_asked = list[str]()

    def measured(config: object, mode: str) -> DecodeTimes:
        times_asked.append(mode)
        return times(plan_of(folder))

    monkeypatch.setattr(decode_speed, "times_here", measured)
    monkeypatch.setattr(decode_speed.AllocationsHere, "ratio", lambda here, codecs: 1.0)
    monkeypatch.setattr(allocation, "measured_frontier", lambda plan, *_: invented(plan))
    given = {"method": None, "calibration_rows": 8, "calibration_length": 128}
    saved, plot = tmp_path / "plan.json", tmp_path / "chart.svg"

    def dry_run(board: str | None = None, **options: object) -> dict[str, Any]:
        command.convert(str(folder), None, board, True, {**given, **options})
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    facts = dry_run(speed=4000.0, save_plan=saved, plot=plot)
    (chosen,) = [row for row in facts["frontier"] if row["chosen"]]
    (same,) = [row for row in facts["neighbours"] if row["chosen"]]
    assert (
        same.items() >= {key: chosen[key] for key in ("bytes_per_token", "kl_predicted")}.items() and same["relative_kl"] == 1
    )
    assert {name for row in facts["frontier"] for name in row["tokens_per_second"]} == {"this-machine"}
    assert 4000 <= chosen["tokens_per_second"]["this-machine"] < 4000 / 0.97 and times_asked == ["a8"]
    assert plot.read_text(encoding="utf-8").startswith("<svg")
    assert not any(name.startswith("i6") for name in json.loads(saved.read_text()).values())
    again = dry_run(plan=saved)
    assert again["bits_per_weight"] == facts["bits_per_weight"]
    # Of a board nothing is measured: its bytes decide.
    board = dry_run("raspberry-pi-5", speed=DEVICES["raspberry-pi-5"].decode_bandwidth / chosen["bytes_per_token"])
    (row,) = [row for row in board["frontier"] if row["chosen"]]
    assert [*row["tokens_per_second"]] == ["raspberry-pi-5"] and len(times_asked) == 1
    assert 0.97 * chosen["bytes_per_token"] < row["bytes_per_token"] <= chosen["bytes_per_token"]


@pytest.mark.parametrize("unit", ["size", "read"])
def test_a_few_more_bytes_and_a_few_less_are_shown_beside_the_choice(folder: Path, unit: Unit) -> None:
    frontier = invented(plan_of(folder))
    amounts = frontier.points()
    for chosen in (amounts[0], amounts[5], amounts[-1]):
        found = frontier.neighbours(chosen, unit)
        taken = [getattr(point, unit) / getattr(chosen, unit) for point in found]
        assert taken == sorted(taken) and len({tuple(point.names.values()) for point in found}) == len(found)
        (place,) = [i for i, point in enumerate(found) if point is chosen]
        # Nothing is smaller than the smallest allocation.
        assert place == (0 if chosen is amounts[0] else 2)
        shares = NEIGHBOURS[2 - place :]
        assert all(have <= wanted * (1 + 1e-9) for have, wanted in zip(taken, shares, strict=False))
        assert [point.kl for point in found] == sorted((point.kl for point in found), reverse=True)
        for point, share in zip(found, shares, strict=False):
            if point is not chosen:
                limit = getattr(chosen, unit) * share
                assert point.codecs == frontier.best(Budget(unit, limit)).codecs


def test_a_speed_is_bytes_of_the_device() -> None:
    board = DEVICES["raspberry-pi-5"]
    assert Budget.of_speed(board, 10) == Budget("read", 0.95 * 13.8e9 / 10, trellises=False)
    # Where nothing is measured, less of the peak.
    assert Budget.of_speed(DEVICES["x86-avx2"], 10).amount == pytest.approx(0.75 * 5.12e9)
    for device, speed in ((DEVICES["h200"], 10), (board, 0), (board, float("inf"))):
        with pytest.raises(InputError):
            Budget.of_speed(device, speed)


def test_every_part_has_candidates_that_divide_its_columns(checkpoint: Callable[..., Path]) -> None:
    plan = plan_of(checkpoint("llama_gqa", hidden_size=96, intermediate_size=80))
    parts: dict[str, AllocationPart] = {part.name: part for part in plan.parts()}
    assert {codec.group_size for codec in parts["layers.0.qkv"].candidates()} == {16, 32}
    assert {codec.group_size for codec in parts["layers.0.down"].candidates()} == {16}


def measured_by_bits(self: Probe) -> Iterator[Divergences]:
    """In place of a probe: half grids lose a little less than zero points, and trellises half as much."""
    of_kind = {"int": 0.01, "half": 0.009, "trellis": 0.005}
    for part in self.missing:
        yield {part.name: {codec.name: of_kind[codec.kind] / (2**codec.bits - 1) ** 2 for codec in self.grid(part)}}


@pytest.mark.exhaustive
def test_a_budget_near_two_bits_takes_half_grids(folder: Path, tmp_path: Path) -> None:
    """Measured like all else: of every part, in groups of 64, and in others where they are chosen most."""
    found = allocate(plan_of(folder, Budget("bits", 2.4, trellises=False)), silent, pytest.fail)
    assert all("i2 g64 half" in measured for measured in found.frontier.measured.values())
    assert any(name.endswith(" half") for name in found.point.names.values())
    zeros = allocate(plan_of(folder, Budget("bits", 2.4, half_grids=False, trellises=False)), silent, pytest.fail)
    assert zeros.point.kl > found.point.kl
    file = carry_out(found.plan, tmp_path / "a.edgeq", silent).file
    assert {name: linear.weights[0].codec.name for name, linear in file.metadata.linears.items()} == found.point.names
    measured = file.metadata.provenance["measured"]
    assert isinstance(measured, dict) and 0 < measured["kl"] < 2 * found.point.kl
    # In as many bits, or fewer than two, a trellis of every part.
    rings = allocate(plan_of(folder, Budget("bits", 2.4)), silent, pytest.fail)
    assert rings.point.kl < found.point.kl and "trellis" in {codec.kind for codec in rings.point.codecs.values()}


def test_bytes_leave_out_what_a_trellis_beats_and_time_leaves_out_nothing(folder: Path) -> None:
    def names(budget: Budget) -> set[str]:
        return {codec.name for part in plan_of(folder, budget).parts() for codec in part.candidates() if codec.group_size == 64}

    more = {f"i{bits} g64 zero" for bits in range(4, 9)}
    few, trellises = {"i2 g64 zero", "i3 g64 zero", "i2 g64 half"}, {f"t{bits} g64 s4" for bits in (1, 2, 3)}
    assert names(Budget("read", 1e6)) == more | trellises
    assert names(Budget("seconds", 1e-3)) == more | trellises | few
    assert names(Budget("read", 1e6, trellises=False)) == more | few
    # As many rows in a block as the runtime has.
    item = plan_of(folder).parts()[0].items[0]
    odd = AllocationPart("layers.0.qkv", (replace(item, tensors=(("q", 24), ("k", 16))),), 0, Fraction(1))
    assert {codec.name for codec in odd.candidates() if codec.group_size == 64} == more | few
    even = replace(odd, items=(replace(item, tensors=(("q", 16), ("k", 24))),))
    assert {codec.name for codec in even.candidates() if codec.group_size == 64} == more | trellises
