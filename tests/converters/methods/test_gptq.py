"""GPTQ: the error of a layer's output, grids and integers, dead columns, and what happens where it cannot be done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.method import Block
from edgeq.converters.methods.gptq import gptq_layer
from edgeq.converters.rounding import column_kernel
from edgeq.converters.rounding import columns as columns_of_a_matrix
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import LinearItem, Recipe
from edgeq.converters.rounding.presets import ABSMAX_SEARCH, MIN_MAX_ZERO_WEIGHED, Preset
from edgeq.converters.rounding.quantizer import Quantized, fake, quantize, restored
from edgeq.format.codec import Codec
from edgeq.runtime import Model

ROWS, COLUMNS = 48, 160


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    """Correlated inputs [tokens, columns] with a few large channels."""
    mixed = torch.randn(400, COLUMNS, generator=generator(0)) @ torch.randn(COLUMNS, COLUMNS, generator=generator(1))
    mixed[:, ::37] *= 8
    return mixed / mixed.std()


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=generator(2))


def gptq(
    weight: torch.Tensor, x: torch.Tensor, recipe: Recipe, act_order: bool = False
) -> tuple[tuple[Quantized, ...], torch.Tensor]:
    factor = factorize(x.T @ x, recipe, act_order)
    assert factor is not None
    return quantize_matrix(weight, factor, recipe, "w")


def output_error(x: torch.Tensor, weight: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((x @ (rounded - weight).T).square().sum())


@pytest.mark.parametrize("columns", [64, 128, COLUMNS])
def test_visiting_integers_again_lowers_the_error(
    x: torch.Tensor, weight: torch.Tensor, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one block of columns is all of them."""
    x, weight, before = x[:, :columns].clone(), weight[:, :columns].clone(), weight[:, :columns].clone()
    recipe = Recipe(Codec("int", 3, 32, symmetric=False), MIN_MAX_ZERO_WEIGHED)
    visited = output_error(x, weight, gptq(weight, x, recipe)[1])
    assert torch.equal(weight, before)
    monkeypatch.setattr(columns_of_a_matrix, "SWEEPS", 0)
    assert visited < 0.95 * output_error(x, weight, gptq(weight, x, recipe)[1])


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 0])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_output_error_is_below_that_of_rounding(
    x: torch.Tensor, weight: torch.Tensor, bits: int, group_size: int, symmetric: bool, act_order: bool
) -> None:
    codec = Codec("int", bits, group_size, symmetric)
    _, rounded = gptq(weight, x, Recipe(codec, MIN_MAX_ZERO_WEIGHED), act_order)
    nearest = output_error(x, weight, fake(weight, codec, MIN_MAX_ZERO_WEIGHED))
    assert output_error(x, weight, rounded) < (0.95 if bits == 2 else 0.5) * nearest


@pytest.mark.parametrize("act_order", [False, True])
def test_the_returned_weight_is_what_the_integers_stand_for(x: torch.Tensor, weight: torch.Tensor, act_order: bool) -> None:
    (q,), rounded = gptq(weight, x, Recipe(Codec("int", 3, 32, symmetric=False), MIN_MAX_ZERO_WEIGHED), act_order)
    assert q.zero is not None
    scale, zero = (part.float().repeat_interleave(32, 1) for part in (q.scale, q.zero))
    assert torch.equal((q.q.float() - zero) * scale, rounded)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 0])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_half_grids_lose_less_than_rounding(
    x: torch.Tensor, weight: torch.Tensor, bits: int, group_size: int, act_order: bool
) -> None:
    """And what is returned is what the integers stand for."""
    codec = Codec("half", bits, group_size)
    (q,), rounded = gptq(weight, x, Recipe(codec, MIN_MAX_ZERO_WEIGHED), act_order)
    assert q.zero is None
    scale = q.scale.float().repeat_interleave(group_size or weight.shape[1], 1)[:, : weight.shape[1]]
    assert torch.equal((q.q.float() - ((1 << bits) - 1) / 2) * scale, rounded)
    nearest = output_error(x, weight, fake(weight, codec, MIN_MAX_ZERO_WEIGHED))
    assert output_error(x, weight, rounded) < (0.95 if bits == 2 else 0.5) * nearest


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scales_of_four_bits_are_settled_before_the_integers(
    x: torch.Tensor, weight: torch.Tensor, bits: int, act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is returned is what the file will hold, the sweeps lower the error, and groups of 32 lose less than the
    default, zero points and f16 scales in groups of 128, in fewer bytes.
    """
    codec, default = Codec("s4", bits, 32), Codec("int", bits, 128, symmetric=False)
    assert codec.nbytes(*weight.shape) < default.nbytes(*weight.shape)
    (q,), rounded = gptq(weight, x, Recipe(codec, MIN_MAX_ZERO_WEIGHED), act_order)
    assert torch.equal(restored(q, codec), rounded)
    loss = output_error(x, weight, rounded)
    assert loss < output_error(x, weight, gptq(weight, x, Recipe(default, MIN_MAX_ZERO_WEIGHED), act_order)[1])
    monkeypatch.setattr(columns_of_a_matrix, "SWEEPS", 0)
    assert loss < output_error(x, weight, gptq(weight, x, Recipe(codec, MIN_MAX_ZERO_WEIGHED), act_order)[1])


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (3, 0)])
def test_a_table_loses_less_than_a_half_grid_in_its_bytes(
    x: torch.Tensor, weight: torch.Tensor, bits: int, group_size: int, act_order: bool
) -> None:
    """Weights are those of a Gaussian; what is returned is what the file will hold."""
    table, half = Codec("table", bits, group_size), Codec("half", bits, group_size)
    gaussian = torch.randn(weight.shape, generator=generator(9))
    (q,), rounded = gptq(gaussian, x, Recipe(table, MIN_MAX_ZERO_WEIGHED), act_order)
    assert torch.equal(restored(q, table), rounded)
    loss = output_error(x, gaussian, rounded)
    assert loss < 0.97 * output_error(x, gaussian, gptq(gaussian, x, Recipe(half, MIN_MAX_ZERO_WEIGHED), act_order)[1])
    assert loss < 0.5 * output_error(x, gaussian, fake(gaussian, table, MIN_MAX_ZERO_WEIGHED))


@pytest.mark.parametrize("group_size", [64, 0])
def test_at_two_bits_a_half_grid_beats_zero_points_in_fewer_bytes(
    x: torch.Tensor, weight: torch.Tensor, group_size: int
) -> None:
    """In whole rows too, where the largest of many weights says little of the others."""
    half, zero = Codec("half", 2, group_size), Codec("int", 2, group_size, symmetric=False)
    losses = [output_error(x, weight, gptq(weight, x, Recipe(codec, MIN_MAX_ZERO_WEIGHED))[1]) for codec in (half, zero)]
    assert losses[0] < losses[1]
    assert half.nbytes(*weight.shape) < zero.nbytes(*weight.shape)


def test_act_order_fixes_the_grids_of_the_original_weights(
    x: torch.Tensor, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sweeps refit the scales of the other order.
    monkeypatch.setattr(columns_of_a_matrix, "SWEEPS", 0)
    codec = Codec("int", 4, 32, symmetric=False)
    (static,), _ = gptq(weight, x, Recipe(codec, MIN_MAX_ZERO_WEIGHED), act_order=True)
    (dynamic,), _ = gptq(weight, x, Recipe(codec, MIN_MAX_ZERO_WEIGHED))
    shuffled = torch.randperm(ROWS, generator=generator(6))
    (other,), _ = gptq(weight[shuffled], x, Recipe(codec, MIN_MAX_ZERO_WEIGHED), act_order=True)
    assert torch.equal(static.scale[shuffled], other.scale) and torch.equal(static.q[shuffled], other.q)
    whole = quantize(weight, codec, "w", MIN_MAX_ZERO_WEIGHED).scale
    assert (static.scale <= whole).all() and (static.scale < whole).any()
    # The errors taken over widen some of the groups that are reached later.
    assert (dynamic.scale[:, 1:] > whole[:, 1:]).any() and not (dynamic.scale[:, 0] > whole[:, 0]).any()


def test_the_range_of_a_group_is_searched_by_what_its_columns_cost(x: torch.Tensor, weight: torch.Tensor) -> None:
    """GPTQ over searched ranges loses less of the output than over whole ones."""
    codec = Codec("int", 3, 32, symmetric=False)
    _, searched = gptq(weight, x, Recipe(codec, MIN_MAX_ZERO_WEIGHED))
    _, whole = gptq(weight, x, Recipe(codec, Preset(zero_inside=True, full_range=True)))
    assert output_error(x, weight, searched) < 0.95 * output_error(x, weight, whole)


@pytest.mark.parametrize("act_order", [False, True])
def test_every_sweep_over_the_integers_lowers_the_error(
    x: torch.Tensor, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, act_order: bool
) -> None:
    recipe, errors = Recipe(Codec("int", 3, 32, symmetric=False), MIN_MAX_ZERO_WEIGHED), []
    for sweeps in (0, 1, 2):
        monkeypatch.setattr("edgeq.converters.rounding.columns.SWEEPS", sweeps)
        errors.append(output_error(x, weight, gptq(weight, x, recipe, act_order)[1]))
    assert errors[1] < 0.95 * errors[0] and errors[2] < errors[1]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 16), (2, 32), (3, 96), (4, 160), (8, 32)])
def test_a_refitted_scale_is_the_best_in_f16_for_its_integers(
    x: torch.Tensor, weight: torch.Tensor, bits: int, group_size: int, symmetric: bool
) -> None:
    """All integers are kept, so that the scales alone move; a shorter last group, zeros and extreme rows are among them."""
    wanted = weight.clone().numpy()
    wanted[0, 32:64], wanted[1], wanted[2], wanted[3] = 0, 0, wanted[2] * 1e-6, wanted[3] * 2e4
    moments = (x.T @ x).double().numpy()
    group_of = np.arange(COLUMNS) // group_size
    begins = np.zeros(COLUMNS, np.int64)
    begins[::group_size] = np.bincount(group_of)
    top, no_rows, no_table = np.float32(2**bits - 1), np.zeros(ROWS, np.float32), np.empty(0, np.float32)
    form = column_kernel.SYMMETRIC if symmetric else column_kernel.ASYMMETRIC
    scale, zero = np.empty((2, ROWS, len(np.unique(group_of))), np.float32)
    for group in range(scale.shape[1]):
        part = np.ascontiguousarray(wanted[:, group_of == group])
        costs = np.ones(part.shape[1], np.float32)
        grids = scale[:, group], zero[:, group], no_rows, no_table
        column_kernel.search_grids(part, costs, top, form, column_kernel.SHARES, *grids)
    before = scale.copy()
    steps = np.clip(np.rint(wanted / scale[:, group_of]) + zero[:, group_of], 0, top) - zero[:, group_of]
    integers = (steps + zero[:, group_of]).astype(np.uint8)
    kept, rounded = integers.copy(), (steps * scale[:, group_of]).astype(np.float32)
    gradient = ((rounded - wanted).astype(np.float64) @ moments).astype(np.float32)
    every = np.ones(COLUMNS, np.bool_)
    moments32 = moments.astype(np.float32)
    grids = scale, zero, no_rows, no_table
    column_kernel.improve_block(rounded, gradient, moments32, every, begins, group_of, *grids, top, integers)

    assert np.array_equal(integers, kept) and np.array_equal(rounded, (steps * scale[:, group_of]).astype(np.float32))
    assert np.array_equal(scale, scale.astype(np.float16)) and np.isfinite(scale).all()
    assert (scale >= before / 2).all() and (scale <= 2 * before).all() and (scale[4:] != before[4:]).mean() > 0.3
    assert np.array_equal(scale[1], before[1])
    exact = (rounded - wanted).astype(np.float64) @ moments
    assert (np.abs(gradient - exact).max(1) <= 1e-4 * np.abs(wanted.astype(np.float64) @ moments).max(1)).all()
    # Group after group, as the kernel goes: each ends at the least loss, as near as f16 and the bounds let it.
    changes = steps * before[:, group_of] - wanted.astype(np.float64)
    for group in range(scale.shape[1]):
        at = group_of == group
        bend = ((steps[:, at] @ moments[at][:, at]) * steps[:, at]).sum(1)
        downhill = ((changes @ moments)[:, at] * steps[:, at]).sum(1)
        change = scale[:, group].astype(np.float64) - before[:, group]
        assert (change * (2 * downhill + bend * change) <= 1e-9 * bend * before[:, group] ** 2).all()
        with np.errstate(invalid="ignore"):
            best = np.nan_to_num(before[:, group] - downhill / bend)
        inside = (best > 0.51 * before[:, group]) & (best < 1.99 * before[:, group]) & (before[:, group] > 1e-4)
        assert np.allclose(scale[inside, group], best[inside], rtol=2**-10 + 1e-4)
        changes[:, at] = steps[:, at] * scale[:, [group]] - wanted[:, at]


def test_with_uncorrelated_inputs_it_is_rounding_before_scales_are_refitted(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_of_a_matrix, "SWEEPS", 0)
    recipe = Recipe(Codec("int", 4, 32, symmetric=False), Preset(zero_inside=True, full_range=True))
    factor = factorize(torch.eye(COLUMNS), recipe, act_order=False)
    (q,), _ = quantize_matrix(weight, factor, recipe, "w")
    assert torch.equal(q.q, quantize(weight, recipe.codec, "w", MIN_MAX_ZERO_WEIGHED).q)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_rounding_has_the_same_bits_on_any_number_of_threads(
    x: torch.Tensor, weight: torch.Tensor, threads: int, act_order: bool
) -> None:
    recipe = Recipe(Codec("int", 3, 32, symmetric=False), MIN_MAX_ZERO_WEIGHED)
    factor = factorize(x.T @ x, recipe, act_order)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,), _ = quantize_matrix(weight, factor, recipe, "w")
        torch.set_num_threads(threads)
        (shared,), _ = quantize_matrix(weight, factor, recipe, "w")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone.q, shared.q) and torch.equal(alone.scale, shared.scale)


def test_without_a_factor_it_is_rounding_bit_for_bit(weight: torch.Tensor) -> None:
    recipe = Recipe(Codec("int", 3, 32, symmetric=True), MIN_MAX_ZERO_WEIGHED)
    (q,), rounded = quantize_matrix(weight, None, recipe, "w")
    plain = quantize(weight, recipe.codec, "w", MIN_MAX_ZERO_WEIGHED)
    assert torch.equal(q.q, plain.q) and torch.equal(q.scale, plain.scale)
    assert torch.equal(rounded, fake(weight, recipe.codec, MIN_MAX_ZERO_WEIGHED))


def test_columns_without_input_become_zero_and_take_no_error(x: torch.Tensor, weight: torch.Tensor) -> None:
    unused = x.clone()
    unused[:, 5:9] = 0
    _, rounded = gptq(weight, unused, Recipe(Codec("int", 4, 0, symmetric=True), MIN_MAX_ZERO_WEIGHED))
    assert not rounded[:, 5:9].any() and rounded[:, 9].any()


def test_a_second_block_has_its_own_grid_and_takes_over_error(
    x: torch.Tensor, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of ResQ: columns gathered by a constant order, the last ones in 8 bits, a scale per row and block."""
    monkeypatch.setattr(columns_of_a_matrix, "SWEEPS", 0)
    order = torch.randperm(COLUMNS, generator=generator(4)).numpy().astype(np.int32)
    low, high = Codec("int", 3, 0, symmetric=True), Codec("int", 8, 0, symmetric=True)
    recipe = Recipe(low, ABSMAX_SEARCH, high, 32, order=order)
    (first, second), rounded = gptq(weight, x, recipe)
    assert first.q.shape == (ROWS, 128) and second.q.shape == (ROWS, 32)
    assert torch.equal(first.scale, quantize(weight[:, order[:128]], low, "w", ABSMAX_SEARCH).scale)
    back = torch.cat([(first.q.float() - 4) * first.scale.float(), (second.q.float() - 128) * second.scale.float()], 1)
    assert torch.equal(back, rounded[:, order])
    plain, _ = quantize_matrix(weight, None, recipe, "w")
    nearest = torch.empty_like(weight)
    nearest[:, order] = torch.cat(
        [(p.q.float() - c.center) * p.scale.float() for p, c in zip(plain, (low, high), strict=True)], 1
    )
    assert output_error(x, weight, rounded) < 0.5 * output_error(x, weight, nearest)


def test_too_few_tokens_are_helped_by_damping(weight: torch.Tensor) -> None:
    few = torch.randn(3, COLUMNS, generator=generator(5))
    assert factorize(few.T @ few, Recipe(Codec("int", 4, 32)), act_order=True) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_hessian_that_cannot_be_factored_is_said_to_be_none(value: float) -> None:
    hessian = torch.eye(COLUMNS) * value if value in (-1.0, 0.0) else torch.full((COLUMNS, COLUMNS), value)
    assert factorize(hessian, Recipe(Codec("int", 4, 32)), act_order=False) is None


@pytest.mark.parametrize("family", ["llama_gqa", "qwen2"])
def test_a_decoder_layer_loses_less_of_its_output_than_by_rounding(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(200)))
    options = ConvertOptions(method="gptq", bits=3, group_size=32, calibration=text, calibration_length=64)
    plan = preflight(str(checkpoint(family)), options)
    assert plan.calibration is not None
    linears = tuple(item for item in plan.steps[1].items if isinstance(item, LinearItem))
    errors = []
    for method in ("gptq", "rtn"):
        forward = BlockForward(plan.checkpoint, plan.method.family, plan.method.config, plan.calibration.rows)
        layer, hidden = forward.load(0), forward.hidden
        exact = layer(hidden, **forward.attention_arguments(0))
        if method == "gptq":
            gptq_layer(Block(0, layer, linears, plan.checkpoint.rows, forward, print, "model.layers.0."), act_order=False)
            now = forward.hidden
        else:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.data = fake(module.weight.data, plan.method.codec(module.in_features), MIN_MAX_ZERO_WEIGHED)
            now = layer(hidden, **forward.attention_arguments(0))
        errors.append(float((now - exact).square().sum()))
    assert errors[0] < 0.8 * errors[1]


def test_a_layer_without_a_factor_is_rounded_with_one_line_that_names_it(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_o(hessian: torch.Tensor, recipe: Recipe, act_order: bool) -> object:
        return None if len(hessian) == 256 else factorize(hessian, recipe, act_order)

    monkeypatch.setattr("edgeq.converters.methods.gptq.factorize", only_o)
    text = tmp_path / "text.txt"
    text.write_text("import os\nprint(os.name)\n" * 20)
    said: list[str] = []
    options = ConvertOptions(method="gptq", group_size=32, calibration=text, head=8)
    folder = str(checkpoint("llama_gqa", max_position_embeddings=64))
    convert(folder, tmp_path / "o.edgeq", options, lambda *_: None, said.append)
    assert [line.split(":")[0] for line in said] == ["layers.0.down", "layers.1.down"]
    assert all("Cholesky failed" in line and "\n" not in line for line in said)


@pytest.mark.parametrize(
    "family",
    ["lfm2", "qwen3_5"]
    + [
        pytest.param(each, marks=pytest.mark.exhaustive)
        for each in ("granite_hybrid", "granite_hybrid_moe", "falcon_h1_norm", "nemotron_h")
    ],
)
def test_scales_are_folded_where_layers_have_states(checkpoint: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """Weights of 8 bits whose scales were not divided out again would give other logits."""
    few = {"bits": 8, "group_size": 32, "head": 16, "calibration_rows": 2, "calibration_length": 64}
    found = []
    for method, options in (("none", {}), ("awq+gptq", few)):
        path = tmp_path / f"{method}.edgeq"
        convert(str(checkpoint(family)), path, ConvertOptions(method=method, **options), lambda *_: None)
        with Model.load(path, target="reference", mode="a16", context=64, max_logits=40) as model:
            found.append(next(model.session().all_logits(list(range(5, 45)))))
    assert np.linalg.norm(found[1] - found[0]) < 0.1 * np.linalg.norm(found[0])
