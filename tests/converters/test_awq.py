"""AWQ: what must hold whatever the weights are (self-tests a, b and e of the algorithm's description), for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgeq.codec import Codec
from edgeq.converters.calibration.forward import BlockForward, Observed
from edgeq.converters.checkpoint import Checkpoint, HubAccess
from edgeq.converters.families import LINEARS, recognise
from edgeq.converters.methods.awq import apply_scale, awq, clip, inspected_modules, output_error, search_scale
from edgeq.converters.quantizer import fake

FAMILIES = ("llama_mha", "llama_gqa", "llama3_rope", "mistral", "qwen2", "qwen3", "smollm3")
CODEC = Codec("int", 3, 32, symmetric=False)


def opened(folder: Path) -> tuple[Checkpoint, Any, Any]:
    source = Checkpoint.open(str(folder), HubAccess())
    source.open_weights()
    return source, *recognise(source.config)


def tokens(rows: int = 3, length: int = 48) -> torch.Tensor:
    return torch.randint(0, 2048, (rows, length), generator=torch.Generator().manual_seed(5))


def first_layer(folder: Path) -> tuple[Any, Any, Any, Observed]:
    """(family, config, first decoder layer, what its modules saw)."""
    source, family, config = opened(folder)
    blocks = BlockForward(source, family, config, tokens())
    layer = blocks.load(0)
    return family, config, layer, blocks.advance(0, layer, inspected_modules(layer, family.awq_mappings(config)))


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
        for layer in model.model.layers:
            for mapping in described.awq_mappings(config):
                columns = layer.get_submodule(LINEARS[mapping.consumers[0]]).weight.shape[1]
                apply_scale(layer, mapping, torch.rand(columns, generator=generator) * 3 + 0.2)
        after = model(tokens()).logits
    assert (after - before).abs().max() < 1e-3 * before.abs().max()


def test_value_to_output_is_folded_only_without_grouped_query_attention(checkpoint: Callable[..., Path]) -> None:
    for family, folds in (("llama_mha", True), ("llama_gqa", False), ("mistral", False), ("qwen3", False)):
        _, described, config = opened(checkpoint(family))
        assert ("v" in {m.absorber for m in described.awq_mappings(config)}) is folds, family


@pytest.mark.parametrize("family", ["llama_mha", "qwen2"])
def test_the_searched_scale_never_loses_more_than_plain_rounding(checkpoint: Callable[..., Path], family: str) -> None:
    described, config, layer, observed = first_layer(checkpoint(family))
    for mapping in described.awq_mappings(config):
        linears = [layer.get_submodule(LINEARS[part]) for part in mapping.consumers]
        original = [linear.weight.data.clone() for linear in linears]
        inspected = layer.get_submodule(mapping.inspected)
        with torch.no_grad():
            scale = search_scale(layer, mapping, observed, CODEC)
            assert all(torch.equal(linear.weight, w) for linear, w in zip(linears, original, strict=True))
            losses = []
            for s in (scale, torch.ones_like(scale)):
                for linear, weight in zip(linears, original, strict=True):
                    linear.weight.data = fake(weight * s, CODEC) / s
                losses.append(output_error(inspected, mapping.inspected, observed))
            for linear, weight in zip(linears, original, strict=True):
                linear.weight.data = weight
        assert losses[0] <= losses[1] and losses[1] > 0


def test_channels_with_large_activations_get_a_larger_scale(checkpoint: Callable[..., Path]) -> None:
    described, config, layer, observed = first_layer(checkpoint("llama_gqa"))
    mapping = described.awq_mappings(config)[0]
    observed.inputs["self_attn"][..., 5] *= 100
    observed.outputs["self_attn"] = torch.cat([now for now, _ in observed.run("self_attn", layer.self_attn)])
    scale = search_scale(layer, mapping, observed, Codec("int", 2, 128, symmetric=False))
    assert scale.argmax() == 5 and scale[5] > 1


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_lowers_the_error_of_every_group_or_leaves_it(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    codec = Codec("int", 3, 32, symmetric)
    x = torch.randn(600, 64, generator=generator)
    linear = torch.nn.Linear(64, 300, bias=False)
    weight = torch.randn(300, 64, generator=generator)
    weight[:, 7] *= 6
    linear.weight.data = weight.clone()
    with torch.no_grad():
        clip(linear, x, codec)

    def errors(candidate: torch.Tensor) -> torch.Tensor:
        difference = (fake(candidate, codec) - weight).reshape(300, 2, 32)
        return torch.einsum("tgc,rgc->rgt", x.reshape(600, 2, 32), difference).square().mean(-1)

    plain, clipped = errors(weight), errors(linear.weight.data)
    assert (clipped <= plain * (1 + 1e-5)).all() and clipped.mean() < 0.99 * plain.mean()


def test_queries_and_keys_are_scaled_but_never_clipped(checkpoint: Callable[..., Path]) -> None:
    described, config, layer, observed = first_layer(checkpoint("llama_gqa"))
    original = {part: layer.get_submodule(path).weight.data.clone() for part, path in LINEARS.items()}
    with torch.no_grad():
        scale = search_scale(layer, described.awq_mappings(config)[0], observed, CODEC)
        awq(layer, described.awq_mappings(config), observed, lambda columns: CODEC)
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
        layer, before = blocks.load(0), blocks.hidden
        observed = blocks.advance(0, layer, inspected_modules(layer, described.awq_mappings(config)))
        with torch.no_grad():
            if prepare:
                awq(layer, described.awq_mappings(config), observed, lambda columns, codec=codec: codec)
            for path in LINEARS.values():
                linear = layer.get_submodule(path)
                linear.weight.data = fake(linear.weight.data, codec)
            now = layer(before, **observed.attention)
            errors.append(float((now - blocks.hidden).square().mean()))
    assert errors[0] < errors[1]
