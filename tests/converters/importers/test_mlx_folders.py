"""Folders of MLX: integers, scales and biases are kept bit for bit; what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from edgeq.converters.convert import carry_out
from edgeq.errors import EdgeqError
from edgeq.runtime.model import Model
from tests.converters.importers.conversions import codecs, converted, plan_of, silent, tensor, without
from tests.converters.importers.published import Record, Tensors, awq, in_bf16, is_linear, mlx, publish, record, rewritten

Checkpoint = Callable[..., Path]
OUT = "model.layers.0.self_attn.o_proj"
DOWN = "model.layers.0.mlp.down_proj"


def is_table(name: str) -> bool:
    return is_linear(name) or name in ("model.embed_tokens.weight", "lm_head.weight")


# In `make test` four bits in every group, and every other width in one of them.
KEPT = [
    pytest.param(bits, *group, marks=() if bits == 4 or i % 3 == j else pytest.mark.exhaustive)
    for i, bits in enumerate((2, 3, 4, 5, 6, 8))
    for j, group in enumerate([(32, True), (64, False), (128, True)])
]


@pytest.mark.parametrize(("bits", "group_size", "tied"), KEPT)
def test_mlx_is_kept(checkpoint: Checkpoint, tmp_path: Path, bits: int, group_size: int, tied: bool) -> None:
    """Integers, scales of both signs and biases, of f16 and of bf16, of the embedding and the head too."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, bits=bits, group_size=group_size, offset=True)

    family = checkpoint("llama_gqa" if tied else "llama_mha", hidden_size=256, intermediate_size=256)
    published = publish(family, tmp_path / "mlx", *mlx(bits, group_size), draw, chosen=is_table)
    assert any((each.scale < 0).any() for each in published.records.values())
    for each in (published, in_bf16(published, tmp_path / "bf16")):
        plan, file = converted(each)
        tables = {"head"} if tied else {"head", "embedding"}
        found = {name: linear.weights[0].codec.name for name, linear in file.metadata.linears.items()}
        assert set(found.values()) == {f"i{bits} g{group_size} offset"} and tables < set(found)
        assert file.metadata.provenance["method"] == "as-stored" and not plan.notes()


@pytest.mark.exhaustive
def test_a_model_of_mlx_runs_as_its_weights_in_floats(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, offset=True)

    published = publish(checkpoint("llama_gqa", dtype="float16"), tmp_path / "mlx", *mlx(), draw, chosen=is_table)
    _, file = converted(published)
    plain = carry_out(plan_of(published.folder, method="none"), tmp_path / "plain.edgeq", silent).file
    tokens = [1, 5, 9, 2, 30]
    with Model.load(plain.path, target="reference", threads=1) as exact:
        expected = exact.session().prefill(tokens)
    for target in ("reference", "cpu"):
        with Model.load(file.path, target=target, threads=1) as model:
            found = model.session().prefill(tokens)
            assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_modules_of_mlx_with_settings_of_their_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Four bits in groups of 64 have the shapes of eight in groups of 32: the configuration says which they are."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        bits, size = (8, 32) if name == DOWN else (4, 64)
        return record(shape, seed, bits=bits, group_size=size, offset=True)

    own: dict[str, Any] = {DOWN: {"bits": 8, "group_size": 32}, OUT: False, "lm_head": True}
    published = publish(
        checkpoint("llama_mha"),
        tmp_path / "mlx",
        *mlx(4, 64, **own),
        draw,
        chosen=lambda name: is_table(name) and name != f"{OUT}.weight",
    )
    _, file = converted(published)
    found = codecs(file)
    assert found["layers.0.down"] == "i8 g32 offset" and found["layers.1.down"] == "i4 g64 offset"
    assert found["layers.0.o"] == "f16" and found["layers.1.o"] == "i4 g64 offset"


def test_a_configuration_that_names_its_method_is_not_one_of_mlx(checkpoint: Checkpoint, tmp_path: Path) -> None:
    lay, config = awq()
    published = publish(
        checkpoint("llama_gqa"), tmp_path / "awq", lay, {**config, "quantization": {"bits": 4, "group_size": 32}}
    )
    plan, _ = converted(published)
    assert plan.checkpoint.source.origin == {"format": "awq"}


def test_a_scale_that_scales_nothing_may_be_any(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """MLX gives groups of zeros the scale 1e-7, which is none of f16 once it is rounded to bf16."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        drawn = record(shape, seed, offset=True)
        drawn.q[2, :32], drawn.offset[2, 0] = 0, 0  # type: ignore[index]
        return drawn

    published = in_bf16(publish(checkpoint("llama_gqa"), tmp_path / "f16", *mlx(), draw), tmp_path / "mlx")
    path = published.folder / "model.safetensors"
    tensors = load_file(path)
    for module in published.records:
        tensors[f"{module}.scales"][2, 0] = -1e-7
    save_file(tensors, path)
    converted(published)
    tensors[f"{DOWN}.biases"][2, 0] = 1e-7
    save_file(tensors, path)
    with pytest.raises(EdgeqError, match=r"down_proj.weight: the offset of row 2, group 0 is 1\.0\d+e-07, which f16 does not"):
        carry_out(plan_of(published.folder), tmp_path / "x.edgeq", silent)


def settings(**keys: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config["quantization"].update(keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (settings(mode="mxfp4"), "MLX's mode 'mxfp4' is not supported; supported: affine"),
        (settings(mode="nvfp4", group_size=16), "MLX's mode 'nvfp4' is not supported"),
        (settings(mode="mxfp8", bits=8), "MLX's mode 'mxfp8' is not supported"),
        (settings(mode=4), "mode is '4'; expected a text"),
        (settings(bits=7), "7 bits in groups of 32; MLX is supported with 2, 3, 4, 5, 6, 8 bits"),
        (settings(bits=0), "0 bits in groups of 32"),
        (settings(bits=True), "bits is 'True'; expected an integer"),
        (settings(bits=None), "has no bits"),
        (settings(bits=8), "scales is F16 .*; expected F16 or BF16"),
        (settings(bits=3), "weight has the shape .* none of 3 bits in groups of 32"),
        (settings(group_size=-1), "4 bits in groups of -1"),
        (settings(group_size=64), "scales is F16 .*; expected F16 or BF16"),
        (settings(**{DOWN: False}), "scales is there, and .* says that .*down_proj is not quantized"),
        (settings(**{DOWN: 3}), "down_proj is '3'; expected an object, true or false"),
        (settings(**{DOWN: {"bits": 8}}), "down_proj: has no group_size"),
        (settings(**{DOWN: {"bits": 4, "group_size": 32, "mode": "nvfp4"}}), "down_proj: MLX's mode 'nvfp4'"),
        (settings(**{"model.norm": {"bits": 4, "group_size": 32}}), "norm.scales is missing, and .* quantized"),
        (without(f"{DOWN}.scales"), "down_proj.biases belongs to no quantized weight"),
        (without(f"{DOWN}.biases"), "tensor .*down_proj.biases is missing"),
        (without(f"{DOWN}.weight"), "tensor .*down_proj.weight is missing"),
        (without(".scales"), "already quantized .mlx., and none of its tensors is"),
        (tensor(f"{DOWN}.weight", np.zeros((4, 4), np.int32)), "weight is I32 .4, 4.; expected U32"),
        (tensor(f"{DOWN}.weight", np.zeros((4, 7), np.uint32)), "weight has the shape .4, 7., which is none of 4 bits"),
        (tensor(f"{DOWN}.weight", np.zeros((4, 0), np.uint32)), "weight has the shape .4, 0.; expected two sizes"),
        (tensor(f"{DOWN}.weight", np.zeros((2, 4, 4), np.uint32)), "stacks the experts of a layer into one tensor"),
        (tensor(f"{DOWN}.biases", np.zeros((4, 4), np.float16)), "biases is F16 .4, 4.; expected"),
        (tensor(f"{DOWN}.biases", np.zeros((4, 4), np.float32)), "biases is F32 .4, 4.; expected F16 or BF16"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path, change: Callable[[Tensors, dict[str, Any]], None], message: str
) -> None:
    published = publish(
        checkpoint("llama_gqa"), tmp_path / "published", *mlx(), lambda name, shape, seed: record(shape, seed, offset=True)
    )
    with pytest.raises(EdgeqError, match=message) as refusal:
        plan_of(rewritten(published, tmp_path / "again", change))
    assert "\n" not in str(refusal.value)
