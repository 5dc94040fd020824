"""Columns that the group size does not divide: the last group is shorter, or where no size was asked for a smaller one fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from edgeq.converters.calibration.moments import Moments
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.methods.awq import clip_limits
from edgeq.converters.planning.plan import QUICK
from edgeq.converters.rounding import quantizer
from edgeq.converters.rounding.columns import factorize, quantize_matrix
from edgeq.converters.rounding.linears import Recipe
from edgeq.converters.rounding.presets import ABSMAX_SEARCH, MIN_MAX, MIN_MAX_ZERO_WEIGHED, Preset, fitting_group_size
from edgeq.converters.rounding.quantizer import Quantized, fake, quantize
from edgeq.format.codec import Codec, unpack_groups, unpack_integers
from edgeq.format.container import ModelFile
from edgeq.runtime import Model

TEXT = Path(__file__).read_text(encoding="utf-8")
"""Text of many different tokens: GPTQ fits few so closely that the others lose."""
SMALL = {"hidden_size": 72, "intermediate_size": 172}
WIDE = {"hidden_size": 200, "intermediate_size": 400}
# Methods with their options, and how far the logits may be from those of the source, as a share of their spread.  With one
# group per output channel they are as far or a little farther; with the scale of another group they would be at 0.3 and more.
METHODS: list[Any] = [
    ({"method": "rtn", "bits": 8}, 0.045),
    pytest.param({"method": "awq", "bits": 8}, 0.045, marks=pytest.mark.exhaustive),
    pytest.param({"method": "gptq", "bits": 8}, 0.045, marks=pytest.mark.exhaustive),
    pytest.param({"method": "gptq", "bits": 8, "act_order": True}, 0.045, marks=pytest.mark.exhaustive),
    ({"method": "awq+gptq", "bits": 8}, 0.045),
    ({"method": "smoothquant", "activation_bits": 16}, 0.045),
    pytest.param({"method": "smoothquant+gptq", "activation_bits": 16}, 0.045, marks=pytest.mark.exhaustive),
    ({"method": "ttq", "bits": 5, "rank": 8}, 0.2),
    pytest.param({"method": "quarot", "bits": 8, "activation_bits": 16, "kv_bits": 16}, 0.045, marks=pytest.mark.exhaustive),
    pytest.param(
        {"method": "quarot", "bits": 8, "activation_bits": 16, "kv_bits": 16, "gptq": True}, 0.045, marks=pytest.mark.exhaustive
    ),
    ({"method": "resq", "bits": 8, "activation_bits": 16, "kv_bits": 16}, 0.045),
]


def silent(*_: object) -> None:
    pass


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def rounded_group(w: NDArray[np.float32], codec: Codec, preset: Preset) -> tuple[Any, Any, Any]:
    """q [rows, channels], scale and zero [rows] of one group, as the papers have it."""
    top, f32 = np.float32(2**codec.bits - 1), np.float32
    if preset.search:
        found = quantize(torch.from_numpy(w.copy()), Codec("int", codec.bits, 0, codec.symmetric), "w", preset)
        return found.q.numpy(), found.scale.numpy()[:, 0], np.full(len(w), codec.center)
    if codec.symmetric:
        steps = top / f32(2) if preset.full_range else f32(2 ** (codec.bits - 1) - 1)
        scale = (np.maximum(np.abs(w).max(1), f32(1e-5)) / steps).astype(np.float16)
        zero = np.full(len(w), codec.center, np.float32)
    else:
        low, high = w.min(1), w.max(1)
        if preset.zero_inside:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = (np.maximum(high - low, f32(1e-5)) / top).astype(np.float16)
        zero = np.clip(-np.rint(low / scale.astype(np.float32)), 0, top)
    q = np.clip(np.rint(w / scale.astype(np.float32)[:, None]) + zero[:, None], 0, top)
    return q, scale, zero


def searched_grid(w: NDArray[np.float32], costs: NDArray[np.float64]) -> tuple[Any, Any]:
    """Scale and zero [rows] in 4 bits of the share of each row's range, of 20 from 1 to 0.6, whose errors cost least."""
    low, high = np.minimum(w.min(1), 0), np.maximum(w.max(1), 0)
    found, errors = [], []
    for share in np.linspace(1, 0.6, 20, dtype=np.float32):
        scale = (np.maximum((high - low) * share, np.float32(1e-5)) / np.float32(15)).astype(np.float16)
        zero = np.clip(-np.rint(low * share / scale.astype(np.float32)), 0, 15)
        q = np.clip(np.rint(w / scale.astype(np.float32)[:, None]) + zero[:, None], 0, 15)
        found.append((scale, zero))
        errors.append((((q - zero[:, None]) * scale.astype(np.float64)[:, None] - w) ** 2 * costs).sum(1))
    best, rows = np.argmin(errors, 0), np.arange(len(w))
    return tuple(np.stack([grid[i] for grid in found])[best, rows] for i in (0, 1))


def group_by_group(w: NDArray[np.float32], codec: Codec, preset: Preset) -> tuple[Any, Any, Any]:
    """q [rows, columns], scale and zero [rows, groups]."""
    size = codec.group_size or w.shape[1]
    groups = [rounded_group(w[:, start : start + size], codec, preset) for start in range(0, w.shape[1], size)]
    q, scale, zero = zip(*groups, strict=True)
    return np.concatenate(q, 1), np.stack(scale, 1), np.stack(zero, 1)


def assert_same(found: Quantized, expected: tuple[Any, Any, Any]) -> None:
    q, scale, zero = expected
    assert np.array_equal(found.q.numpy(), q) and np.array_equal(found.scale.numpy(), scale)
    assert found.zero is None or np.array_equal(found.zero.numpy(), zero)


PRESETS = {"awq": MIN_MAX, "gptq": MIN_MAX_ZERO_WEIGHED, "quarot": ABSMAX_SEARCH}


@pytest.mark.parametrize(
    ("preset", "size", "columns"),
    [
        # Every width with every size, and with every preset.
        pytest.param(
            preset, size, columns, marks=() if (i + j + k) % 3 == 0 else pytest.mark.exhaustive, id=f"{name}-{size}-{columns}"
        )
        for i, (name, preset) in enumerate(PRESETS.items())
        for j, size in enumerate((16, 32, 128))
        for k, columns in enumerate((9, 72, 172, 200, 400))
    ],
)
def test_every_group_is_rounded_for_itself(columns: int, size: int, preset: Preset) -> None:
    weight = torch.randn(20, columns, generator=torch.Generator().manual_seed(columns))
    for symmetric in (True,) if preset == ABSMAX_SEARCH else (True, False):
        codec = Codec("int", 4, size, symmetric)
        found = quantize(weight, codec, "w", preset)
        assert found.scale.shape == (20, -(-columns // size))
        assert_same(found, group_by_group(weight.numpy(), codec, preset))
        q, scale, zero = (a.astype(np.float32) for a in group_by_group(weight.numpy(), codec, preset))
        back = (q - np.repeat(zero, size, 1)[:, :columns]) * np.repeat(scale, size, 1)[:, :columns]
        assert np.array_equal(fake(weight, codec, preset).numpy(), back)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("columns", "size"), [(72, 16), (72, 32), (72, 128), (172, 32), (200, 128)])
def test_gptq_rounds_column_by_column_over_groups_with_a_short_last_one(
    monkeypatch: pytest.MonkeyPatch, columns: int, size: int, act_order: bool
) -> None:
    monkeypatch.setattr("edgeq.converters.rounding.columns.SWEEPS", 0)
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(24, columns, generator=generator)
    x = torch.randn(600, columns, generator=generator) @ torch.randn(columns, columns, generator=generator) / columns**0.5
    codec = Codec("int", 4, size, symmetric=False)
    factor = factorize(x.T @ x, Recipe(codec, MIN_MAX_ZERO_WEIGHED), act_order)
    assert factor is not None
    (found,), rounded = quantize_matrix(weight, factor, Recipe(codec, MIN_MAX_ZERO_WEIGHED), "w")
    # The algorithm of the paper without its blocks, in float64.
    w, q = weight.double().numpy().copy(), np.zeros(weight.shape)
    order, grids = factor.order.numpy(), {}
    damped = (x.T @ x).double().numpy() + 0.01 * (x.T @ x).diagonal().mean().item() * np.eye(columns)
    u = np.linalg.cholesky(np.linalg.inv(damped)[order][:, order], upper=True)
    costs = np.empty(columns)
    costs[order] = 1 / u.diagonal() ** 2
    for i, column in enumerate(order):
        group = column // size
        if group not in grids:
            now = weight.numpy() if act_order else w.astype(np.float32)
            own = slice(group * size, (group + 1) * size)
            grids[group] = searched_grid(now[:, own], costs[own])
        scale, zero = (a.astype(np.float64) for a in grids[group])
        q[:, column] = np.clip(np.rint(w[:, column] / scale) + zero, 0, 15)
        error = (w[:, column] - (q[:, column] - zero) * scale) / u[i, i]
        w[:, order[i + 1 :]] -= np.outer(error, u[i, i + 1 :])
    # A float32 sum in another order moves a weight over a rounding boundary now and then, and with it those after it.
    assert (found.q.numpy() == q).mean() > 0.99
    assert found.scale.shape == (24, -(-columns // size))
    plain = fake(weight, codec, MIN_MAX_ZERO_WEIGHED)
    assert (x @ (rounded - weight).T).square().sum() < (x @ (plain - weight).T).square().sum()


def test_clipping_treats_a_short_last_group_like_a_matrix_of_its_own() -> None:
    generator, codec = torch.Generator().manual_seed(3), Codec("int", 3, 32, symmetric=False)
    weight, x = torch.randn(300, 72, generator=generator), torch.randn(50, 72, generator=generator)
    scale = torch.rand(72, generator=generator) + 0.5

    def limits(columns: slice) -> torch.Tensor:
        moments = Moments(columns.stop - columns.start)
        moments.add(x[:, columns])
        return clip_limits(weight[:, columns], moments, codec, scale[columns])

    parts = [limits(slice(0, 64)), limits(slice(64, 72))]
    assert torch.allclose(limits(slice(0, 72)), torch.cat(parts, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "group_size"),
    [pytest.param(SMALL, 32, id="72x172"), pytest.param(WIDE, 128, id="200x400", marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(
    ("options", "bound"), METHODS, ids=lambda x: "+".join(map(str, x.values())) if isinstance(x, dict) else ""
)
def test_a_file_of_odd_widths_has_the_codes_of_its_groups_and_the_logits_of_its_source(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int],
    group_size: int,
    options: dict[str, Any],
    bound: float,
) -> None:
    checked: list[tuple[int, int]] = []

    def checking(weight: torch.Tensor, codec: Codec, name: str, preset: Preset = MIN_MAX) -> Quantized:
        found = quantize(weight, codec, name, preset)
        checked.append((weight.shape[1], codec.group_size))
        if len(checked) <= 12:
            assert_same(found, group_by_group(weight.numpy(), codec, preset))
        return found

    monkeypatch.setattr(quantizer, "quantize", checking)
    folder = checkpoint("llama_gqa", num_key_value_heads=4, **sizes)
    calibrated = options["method"] not in ("rtn", "ttq", "quarot") or options.get("gptq")
    chosen = {"group_size": group_size, "head": 8, **options} | ({"calibration": text} if calibrated else {})
    file = convert(str(folder), tmp_path / "o.edgeq", ConvertOptions(**chosen), silent)
    assert "gptq" in options["method"] or options.get("gptq") or len(checked) >= 8
    down = file.metadata.linears["layers.0.down"].weights[0]
    assert down.codec.group_size == group_size
    assert down.arrays["scale"].shape[1] == -(-sizes["intermediate_size"] // group_size)

    tokens = torch.randint(0, 2048, (1, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits[0].numpy()
    model = Model.load(file.path, target="reference", mode="a16", context=64)
    logits = np.concatenate(list(model.session().all_logits(tokens[0].tolist())))
    assert np.abs(logits - expected).mean() < bound * expected.std()


def test_rounding_stores_the_codes_of_the_source(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("llama_gqa", num_key_value_heads=4, **SMALL)
    file = convert(str(folder), tmp_path / "o.edgeq", ConvertOptions(group_size=32), silent)
    source = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float().numpy()
    weight = file.metadata.linears["layers.1.down"].weights[0]
    q, scale, zero = group_by_group(source, weight.codec, MIN_MAX)
    assert scale.shape == (72, 6)
    assert np.array_equal(unpack_integers(file.array(weight.arrays["q"]), 72, 172), q)
    assert np.array_equal(unpack_groups(file.array(weight.arrays["scale"]), 72), scale)
    assert np.array_equal(unpack_groups(file.array(weight.arrays["zero"]), 72), zero)


def sizes_of(file: ModelFile) -> dict[str, int]:
    return {name.removeprefix("layers.0."): x.weights[0].codec.group_size for name, x in file.metadata.linears.items()}


def test_without_a_group_size_the_largest_that_divides_is_taken(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, lines = checkpoint("llama_gqa", hidden_size=192, intermediate_size=172), list[str]()
    file = convert(str(folder), tmp_path / "o.edgeq", ConvertOptions(), silent, lines.append)
    assert {name: size for name, size in sizes_of(file).items() if "." not in name} == {
        "qkv": 64,
        "o": 64,
        "gate_up": 64,
        "down": 128,
        "head": 64,
    }
    assert lines == [
        QUICK,
        "qkv, o, gate_up: group size 128 does not divide 192 input channels: groups of 64",
        "down: group size 128 does not divide 172 input channels: groups of 128, the last group of each output channel has 44",
    ]
    options = file.metadata.provenance["options"]
    assert isinstance(options, dict) and options["group_size"] == 128


def test_a_group_size_asked_for_is_kept(checkpoint: Callable[..., Path]) -> None:
    folder = str(checkpoint("llama_gqa", intermediate_size=288))
    plan = preflight(folder, ConvertOptions(method="rtn", group_size=64))
    assert {linear.weights[0].codec.group_size for name, linear in plan.contents.linears.items() if name != "head"} == {64}
    assert plan.notes() == [
        "down: group size 64 does not divide 288 input channels: groups of 64, the last group of each output channel has 32"
    ]
    assert (
        not preflight(folder, ConvertOptions(method="rtn", group_size=32)).notes()
        and not preflight(folder, ConvertOptions(bits=8, group_size=0)).notes()
    )


def test_a_method_takes_no_larger_groups_than_its_default() -> None:
    assert [fitting_group_size(columns) for columns in (4096, 576, 96, 48, 72)] == [128, 64, 32, 16, 128]
    assert [fitting_group_size(columns, 32) for columns in (4096, 48, 72)] == [32, 16, 32]
