"""Massive tokens: what they count in the moments of GPTQ is tried, and a model without them is rounded as before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from edgeq.converters.calibration.dataset import Calibration
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.moments import counted, fast_products, massive
from edgeq.converters.calibration.staged import staged
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.preflight import preflight
from edgeq.converters.probing.massive import SHARES, _best, massive_shares, split
from edgeq.converters.probing.probe import Matrix
from edgeq.converters.rounding.linears import LinearItem

TOKEN, CHANNEL, DOWN = 7, 5, "mlp.down_proj"


def plan_of(folder: Path) -> ConversionPlan:
    """A conversion whose calibration rows begin with TOKEN, which is nowhere else."""
    plan = preflight(str(folder), ConvertOptions(method="gptq", bits=3, group_size=32, calibration_rows=8))
    assert isinstance(plan.calibration, Calibration)
    random = torch.Generator().manual_seed(2)
    rows = torch.randint(TOKEN + 1, plan.method.config.vocab_size, (8, 128), generator=random)
    rows[:, 0] = TOKEN
    return replace(plan, calibration=replace(plan.calibration, rows=rows))


def first_layer(plan: ConversionPlan) -> tuple[BlockForward, nn.Module, torch.Tensor]:
    """The text before the first layer, that, and the inputs of its down projection."""
    assert isinstance(plan.calibration, Calibration)
    forward = BlockForward(plan.checkpoint, plan.method.family, plan.method.config, plan.calibration.rows)
    layer = forward.load(0)
    return forward, layer, torch.cat([x for x, _ in staged(forward.few(8), 0, layer).inputs(DOWN)])


@pytest.fixture
def planted(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A model whose first layer reads TOKEN, in one channel of down, thousands of times as large as the others."""
    folder = tmp_path / "planted"
    shutil.copytree(checkpoint("llama_gqa", num_hidden_layers=2), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    table = tensors["model.embed_tokens.weight"]
    table[:, 0] = 0
    # Alone in the residual's first channel, which only gate and up of CHANNEL look at.
    table[TOKEN, 0] = 3 * table.norm(dim=1).mean()
    tensors["model.layers.0.self_attn.o_proj.weight"][0] = 0
    for kind in ("gate", "up"):
        tensors[f"model.layers.0.mlp.{kind}_proj.weight"][:, 0] = 0
        tensors[f"model.layers.0.mlp.{kind}_proj.weight"][CHANNEL, 0] = 30.0
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_a_massive_token_is_found_and_what_it_counts_is_tried(planted: Path) -> None:
    plan = plan_of(planted)
    shares = massive_shares(plan)
    assert set(shares) == {(0, DOWN)} and shares[0, DOWN] in SHARES
    forward, layer, x = first_layer(plan)
    assert torch.nonzero(massive(x))[:, 0].tolist() == [128 * row for row in range(8)]
    # And that goes into the moments that GPTQ takes, once.
    forward.massive = {(0, DOWN): 1 / 64}
    found = staged(forward, 0, layer, weighed=True).moments(DOWN).matrix
    weights = torch.where(massive(x), 1 / 64, 1.0)
    weighed = x * weights.sqrt()[:, None]
    # By the products that moments are made of, which round to bf16 on some processors.
    with fast_products(x.device):
        expected = weighed.T @ weighed
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    twice = counted(x, torch.full((len(x),), 2.0), 0.5)
    assert twice is not None and torch.equal(twice, torch.where(massive(x), 1.0, 2.0))


def test_a_token_counts_little_where_its_output_is_worth_little_and_all_where_all_is(planted: Path) -> None:
    plan = plan_of(planted)
    _, layer, x = first_layer(plan)
    items = [x for step in plan.steps for x in step.items if isinstance(x, LinearItem) and x.name == "layers.0.down"]
    matrix = Matrix.of(items[0], layer)
    apart = massive(x)
    found = []
    for of_massive, of_others in ((0.0, 1.0), (1.0, 0.0)):
        gradients = torch.where(apart, of_massive, of_others)[:, None].expand(-1, items[0].rows)
        seen = {matrix.modules[0]: [(x, gradients)]}
        found.append(_best(plan, matrix, x[~apart].T @ x[~apart], x[apart], seen))
    assert found[0] < 1 / 16 and found[1] == 1, found


def test_models_without_massive_tokens_are_as_they_were(checkpoint: Callable[..., Path]) -> None:
    plan = plan_of(checkpoint("llama_gqa", num_hidden_layers=2))
    assert plan.tries_massive and massive_shares(plan) == {}
    assert not replace(plan, calibration=None).tries_massive
    x = torch.zeros(9, 4)
    x[0] = 1
    assert not massive(x).any(), "most are 0, and one is not"


def test_rows_that_are_judged_on_are_not_those_of_gptq() -> None:
    for count, length in ((64, 512), (16, 512), (3, 512), (2, 4096), (8, 128)):
        rows = torch.arange(count)[:, None].expand(-1, length)
        judged, fitted = (set(part[:, 0].tolist()) for part in split(rows))
        assert judged and fitted and not judged & fitted
        assert len(judged) * length <= max(1024, length) and len(fitted) * length <= max(8192, length)
    alone = torch.zeros(1, 5)
    assert all(torch.equal(part, alone) for part in split(alone))
