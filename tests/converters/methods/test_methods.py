"""What each method puts into a file, and which options it has a use for."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.convert import ConvertOptions, convert, preflight
from edgeq.converters.families import recognise
from edgeq.converters.method import Block
from edgeq.converters.methods import METHODS, chosen
from edgeq.converters.methods.smoothquant import smooth, smoothing
from edgeq.converters.methods.ttq import factors, shared_rank
from edgeq.converters.planning.method_options import CALIBRATED, DEFAULTS
from edgeq.converters.rounding.linears import LinearItem, Recipe
from edgeq.converters.rounding.presets import ABSMAX_SEARCH, MIN_MAX, MIN_MAX_ZERO_WEIGHED, Preset
from edgeq.converters.rounding.quantizer import fake, quantize
from edgeq.errors import InputError
from edgeq.format.codec import Codec, dequantize
from edgeq.format.container import ModelFile
from edgeq.format.records import Activation, Weight

TEXT = "import os\nfor name in os.listdir('.'):\n    print(name)\n" * 60


def silent(*_: object) -> None:
    pass


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def matrix(file: ModelFile, w: Weight) -> torch.Tensor:
    arrays = {name: file.array(ref) for name, ref in w.arrays.items()}
    return torch.from_numpy(np.array(dequantize(w.codec, w.rows, w.columns, arrays)))


def source(folder: Path, layer: int, *modules: str) -> torch.Tensor:
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[f"model.layers.{layer}.{module}.weight"].float() for module in modules])


QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")


# TTQ.


@pytest.mark.parametrize(("master", "codec", "error"), [("i8", "i8 g128", 0.005), ("bf16", "bf16", 0.003)])
def test_ttq_stores_low_rank_master_and_the_rounded_residual(
    checkpoint: Callable[..., Path], tmp_path: Path, master: Any, codec: str, error: float
) -> None:
    folder = checkpoint("llama_gqa")
    options = ConvertOptions(method="ttq", bits=3, rank=8, master=master)
    file = convert(str(folder), tmp_path / "o.edgeq", options, silent)
    for name, modules, rank in (("qkv", QKV, 16), ("down", ("mlp.down_proj",), 8)):
        linear, want = file.metadata.linears[f"layers.1.{name}"], source(folder, 1, *modules)
        assert linear.low_rank is not None and linear.master is not None
        assert (linear.low_rank.a.codec.name, linear.low_rank.b.codec.name, linear.master.codec.name) == ("f16", "f16", codec)
        b, a = matrix(file, linear.low_rank.b), matrix(file, linear.low_rank.a)
        assert b.shape == (len(want), rank) and a.shape == (rank, want.shape[1])
        residual = want - b @ a
        assert linear.weights[0].codec.name == "i3 g32 zero"
        assert torch.equal(matrix(file, linear.weights[0]), fake(residual, linear.weights[0].codec))
        assert (matrix(file, linear.master) - residual).abs().max() < error * residual.abs().max()
        best = torch.linalg.svdvals(want)[rank:].square().sum().sqrt()
        assert residual.norm() < 1.002 * best
    assert file.metadata.linears["head"].master is None and file.metadata.provenance["calibration"] is None


def test_ttq_without_rank_has_the_weights_of_rounding(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(checkpoint("llama_gqa"))
    ttq = convert(folder, tmp_path / "a.edgeq", ConvertOptions(method="ttq", bits=3, rank=0), silent)
    rtn = convert(folder, tmp_path / "b.edgeq", ConvertOptions(bits=3, group_size=32), silent)
    ours, theirs = (file.metadata.linears["layers.0.gate_up"] for file in (ttq, rtn))
    assert ours.low_rank is None and ours.master is not None
    assert set(ours.weights[0].arrays) == {"q", "scale", "zero"}
    for name, array in ours.weights[0].arrays.items():
        assert np.array_equal(ttq.array(array), rtn.array(theirs.weights[0].arrays[name]))


@pytest.mark.parametrize(
    ("rank", "parts", "columns", "shared"),
    [
        (16, [2048, 512, 512], 2048, 32),  # 16 (3072 + 3 * 2048) / (3072 + 2048) = 28.8
        (16, [8192, 8192], 2048, 16),
        (16, [2048], 8192, 16),
        (64, [2048, 512, 512], 2048, 112),
        (24, [2048], 2048, 24),
        (0, [2048, 512, 512], 2048, 0),
    ],
)
def test_fused_matrices_share_a_pair_as_large_as_their_own(rank: int, parts: list[int], columns: int, shared: int) -> None:
    assert shared_rank(rank, parts, columns) == shared


def test_streamed_factors_are_the_singular_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.converters.checkpoint.slabs.SLAB_BYTES", 4 * 96 * 16)
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 40, generator=generator)).Q for n in (80, 96))
    s = 0.7 ** torch.arange(40.0)
    w = (u * s) @ v.T
    item = LinearItem("x", (("a", 50), ("b", 30)), 96, Recipe(Codec("int", 4, 32)))
    rows = {"a": w[:50].numpy(), "b": w[50:].numpy()}
    b, a = factors(item, lambda name, start, stop: rows[name][start:stop], 6)
    assert torch.allclose(b @ a, (u[:, :6] * s[:6]) @ v[:, :6].T, atol=1e-5)
    # Both carry the root of the singular value: neither leaves the range of f16 alone.
    assert torch.allclose(b.norm(dim=0), s[:6].sqrt(), atol=1e-4) and torch.allclose(a.norm(dim=1), s[:6].sqrt(), atol=1e-4)


# SmoothQuant.


def test_smoothquant_keeps_the_function_and_runs_with_8_bit_activations(
    checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    folder = checkpoint("llama_gqa", max_position_embeddings=64)
    file = convert(str(folder), tmp_path / "o.edgeq", ConvertOptions(method="smoothquant", calibration=text), silent)
    assert file.metadata.default_mode == "a8" and file.metadata.provenance["quantizer"] == "absmax"
    gain = file.metadata.arrays["layers.0.mlp_norm"]
    assert gain.dtype == "f32"
    linear = file.metadata.linears["layers.0.gate_up"]
    assert linear.activation == Activation(8) and linear.weights[0].codec.name == "i8 row"
    tensors = load_file(folder / "model.safetensors")
    want = source(folder, 0, "mlp.gate_proj", "mlp.up_proj") * tensors["model.layers.0.post_attention_layernorm.weight"].float()
    found = matrix(file, linear.weights[0]) * torch.from_numpy(np.array(file.array(gain)))
    assert (found - want).abs().max() < 0.02 * want.abs().max()
    down = matrix(file, file.metadata.linears["layers.0.down"].weights[0])
    assert torch.equal(down, fake(source(folder, 0, "mlp.down_proj"), Codec("int", 8, 0), MIN_MAX))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama_mha", {}),
        ("llama_gqa", {"head_dim": 32}),
        ("qwen2", {"head_dim": 64}),
        ("qwen3", {"head_dim": 128}),
        ("opt", {}),
        ("mixtral", {}),
    ],
)
def test_smoothing_without_rounding_leaves_the_layer_as_it_was(
    checkpoint: Callable[..., Path], text: Path, family: str, overrides: dict[str, Any]
) -> None:
    plan = preflight(str(checkpoint(family, **overrides)), ConvertOptions(method="smoothquant", calibration=text, alpha=0.8))
    assert plan.calibration is not None
    described = plan.method.family
    forward = BlockForward(plan.checkpoint, described, plan.method.config, plan.calibration.rows[:, :64])
    layer, arguments = forward.load(0), forward.attention_arguments(0)
    before, gain = layer(forward.hidden, **arguments), layer.get_parameter("input_layernorm.weight").clone()
    smooth(
        Block(0, layer, (), plan.checkpoint.rows, forward, silent, "model.layers.0."),
        described.awq_mappings(0),
        0.8,
    )
    assert not torch.equal(layer.get_parameter("input_layernorm.weight"), gain)
    assert (layer(forward.hidden, **arguments) - before).abs().max() < 1e-4 * before.abs().max()


def test_alpha_says_how_much_of_the_range_moves() -> None:
    largest, weight = torch.tensor([4.0, 1.0, 0.0]), torch.tensor([[1.0, 0.5, 0.1], [-0.25, 0.125, 0.1]])
    assert torch.allclose(smoothing(largest, [weight], 0.5), torch.tensor([2.0, 2**0.5, 1.0]))
    assert torch.allclose(smoothing(largest, [weight], 1.0), torch.tensor([4.0, 1.0, 1.0]))


# Presets.


def test_presets_differ_as_their_papers_do() -> None:
    positive = torch.linspace(0.5, 1.5, 16)[None]
    asymmetric, symmetric = Codec("int", 4, 16, False), Codec("int", 4, 16, True)
    awq, gptq = (quantize(positive, asymmetric, "w", preset) for preset in (MIN_MAX, MIN_MAX_ZERO_WEIGHED))
    assert awq.scale.item() == pytest.approx(1 / 15, rel=1e-3) and gptq.scale.item() == pytest.approx(1.5 / 15, rel=1e-3)
    assert quantize(positive, symmetric, "w", MIN_MAX).scale.item() == pytest.approx(1.5 / 7, rel=1e-3)
    assert quantize(positive, symmetric, "w", MIN_MAX_ZERO_WEIGHED).scale.item() == pytest.approx(3 / 15, rel=1e-3)
    names = [
        preset.title(codec) for preset in (MIN_MAX, MIN_MAX_ZERO_WEIGHED, ABSMAX_SEARCH) for codec in (asymmetric, symmetric)
    ]
    assert names == ["min-max", "absmax", "min-max-zero-weighed", "absmax-full-weighed", "min-max-search", "absmax-search"]


@pytest.mark.parametrize("codec", [Codec("int", 3, 0, True), Codec("int", 4, 32, False)], ids=lambda c: c.name)
def test_the_searched_range_never_loses_more_than_the_whole_one(codec: Codec) -> None:
    weight = torch.randn(20, 128, generator=torch.Generator().manual_seed(3))
    weight[:, 9] *= 5

    def loss(preset: Preset) -> torch.Tensor:
        error = (fake(weight, codec, preset) - weight).abs().pow(2.4)
        return error.reshape(20, codec.groups(128), -1).sum(-1)

    searched, whole = loss(ABSMAX_SEARCH), loss(MIN_MAX)
    assert (searched <= whole * (1 + 1e-5)).all() and searched.mean() < 0.97 * whole.mean()


# Options.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 8}, r"--rank goes with --method ttq; --method rtn has no use for it"),
        ({"method": "awq", "master": "i8"}, r"--master goes with --method ttq"),
        ({"method": "ttq", "alpha": 0.5}, r"--alpha goes with --method smoothquant"),
        ({"method": "gptq", "rank": 0}, r"--rank"),
        ({"act_order": True}, r"--act-order goes with --method gptq"),
        ({"method": "ttq", "act_order": False}, r"--act-order"),
        ({"method": "none", "bits": 4}, r"--bits W goes with"),
        ({"method": "ttq", "bits": 8}, r"8 bits are not supported by ttq; choose 2 to 5"),
        ({"method": "ttq", "rank": 300}, r"--rank 300: choose 0 to 256"),
        ({"method": "ttq", "master": "f16"}, r"--master 'f16'.*i8, bf16"),
        ({"method": "smoothquant", "alpha": 1.5}, r"--alpha 1.5: choose 0 to 1"),
        ({"calibration_rows": 0}, r"--calibration-rows 0: choose 1 to 4096"),
        ({"method": "none", "calibration_length": 64}, r"--calibration-length goes with --method rtn"),
        ({"method": "quarot", "half": True}, r"--half goes with --method rtn, awq, gptq, awq\+gptq; --method quarot"),
        ({"half": True, "symmetric": True}, r"--half has neither zero points nor an integer for zero"),
        ({"half": True, "symmetric": False}, r"give it or --sym/--asym"),
        ({"scale_bits": 4}, r"--scale-bits 4 needs --half"),
        ({"table": True, "half": True}, r"--table has entries that say where zero is"),
        ({"table": True, "symmetric": True}, r"give it, --half or --sym/--asym"),
        ({"table": True, "bits": 5}, r"at most 16 entries: 5 bits are not supported; choose 2, 3 or 4"),
        ({"table": True, "scale_bits": 4}, r"--scale-bits 4 needs --half"),
        ({"method": "ttq", "table": True}, r"--table goes with --method rtn, awq, gptq, awq\+gptq; --method ttq"),
        ({"trellis": True}, r"--trellis stores 2 or 3 bits, 4 are the default: give --bits 2 or --bits 3"),
        ({"trellis": True, "bits": 5}, r"stores 2 or 3 bits, 5 were asked for"),
        ({"trellis": True, "bits": 2, "half": True}, r"give it, --table, --half or --sym/--asym"),
        ({"trellis": True, "bits": 2, "symmetric": True}, r"give it, --table, --half or --sym/--asym"),
        ({"trellis": True, "bits": 2, "scale_bits": 4}, r"--trellis has scales of 4 bits whatever else is given"),
        ({"trellis": True, "bits": 2, "group_size": 0}, r"--trellis needs groups"),
        (
            {"method": "ttq", "trellis": True, "bits": 2},
            r"--trellis goes with --method rtn, awq, gptq, awq\+gptq; --method ttq",
        ),
        ({"half": True, "scale_bits": 4, "group_size": 0}, r"--scale-bits 4 needs groups"),
        ({"half": True, "scale_bits": 8}, r"--scale-bits 8: not supported; choose 4, 16"),
        ({"activation_bits": 5}, r"5 bits of activations: not supported; choose 4, 6, 8, 16"),
        ({"kv_bits": 5}, r"a cache of 5 bits: not supported; choose 3, 4, 8, 16"),
    ],
)
def test_an_option_that_the_method_has_no_use_for_is_refused_with_the_reason(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        chosen(ConvertOptions(**options))


def test_the_tables_of_options_are_those_of_the_methods(checkpoint: Callable[..., Path]) -> None:
    assert tuple(METHODS) == tuple(DEFAULTS)
    family, config = recognise(json.loads((checkpoint("llama_gqa") / "config.json").read_text()))
    made = {name: kind(ConvertOptions(method=name), family, config) for name, kind in METHODS.items()}
    assert tuple(name for name, method in made.items() if method.calibrates or method.studies) == CALIBRATED


def test_an_option_that_is_not_given_has_the_methods_default() -> None:
    def completed(method: str) -> ConvertOptions:
        return ConvertOptions(method=method).completed(DEFAULTS[method])

    ttq, smooth, rtn = completed("ttq"), completed("smoothquant"), completed("rtn").recorded()
    assert (ttq.bits, ttq.group_size, ttq.rank, ttq.master) == (4, 32, 16, "i8")
    assert (smooth.bits, smooth.activation_bits, smooth.group_size, smooth.symmetric) == (8, 8, 0, True)
    assert "rank" not in rtn and rtn["group_size"] == 128


@pytest.mark.parametrize(("bits", "mode"), [(16, "a16"), (8, "a8"), (4, "a4"), (None, "a16")])
def test_the_bits_of_activations_are_the_default_mode(
    checkpoint: Callable[..., Path], tmp_path: Path, bits: int | None, mode: str
) -> None:
    options = ConvertOptions(activation_bits=bits, kv_bits=8)
    metadata = convert(str(checkpoint("llama_gqa")), tmp_path / "o.edgeq", options, silent).metadata
    assert metadata.default_mode == mode and metadata.kv.kind == "int8"


def test_calibration_has_the_rows_and_the_length_asked_for(
    checkpoint: Callable[..., Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint("llama_gqa"))
    plan = preflight(folder, ConvertOptions(method="gptq", calibration=text, calibration_rows=3, calibration_length=32))
    assert plan.calibration is not None and plan.calibration.rows.shape == (3, 32)
    with pytest.raises(InputError, match="--calibration-length 600: this model takes at most 512"):
        preflight(folder, ConvertOptions(method="gptq", calibration=text, calibration_length=600))
    long = text.with_name("long.txt")
    long.write_bytes(b"x" * 5000)
    monkeypatch.setattr("edgeq.converters.calibration.dataset.MAX_BYTES", 4999)
    with pytest.raises(InputError, match=r"longer than 0 MiB, .* head -c 0M long.txt"):
        preflight(folder, ConvertOptions(method="gptq", calibration=long))
    with pytest.raises(InputError, match="rtn reads no calibration text unless --calibration"):
        preflight(folder, ConvertOptions(calibration_rows=3))


def test_a_rank_beyond_the_narrowest_matrix_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="narrowest matrix has 128 channels"):
        preflight(str(checkpoint("llama_gqa")), ConvertOptions(method="ttq", rank=200))


def test_the_groups_of_a_weight_block_end_with_it() -> None:
    recipe = Recipe(Codec("int", 4, 64), high=Codec("int", 8, 0), high_columns=32)
    blocks = [(codec.groups(block.stop - block.start), block) for codec, block in recipe.blocks(128)]
    assert blocks == [(2, slice(0, 96)), (1, slice(96, 128))]


# Interrupted.


class Crash(Exception):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {"method": "gptq", "group_size": 32, "act_order": True},
        pytest.param({"method": "gptq", "group_size": 64}, marks=pytest.mark.exhaustive),
        pytest.param({"method": "awq+gptq", "bits": 3, "group_size": 32}, marks=pytest.mark.exhaustive),
        pytest.param({"method": "smoothquant", "bits": 4}, marks=pytest.mark.exhaustive),
        pytest.param({"method": "smoothquant+gptq", "bits": 4}, marks=pytest.mark.exhaustive),
        {"method": "ttq", "rank": 4},
    ],
    ids=lambda o: str(o["method"]),
)
def test_interrupted_between_any_steps_it_goes_on_to_the_same_bytes(
    checkpoint: Callable[..., Path], tmp_path: Path, text: Path, options: dict[str, Any]
) -> None:
    folder = str(checkpoint("qwen2", max_position_embeddings=64, intermediate_size=160))
    if options["method"] != "ttq":
        options = {**options, "calibration": text, "calibration_rows": 3}
    chosen = ConvertOptions(head=8, **options)
    whole = convert(folder, tmp_path / "whole.edgeq", chosen, silent).path.read_bytes()
    seen: set[str] = set()

    def stop_at_each_step_once(done: float, total: float, label: str) -> None:
        if label not in seen:
            seen.add(label)
            raise Crash

    output = tmp_path / "o.edgeq"
    for _ in range(16):
        with suppress(Crash):
            convert(folder, output, chosen, stop_at_each_step_once)
    assert output.read_bytes() == whole and len(seen) >= 5
    assert not list(tmp_path.glob("*partial*"))
