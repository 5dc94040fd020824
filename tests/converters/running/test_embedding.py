"""An embedding that is not the head: a part with a codec of its own, which takes room in the file and nothing per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeq.converters.budget.budget import Budget
from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.probing.allocate import measured_frontier
from edgeq.converters.probing.measurements import probe_rows
from edgeq.converters.probing.probe import Probe
from edgeq.converters.probing.record import Record
from edgeq.converters.rounding.quantizer import fake
from edgeq.errors import FormatError, InputError
from edgeq.format import manifest
from edgeq.format.codec import Codec, dequantize
from edgeq.format.container import ModelFile
from edgeq.format.records import Activation
from edgeq.runtime import Model
from edgeq.tools.commands.inspect import collect
from edgeq.tools.measure.report import bits_per_weight, in_decoder

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = ConvertOptions(method="gptq", calibration_rows=8, calibration_length=128)
TOKENS = [int(t) for t in np.random.default_rng(5).integers(2, 2048, 24)]
CODEC = Codec("int", 3, 32, symmetric=False)


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama_mha", intermediate_size=128)


def planned(folder: Path, output: Path, codec: str) -> ModelFile:
    """Rounded to nearest, 8 bits everywhere but in the embedding."""
    names = [part.name for part in preflight(str(folder), replace(SMALL, budget=Budget("bits", 4.0))).parts()]
    assert names[0] == "embedding" and names[-1] == "head"
    plan = dict.fromkeys(names, "i8 g32 zero") | {"embedding": codec}
    return convert(str(folder), output, ConvertOptions(method="rtn", allocation=plan), silent)


def logits(file: ModelFile, target: str) -> Any:
    model = Model.load(file.path, target=target, mode="a16", max_logits=len(TOKENS), context=64)
    return np.concatenate(list(model.session().all_logits(TOKENS)))


@pytest.mark.parametrize(
    "codec", ["i5 g64 zero", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("i2 g16 zero", "i8 row", "bf16"))]
)
def test_it_is_stored_rounded_and_gathered_alike_by_both_targets(folder: Path, tmp_path: Path, codec: str) -> None:
    file = planned(folder, tmp_path / "o.edgeq", codec)
    assert "embedding" not in file.metadata.arrays
    (w,) = file.metadata.linears["embedding"].weights
    arrays = {name: file.array(ref) for name, ref in w.arrays.items()}
    assert w.codec == Codec.named(codec)
    table = preflight(str(folder), SMALL).checkpoint.whole("model.embed_tokens.weight")
    if w.codec.integer:
        want = fake(torch.from_numpy(table), w.codec).numpy()
        assert np.array_equal(dequantize(w.codec, w.rows, w.columns, arrays), want)
    reference, cpu = logits(file, "reference"), logits(file, "cpu")
    assert np.abs(reference - cpu).max() < 1e-3 * np.abs(reference).max()


@pytest.mark.exhaustive
def test_a_budget_of_size_gives_it_bits_and_one_of_reading_does_not_count_it(folder: Path, tmp_path: Path) -> None:
    plan = preflight(str(folder), replace(SMALL, budget=Budget("size", 1e9)))
    frontier = measured_frontier(plan, silent, silent)
    least, most = (frontier.best(Budget("size", amount)) for amount in (frontier.points()[0].size * 0.95, 1e9))
    assert least.codecs["embedding"].bits < 8 and most.codecs["embedding"].bits == 8
    for unit, amount in (("read", frontier.points()[0].read), ("bits", 3.0)):
        assert frontier.best(Budget(unit, amount)).codecs["embedding"].bits == 8  # type: ignore[arg-type]
    size = 0.9 * frontier.best(Budget("bits", 4.0)).size
    file = convert(str(folder), tmp_path / "o.edgeq", replace(SMALL, budget=Budget("size", size)), silent)
    assert 0.97 * size < file.size <= size
    point = frontier.best(Budget("size", size))
    sizes, metadata = file.metadata.bytes_per_token(), file.metadata
    assert sizes["weights"] + sizes["head"] == point.read
    assert bits_per_weight(metadata, lambda name: True) == pytest.approx(point.bits)
    assert bits_per_weight(metadata, in_decoder) > 0
    assert metadata.linears["embedding"].weights[0].codec == point.codecs["embedding"]
    assert np.abs(logits(file, "reference") - logits(file, "cpu")).max() < 0.05
    (shown,) = [group for group in collect(file, False)["layers"] if group["part"] == "embedding"]
    assert shown["bytes"] == metadata.linears["embedding"].nbytes
    averaged = convert(str(folder), tmp_path / "b.edgeq", replace(SMALL, budget=Budget("bits", 3.4)), silent)
    assert bits_per_weight(averaged.metadata, lambda name: True) <= 3.4
    assert np.abs(logits(averaged, "reference") - logits(averaged, "cpu")).max() < 0.05


def test_it_is_measured_as_a_file_with_only_it_quantized(folder: Path) -> None:
    plan, record = preflight(str(folder), replace(SMALL, budget=Budget("size", 1e9))), Record.of({})
    rows = probe_rows(plan)
    wanted = [part for part in plan.parts() if part.name == "embedding"]
    for measured in Probe(plan, wanted, lambda part: (CODEC,), rows, silent).run():
        record.keep(measured)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        exact = model(rows).logits.double().log_softmax(-1)
        table = model.get_input_embeddings().weight
        table.data = fake(table.data, CODEC)
        changed = model(rows).logits.double().log_softmax(-1)
    kl = float((exact.exp() * (exact - changed)).sum(-1).mean())
    assert record.divergences["embedding"][CODEC.name] == pytest.approx(kl, rel=0.02)


def test_a_plan_that_leaves_it_out_is_refused(folder: Path, checkpoint: Callable[..., Path]) -> None:
    parts = [part.name for part in preflight(str(folder), replace(SMALL, budget=Budget("bits", 4.0))).parts()]
    without = dict.fromkeys(parts[1:], "i4 g32 zero")
    with pytest.raises(InputError, match="the plan leaves out embedding"):
        preflight(str(folder), replace(SMALL, allocation=without))
    with pytest.raises(InputError, match="a part 'embedding', which the model does not have"):
        preflight(str(checkpoint("llama_gqa")), replace(SMALL, allocation=dict.fromkeys(parts, "i4 g32 zero")))


def test_a_file_whose_embedding_has_more_than_a_weight_is_refused(folder: Path, tmp_path: Path) -> None:
    metadata = planned(folder, tmp_path / "o.edgeq", "i4 g32 zero").metadata
    manifest.check(metadata)
    table, head = metadata.linears["embedding"], metadata.linears["head"]
    for changed in (
        replace(table, activation=Activation(8)),
        replace(table, weights=table.weights * 2),
        replace(table, master=head.weights[0]),
    ):
        with pytest.raises(FormatError):
            manifest.check(replace(metadata, linears={**metadata.linears, "embedding": changed}))
    norm = metadata.arrays["norm"]
    with pytest.raises(FormatError, match="unexpected .*embedding"):
        manifest.check(replace(metadata, arrays={**metadata.arrays, "embedding": norm}))
    tied = replace(metadata, config=replace(metadata.config, tie_word_embeddings=True))
    with pytest.raises(FormatError, match="unexpected .*embedding"):
        manifest.check(tied)
