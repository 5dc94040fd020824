"""Outliers that change nothing, and a table of recipes that can be interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeq.errors import InputError
from edgeq.tools.lab import kl_chart, quality
from edgeq.tools.lab.plant_outliers import Kinds, plant
from edgeq.tools.quality.chart import chart

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny-llama"


@pytest.mark.parametrize(
    "kinds", [Kinds(norms=20, up=10, values=10, keys=10), Kinds(basis=True)], ids=["factors", "basis of the residual"]
)
def test_planted_outliers_leave_the_function_as_it_was(tmp_path: Path, kinds: Kinds, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from edgeq.tools.lab import plant_outliers

    monkeypatch.setattr(plant_outliers, "WINDOWS", 2)
    plant(TINY, tmp_path / "planted", kinds)
    tokens = torch.arange(3, 131)[None]
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens, output_hidden_states=True)
            for folder in (TINY, tmp_path / "planted")
        )
    assert (before.logits - after.logits).abs().max() < 1e-4
    assert not torch.equal(before.logits, after.logits)


def test_the_basis_gathers_the_residual_in_few_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from edgeq.tools.lab import plant_outliers

    monkeypatch.setattr(plant_outliers, "WINDOWS", 2)
    plant(TINY, tmp_path / "planted", Kinds(basis=True))
    tokens = torch.arange(3, 131)[None]

    def share_of_the_largest(folder: Path) -> float:
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            energy = model(tokens, output_hidden_states=True).hidden_states[3][0].square().sum(0)
        return float(energy.max() / energy.sum())

    assert share_of_the_largest(tmp_path / "planted") > 2 * share_of_the_largest(TINY)


def test_outliers_are_refused_in_a_model_of_other_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InputError, match="'gpt2'; outliers can be planted in: llama"):
        plant(tmp_path, tmp_path / "out", Kinds(up=2))


def test_lists_in_a_recipe_stand_for_every_combination() -> None:
    assert quality.expand("--method {rtn,awq} --bits {2,3}") == [
        "--method rtn --bits 2",
        "--method rtn --bits 3",
        "--method awq --bits 2",
        "--method awq --bits 3",
    ]
    assert quality.expand("--bits 4") == ["--bits 4"]


@pytest.mark.exhaustive
def test_recipes_are_measured_once_and_ordered_only_where_they_differ(tmp_path: Path) -> None:
    def measure() -> quality.Json:
        recipes = ["--bits {2,8} --group-size 32 --head 8", "--bits 8 --group-size 64 --head 8"]
        return quality.measure(str(TINY), tmp_path, recipes, texts=["code"], window=64, limit=512, jobs=2)

    result = measure()
    assert [row["recipe"].split()[1] for row in result["rows"]] == ["2", "8", "8"]
    by_order = result["orders"]["code"]
    assert by_order[-1]["worse"].startswith("--bits 2") and by_order[-1]["separable"]
    assert not by_order[0]["separable"]
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert json.dumps(measure()) == json.dumps(result)
    assert kept == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    text = quality.table(result)
    assert "| `--bits 2 --group-size 32 --head 8` |" in text and "not separable" in text


def test_a_recipe_that_cannot_be_converted_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="convert --bits 9: .*9"):
        quality.measure(str(TINY), tmp_path, ["--bits 9"], texts=["code"], window=64, limit=512, jobs=1)


def test_the_chart_tells_methods_budgets_and_llama_cpp_apart(tmp_path: Path) -> None:
    recipes = ("--method gptq --bits 4", "--bits 4", "--read 2.4MB", "llama.cpp Q2_K")
    about = {"read_bytes": 2e6, "bits_per_weight": 3.456, "texts": {"code": {"files": [{"kl_mean": 0.01}]}}}
    found = quality.points([about | {"recipe": recipe} for recipe in recipes], "code")
    wanted = [("edgeq gptq", ""), ("edgeq rtn", ""), ("edgeq budget", "3.46"), ("llama.cpp", "Q2_K")]
    assert [(point.series, point.label) for point in found] == wanted
    # What is kept of it is the same chart.
    kl_chart.write(tmp_path / "points.json", {'a "title"': found, "none": []})
    assert kl_chart.read(tmp_path / "points.json") == {'a "title"': found, "none": []}
    (tmp_path / "points.json").write_text('{"code": [{"bits": 3}]}')
    with pytest.raises(InputError, match=r"points\.json: not the points of charts"):
        kl_chart.read(tmp_path / "points.json")


def test_the_published_chart_is_that_of_the_points_beside_it() -> None:
    docs = Path(__file__).parents[3] / "docs"
    assert chart(kl_chart.read(docs / "kl.json"), kl_chart.UNIT) == (docs / "kl.svg").read_text(encoding="utf-8")
