"""The head by GPTQ: less of the logits is lost than by rounding it to nearest, in slabs of any height."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edgeq.converters.calibration.head import gptq_rounding
from edgeq.converters.calibration.torch_decoder import Norm
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.families import recognise
from edgeq.converters.rounding.quantizer import fake, quantize, restored
from edgeq.format.codec import Codec, dequantize

CODEC = Codec("int", 4, 32, symmetric=True)


def silent(*_: object) -> None:
    pass


@pytest.fixture
def hidden_and_norm(checkpoint: Callable[..., Path]) -> tuple[torch.Tensor, Norm]:
    _, config = recognise(json.loads((checkpoint("llama_gqa") / "config.json").read_text()))
    generator = torch.Generator().manual_seed(0)
    size = config.hidden_size
    hidden = torch.randn(6, 50, size, generator=generator) @ torch.randn(size, size, generator=generator)
    norm = Norm(config, size)
    norm.load_state_dict({"weight": torch.rand(size, generator=generator) + 0.5})
    return hidden, norm.requires_grad_(False)


def test_less_of_the_logits_is_lost_than_by_rounding_to_nearest(hidden_and_norm: tuple[torch.Tensor, Norm]) -> None:
    hidden, norm = hidden_and_norm
    weight = torch.randn(200, hidden.shape[-1], generator=torch.Generator().manual_seed(1))
    x = norm(hidden).flatten(0, 1)
    found = restored(gptq_rounding(hidden, norm)(weight, CODEC, "head"), CODEC)
    lost = [float((x @ (w - weight).T).square().sum()) for w in (found, fake(weight, CODEC))]
    assert lost[0] < 0.6 * lost[1]


def test_a_head_that_is_the_embedding_too_stays_nearer_to_its_rows(hidden_and_norm: tuple[torch.Tensor, Norm]) -> None:
    hidden, norm = hidden_and_norm
    weight = torch.randn(200, hidden.shape[-1], generator=torch.Generator().manual_seed(1))
    x = norm(hidden).flatten(0, 1)
    found = [gptq_rounding(hidden, norm, tied=tied)(weight, CODEC, "head") for tied in (False, True)]
    changes = [restored(quantized, CODEC) - weight for quantized in found] + [fake(weight, CODEC) - weight]
    rows = [float(change.square().sum()) for change in changes]
    logits = [float((x @ change.T).square().sum()) for change in changes]
    # Between rounding for the logits and rounding to nearest, in both.
    assert rows[2] < rows[1] < 0.9 * rows[0] and logits[0] < logits[1] < 0.8 * logits[2]


def test_slabs_do_not_matter(hidden_and_norm: tuple[torch.Tensor, Norm]) -> None:
    hidden, norm = hidden_and_norm
    weight = torch.randn(64, hidden.shape[-1], generator=torch.Generator().manual_seed(1))
    rounding = gptq_rounding(hidden, norm)
    whole = rounding(weight, CODEC, "head")
    parts = [rounding(part, CODEC, "head") for part in weight.split(32)]
    # A product of other height may add up in another order: a weight in a hundred may then fall to the other side.
    assert (torch.cat([part.q for part in parts]) == whole.q).float().mean() > 0.98


def test_without_anything_to_go_by_it_is_rounding(hidden_and_norm: tuple[torch.Tensor, Norm]) -> None:
    hidden, norm = hidden_and_norm
    weight = torch.randn(32, hidden.shape[-1])
    found = gptq_rounding(torch.zeros_like(hidden), norm)(weight, CODEC, "head")
    assert torch.equal(found.q, quantize(weight, CODEC, "head").q)


def test_methods_that_go_by_moments_round_the_head_so_and_others_do_not(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\nfor name in os.listdir('.'):\n    print(name)\n" * 60)
    folder = str(checkpoint("llama_gqa", max_position_embeddings=64))
    for method, nearest in (("gptq", False), ("awq", True)):
        options = ConvertOptions(method=method, group_size=32, head=4, calibration=text, calibration_rows=3)
        file = convert(folder, tmp_path / f"{method}.edgeq", options, silent)
        w = file.metadata.linears["head"].weights[0]
        arrays = {name: file.array(ref) for name, ref in w.arrays.items()}
        assert list(arrays) == ["q", "scale"]
        stored = torch.from_numpy(dequantize(w.codec, w.rows, w.columns, arrays))
        plan = preflight(folder, options)
        name = "model.embed_tokens.weight" if plan.method.config.tie_word_embeddings else "lm_head.weight"
        source = torch.from_numpy(plan.checkpoint.whole(name))
        assert torch.equal(stored, fake(source, w.codec)) is nearest


def test_with_a_text_and_no_method_it_is_the_best_one() -> None:
    assert ConvertOptions().method == "rtn"
    assert ConvertOptions(calibration="built-in").method == "gptq"
    assert ConvertOptions(method="rtn", calibration="built-in").method == "rtn"
