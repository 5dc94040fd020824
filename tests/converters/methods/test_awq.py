"""AWQ: what must hold whatever the weights are (self-tests a, b and e of the algorithm's description), for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.moments import Moments, has_bf16
from edgeq.converters.calibration.staged import StagedLayer, sites
from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.families import LINEARS, recognise
from edgeq.converters.importers import open_source
from edgeq.converters.methods.awq import apply_scale, awq, clamp, clip_limits, search_scale
from edgeq.converters.rounding.quantizer import fake
from edgeq.format.codec import Codec

FAMILIES = ("llama_mha", "llama_gqa", "llama3_rope", "mistral", "qwen2", "qwen3", "smollm3")
CODEC = Codec("int", 3, 32, symmetric=False)


def opened(folder: Path) -> tuple[Checkpoint, Any, Any]:
    source = Checkpoint(open_source(str(folder), HubAccess()))
    family, config = recognise(source.config)
    source.rename(family.description.renamed)
    source.arrange(family.sources())
    return source, family, config


def tokens(rows: int = 3, length: int = 48) -> torch.Tensor:
    return torch.randint(0, 2048, (rows, length), generator=torch.Generator().manual_seed(5))


def first_layer(folder: Path) -> tuple[Any, Any, Any, StagedLayer]:
    """(family, config, first decoder layer, its run over some tokens)."""
    source, family, config = opened(folder)
    blocks = BlockForward(source, family, config, tokens())
    layer = blocks.load(0)
    return family, config, layer, StagedLayer(blocks, 0, layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_block_by_block_gives_the_hidden_states_of_transformers(checkpoint: Callable[..., Path], family: str) -> None:
    folder = checkpoint(family)
    source, described, config = opened(folder)
    blocks = BlockForward(source, described, config, tokens())
    for index in range(config.num_hidden_layers):
        layer = blocks.load(index)
        blocks.advance(index, layer)
        blocks.unload(layer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model.model(tokens()).last_hidden_state
        assert torch.allclose(model.model.norm(blocks.hidden), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "overrides"), [*((f, {}) for f in FAMILIES), ("qwen2", {"num_key_value_heads": 4})], ids=lambda x: str(x)
)
def test_folding_scales_without_rounding_leaves_the_logits_unchanged(
    checkpoint: Callable[..., Path], family: str, overrides: dict[str, Any]
) -> None:
    folder = checkpoint(family, **overrides)
    _, described, config = opened(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        before = model(tokens()).logits
        for index, layer in enumerate(model.model.layers):
            for mapping in described.awq_mappings(index):
                columns = layer.get_submodule(LINEARS[mapping.consumers[0]]).weight.shape[1]
                apply_scale(layer, mapping, torch.rand(columns, generator=generator) * 3 + 0.2)
        after = model(tokens()).logits
    assert (after - before).abs().max() < 1e-3 * before.abs().max()


def test_value_to_output_is_folded_only_without_grouped_query_attention(checkpoint: Callable[..., Path]) -> None:
    for family, folds in (("llama_mha", True), ("llama_gqa", False), ("mistral", False), ("qwen3", False)):
        _, described, config = opened(checkpoint(family))
        assert ("v" in {m.absorber for m in described.awq_mappings(0)}) is folds, family


@pytest.mark.parametrize("family", ["llama_mha", "qwen2"])
def test_the_searched_scale_never_loses_more_than_plain_rounding(checkpoint: Callable[..., Path], family: str) -> None:
    """Measured at the outputs of the consumers, over inputs observed in a forward of the whole layer."""
    described, config, layer, run = first_layer(checkpoint(family))
    for mapping in described.awq_mappings(0):
        linears = [layer.get_submodule(LINEARS[part]) for part in mapping.consumers]
        original = [linear.weight.data.clone() for linear in linears]
        scale = search_scale(run, layer, mapping, lambda path: CODEC)
        assert all(torch.equal(linear.weight, w) for linear, w in zip(linears, original, strict=True))
        x = torch.cat([x for x, _ in run.inputs(LINEARS[mapping.consumers[0]])])
        losses = [
            sum(float((x @ (fake(w * s, CODEC) / s - w).T).square().sum()) for w in original)
            for s in (scale, torch.ones_like(scale))
        ]
        assert losses[0] <= losses[1] * (1 + 1e-5) and losses[1] > 0


def test_no_scale_is_searched_for_what_stays_in_floats(checkpoint: Callable[..., Path]) -> None:
    described, config, layer, run = first_layer(checkpoint("llama_gqa"))
    for mapping in described.awq_mappings(0):
        found = search_scale(run, layer, mapping, lambda path: Codec("bf16"))
        assert found.shape == (layer.get_submodule(LINEARS[mapping.consumers[0]]).in_features,) and (found == 1).all()


def test_channels_with_large_activations_get_a_larger_scale(checkpoint: Callable[..., Path]) -> None:
    described, config, layer, run = first_layer(checkpoint("llama_gqa"))
    layer.input_layernorm.weight.data[5] *= 100
    scale = search_scale(run, layer, described.awq_mappings(0)[0], lambda path: Codec("int", 2, 128, symmetric=False))
    assert scale.argmax() == 5 and scale[5] > 1


@pytest.mark.parametrize(
    "family",
    [
        "llama_mha",
        "qwen2",
        "smollm3",
        "opt",
        "lfm2",
        "qwen3_5",
        "granite_hybrid",
        "granite_hybrid_moe",
        "falcon_h1_norm",
        "nemotron_h",
        "olmo2",
        "glm4",
        "mixtral",
        "qwen2_moe",
    ],
)
def test_a_layer_in_stages_has_the_inputs_and_outputs_of_a_whole_forward(checkpoint: Callable[..., Path], family: str) -> None:
    source, described, config = opened(checkpoint(family))
    blocks = BlockForward(source, described, config, tokens(5))
    layer = blocks.load(0)
    seen: dict[str, list[torch.Tensor]] = {}

    def remember(path: str) -> Callable[..., None]:
        return lambda module, args: seen.setdefault(path, []).append(args[0].flatten(0, -2))

    whole = blocks.hidden.clone()
    paths = [paths[0] for paths in sites(layer)]
    handles = [layer.get_submodule(path).register_forward_pre_hook(remember(path)) for path in paths]
    expected = blocks.run(0, layer, whole)
    for handle in handles:
        handle.remove()
    run = StagedLayer(blocks, 0, layer)
    for path in paths:
        moments, x = run.moments(path), torch.cat(seen[path]) if path in seen else torch.zeros(0, 1)
        assert moments.tokens == len(x), path
        if len(x):
            assert_moments(moments.matrix, x)
            assert torch.allclose(moments.magnitude, x.abs().mean(0), rtol=1e-4, atol=1e-6), path
    run.finish()
    assert torch.equal(blocks.hidden, expected)


def test_the_output_of_a_convolution_has_inputs_of_its_own(checkpoint: Callable[..., Path]) -> None:
    _, _, layer, _ = first_layer(checkpoint("lfm2"))
    mlp = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
    assert sites(layer) == [("self_attn.in_proj",), ("self_attn.out_proj",), *mlp]


def assert_moments(found: torch.Tensor, x: torch.Tensor) -> None:
    """Both factors of a product may have been rounded to bf16, by up to 2^-8 of each; they are added up in float32."""
    bound = (2.0**-7 + 2.0**-16) * (x.abs().T @ x.abs()) if has_bf16() else 0
    assert bool(((found - x.T @ x).abs() <= bound + 1e-5 * len(x)).all())


def test_moments_are_those_of_the_tokens_in_tiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeq.converters.calibration.moments.TILE", 24)
    x, scale = torch.randn(500, 70, generator=torch.Generator().manual_seed(1)), torch.linspace(0.5, 2, 70)
    moments = Moments(70)
    for part in x.split(130):
        moments.add(part)
    assert_moments(moments.matrix, x)
    assert torch.equal(moments.matrix, moments.matrix.T)
    moments.divide(scale)
    assert_moments(moments.matrix, x / scale)
    assert torch.allclose(moments.magnitude, (x / scale).abs().mean(0), atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_lowers_the_error_of_every_group_or_leaves_it(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    codec = Codec("int", 3, 32, symmetric)
    x = torch.randn(600, 64, generator=generator)
    linear = torch.nn.Linear(64, 300, bias=False)
    weight = torch.randn(300, 64, generator=generator)
    weight[:, 7] *= 6
    linear.weight.data = weight.clone()
    moments = Moments(64)
    moments.add(x)
    with torch.no_grad():
        clamp(linear, clip_limits(weight, moments, codec, torch.ones(64)), codec)

    def errors(candidate: torch.Tensor) -> torch.Tensor:
        difference = (fake(candidate, codec) - weight).reshape(300, 2, 32)
        return torch.einsum("tgc,rgc->rgt", x.reshape(600, 2, 32), difference).square().mean(-1)

    plain, clipped = errors(weight), errors(linear.weight.data)
    assert (clipped <= plain * (1 + 1e-5)).all() and clipped.mean() < 0.99 * plain.mean()


def test_queries_and_keys_are_scaled_but_never_clipped(checkpoint: Callable[..., Path]) -> None:
    described, config, layer, run = first_layer(checkpoint("llama_gqa"))
    original = {
        part: layer.get_submodule(path).weight.data.clone() for part, path in LINEARS.items() if part in ("q", "k", "v")
    }
    scale = search_scale(run, layer, described.awq_mappings(0)[0], lambda path: CODEC)
    awq(run, layer, described.awq_mappings(0), lambda columns: CODEC)
    assert torch.equal(layer.self_attn.q_proj.weight, original["q"] * scale)
    assert torch.equal(layer.self_attn.k_proj.weight, original["k"] * scale)
    assert not torch.equal(layer.self_attn.v_proj.weight, original["v"] * scale)


@pytest.mark.parametrize("family", ["llama_mha", "llama_gqa", "qwen2"])
def test_a_layer_prepared_by_awq_loses_less_of_its_output_than_plain_rounding(
    checkpoint: Callable[..., Path], family: str
) -> None:
    source, described, config = opened(checkpoint(family))
    codec = Codec("int", 2, 32, symmetric=False)
    errors = []
    for prepare in (True, False):
        blocks = BlockForward(source, described, config, tokens(8))
        layer, before = blocks.load(0), blocks.hidden.clone()
        run = StagedLayer(blocks, 0, layer)
        with torch.no_grad():
            if prepare:
                awq(run, layer, described.awq_mappings(0), lambda columns, codec=codec: codec)
            else:
                run.finish()
            for part in ("q", "k", "v", "o", "gate", "up", "down"):
                linear = layer.get_submodule(LINEARS[part])
                linear.weight.data = fake(linear.weight.data, codec)
            now = layer(before, **blocks.attention_arguments(0))
            errors.append(float((now - blocks.hidden).square().mean()))
    assert errors[0] < errors[1]
