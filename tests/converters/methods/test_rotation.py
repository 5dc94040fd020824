"""Rotations: the matrices are orthogonal, and absorbing them leaves every family's logits as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from edgeq.converters.families import EMBEDDING, HEAD, LINEARS, recognise
from edgeq.converters.rotation.fuse import LayerRotation, Rotation, dense
from edgeq.converters.rotation.hadamard import Hadamard, base_matrix, hadamard
from edgeq.converters.rotation.model import RotatedModel
from edgeq.converters.rotation.orthogonal import haar, principal_axes, signs, split_rotation
from edgeq.errors import UnsupportedError
from edgeq.format.safetensors import read_json
from edgeq.network.config import ModelConfig

PUBLISHED_SIZES = (11008, 18944, 4864, 14336, 768, 8192, 3072, 5120, 896)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def identity(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("order", [4, 12, 20, 28, 36, 44, 52, 60, 68, 76, 100, 108, 140, 148, 156, 172, 924])
def test_a_base_matrix_has_entries_of_one_and_orthogonal_rows(order: int) -> None:
    base = base_matrix(order)
    assert base is not None and base.shape == (order, order) and bool((base.abs() == 1).all())
    assert torch.equal(base @ base.T, order * identity(order))


@pytest.mark.parametrize("size", PUBLISHED_SIZES)
def test_the_online_transform_and_the_one_in_the_weight_cancel(size: int) -> None:
    x = torch.randn(3, size, dtype=torch.float64, generator=generator())
    weight = torch.randn(5, size, dtype=torch.float64, generator=generator(1))
    transform = hadamard(size)
    assert transform.base is None or bool((transform.base.abs() == 1).all())
    assert torch.allclose(transform(x) @ transform(weight).T, x @ weight.T, atol=1e-8)
    # An outlier channel is spread over all channels alike.
    spike = torch.zeros(size, dtype=torch.float64)
    spike[size // 3] = 1
    assert torch.allclose(transform(spike).abs(), torch.full_like(spike, size**-0.5))


def test_a_transform_across_heads_mixes_the_same_channel_of_every_head() -> None:
    x = torch.randn(4, 12 * 32, dtype=torch.float64, generator=generator())
    expected = torch.einsum("jk,tkd->tjd", hadamard(12).matrix().T, x.view(4, 12, 32)).flatten(1)
    assert torch.allclose(hadamard(12)(x, stride=32), expected)


def test_orders_without_a_hadamard_matrix_take_a_fixed_orthogonal_one() -> None:
    for size, base in ((14, 7), (37, 37), (74, 37), (6, 3)):
        transform = hadamard(size)
        assert transform.base is not None and len(transform.base) == base
        assert torch.allclose(transform.matrix() @ transform.matrix().T, identity(size), atol=1e-12)
        again = hadamard.__wrapped__(size).base
        assert again is not None and torch.equal(again, transform.base)


def test_a_size_with_a_large_odd_part_and_no_construction_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="2062 channels have no fast orthogonal transform"):
        hadamard(2 * 1031)


def test_random_and_principal_bases_are_orthogonal_and_reproducible() -> None:
    x = torch.randn(500, 40, dtype=torch.float64, generator=generator()) * torch.linspace(3, 0.1, 40)
    axes, split = principal_axes(x.T @ x), split_rotation(40, 5, generator(4))
    for basis in (haar(40, generator(3)), axes, split, axes @ split):
        assert torch.allclose(basis.T @ basis, identity(40), atol=1e-10)
    energy = (x @ axes).square().mean(0)
    assert bool((energy.diff() >= 0).all()), "the last coordinates carry the most energy"
    assert torch.equal(haar(40, generator(3)), haar(40, generator(3)))
    assert not split[:35, 35:].any() and not split[35:, :35].any()
    assert set(signs(64, generator()).tolist()) == {1.0, -1.0}


def described(folder: Path) -> ModelConfig:
    return recognise(read_json(folder / "config.json"))[1]


def tokens() -> Tensor:
    return torch.randint(0, 2048, (2, 24), generator=generator(5))


@dataclass
class InMemory:
    """The tensors of a state dict."""

    state: dict[str, Tensor]

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self.whole(name)[start:stop]

    def whole(self, name: str) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.state[name].numpy()
        return found


@torch.no_grad()
def logits_before_and_after(
    folder: Path, residual: Rotation, of_layer: Callable[[int], LayerRotation]
) -> tuple[Tensor, Tensor]:
    """Logits of the model in `folder`, and of the same when its weights have absorbed the rotations."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before: Tensor = model(tokens()).logits
    config = described(folder)
    family = recognise(read_json(folder / "config.json"))[0]
    source = InMemory({name: tensor.clone() for name, tensor in model.state_dict().items()})
    changed = RotatedModel(source, family, config, residual, of_layer, {})
    state = {name: torch.from_numpy(changed.whole(name)) for name in source.state}
    model.lm_head.weight = nn.Parameter(torch.from_numpy(changed.whole(HEAD)))
    state[HEAD] = model.lm_head.weight
    model.load_state_dict(state, assign=True)
    for index, module in enumerate(model.model.layers):
        for part, online in (("o", of_layer(index).before_o), ("down", of_layer(index).before_down)):
            if online is not None:
                module.get_submodule(LINEARS[part]).register_forward_pre_hook(lambda _, args, t=online: t(args[0]))
    return before, model(tokens()).logits


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama_mha", {}),
    ("llama_gqa", {"head_dim": 64}),
    ("llama_gqa", {"head_dim": 128}),
    ("llama_mha", {"hidden_size": 192, "head_dim": 32, "num_attention_heads": 12, "num_key_value_heads": 6}),
    ("llama3_rope", {}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("smollm3", {}),
]


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_hadamard_rotations_leave_the_logits_unchanged(
    checkpoint: Callable[..., Path], family: str, overrides: dict[str, Any]
) -> None:
    folder = checkpoint(family, **overrides)
    config = described(folder)
    heads, head_dim = config.num_attention_heads, config.head_dim
    sign, full = signs(config.hidden_size, generator()), hadamard(config.hidden_size)

    def residual(x: Tensor) -> Tensor:
        return full(x * sign)

    across = hadamard(heads)
    rotation = LayerRotation(
        residual, [hadamard(head_dim)] * config.num_key_value_heads, lambda x: across(x, head_dim), hadamard(256)
    )
    before, after = logits_before_and_after(folder, residual, lambda layer: rotation)
    assert (after - before).abs().max() < 1e-3


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_rotations_of_their_own_per_layer_and_kv_head_leave_the_logits_unchanged(
    checkpoint: Callable[..., Path], family: str, overrides: dict[str, Any]
) -> None:
    folder = checkpoint(family, **overrides)
    config = described(folder)
    residual = dense(haar(config.hidden_size, generator()))

    def of_layer(layer: int) -> LayerRotation:
        seeds = [100 * layer + head for head in range(config.num_key_value_heads)]
        return LayerRotation(residual, [dense(haar(config.head_dim, generator(seed))) for seed in seeds])

    before, after = logits_before_and_after(folder, residual, of_layer)
    assert (after - before).abs().max() < 1e-3


def test_a_matrix_comes_in_rows_as_it_comes_whole(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen2")
    config = described(folder)
    family = recognise(read_json(folder / "config.json"))[0]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    residual = dense(haar(config.hidden_size, generator()))
    rotation = LayerRotation(residual, [hadamard(32)] * 2, before_down=hadamard(256))
    changed = RotatedModel(InMemory(model.state_dict()), family, config, residual, lambda layer: rotation, {})
    for name in (EMBEDDING, HEAD, *family.layer_tensors(1).values()):
        whole = changed.whole(name)
        rows = np.concatenate([changed.rows(name, at, at + 16) for at in range(0, len(whole), 16)])
        assert np.allclose(rows, whole, atol=1e-6), name


def test_only_the_base_of_a_transform_is_dense() -> None:
    assert all(isinstance(hadamard(size), Hadamard) for size in PUBLISHED_SIZES)
    assert {size: len(h.base) for size in PUBLISHED_SIZES if (h := hadamard(size)).base is not None} == {
        11008: 172, 18944: 148, 4864: 76, 14336: 28, 768: 12, 3072: 12, 5120: 20, 896: 28,
    }  # fmt: skip
