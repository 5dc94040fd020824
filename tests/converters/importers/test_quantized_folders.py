"""Folders of published integers: what is stored means what they mean, bit for bit; what cannot be kept is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.converters.convert import carry_out
from edgeq.errors import EdgeqError
from edgeq.runtime.model import Model
from tests.converters.importers.conversions import codecs, converted, plan_of, silent, tensor, without
from tests.converters.importers.published import (
    BLOCK_ROWS,
    Publication,
    Record,
    Tensors,
    awq,
    compressed,
    gptq,
    publish,
    record,
    rewritten,
)

Checkpoint = Callable[..., Path]
OUT = "model.layers.0.self_attn.o_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("version", ("gemm", "gemv", "gemv_fast"))
@pytest.mark.parametrize("symmetric", (True, False))
def test_awq_is_kept(checkpoint: Checkpoint, tmp_path: Path, version: str, symmetric: bool) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, symmetric=symmetric)

    _, file = converted(publish(checkpoint("llama_gqa"), tmp_path / "awq", *awq(version), draw))
    assert set(codecs(file).values()) == {"i4 g32" if symmetric else "i4 g32 zero"}


@pytest.mark.parametrize(
    ("layout", "bits"),
    [("gptq", 2), ("gptq", 3), ("gptq", 4), ("gptq", 8), ("gptq_v2", 4), ("gptq_v2", 3)]
    + [("gptq_p", bits) for bits in (3, 5, 6, 7)],
)
def test_gptq_is_kept(checkpoint: Checkpoint, tmp_path: Path, layout: str, bits: int) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, bits=bits, symmetric="down" in name)

    _, file = converted(publish(checkpoint("qwen2"), tmp_path / "gptq", *gptq(layout, bits), draw))
    assert {name.split(".")[-1]: codec for name, codec in codecs(file).items()} == {
        **dict.fromkeys(("qkv", "o", "gate_up"), f"i{bits} g32 zero"),
        "down": f"i{bits} g32",
    }
    assert file.metadata.provenance["method"] == "as-stored"


@pytest.mark.parametrize(("group_size", "codec"), [(-1, "i4 row"), (64, "i4 g64"), (48, "i4 g16")])
def test_groups_that_no_codec_has_become_finer_ones(
    checkpoint: Checkpoint, tmp_path: Path, group_size: int, codec: str
) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, symmetric=True, group_size=group_size)

    settings = gptq(group_size=group_size, sym=True)
    _, file = converted(publish(checkpoint("llama_gqa"), tmp_path / "gptq", *settings, draw))
    assert set(codecs(file).values()) == {codec}


def test_awq_and_gptq_of_the_same_integers_are_the_same(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama_gqa")
    one = plan_of(publish(folder, tmp_path / "awq", *awq()).folder).checkpoint
    other = plan_of(publish(folder, tmp_path / "gptq", *gptq()).folder).checkpoint
    for name in one.tensors:
        assert one.codec(name) == other.codec(name)
        if one.codec(name).integer:
            found, expected = one.quantized(name, 3, 20), other.quantized(name, 3, 20)
            assert set(found) == set(expected) and all(np.array_equal(found[part], expected[part]) for part in found)
        assert np.array_equal(one.rows(name, 1, 9), other.rows(name, 1, 9))


@pytest.mark.parametrize("family", ("llama_gqa", "phi3", "opt", "mixtral"))
def test_the_order_of_channels_is_kept(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Weights that read the same input share an order, as one Hessian gave it; v of the second layer has another."""
    orders: dict[int, Any] = {}

    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        own = name.endswith("layers.1.self_attn.v_proj")
        drawn = record(shape, seed, order=True)
        kept = orders.setdefault(shape[1], drawn.order)
        return drawn if own else Record(drawn.q, drawn.zero, drawn.scale, 4, drawn.group_size, kept)

    published = publish(checkpoint(family, dtype="float16"), tmp_path / "gptq", *gptq(desc_act=True), draw)
    _, file = converted(published)
    linears = file.metadata.linears
    assert all(linears[name].input_order for name in codecs(file) if "router" not in name), codecs(file)
    assert "layers.0.qkv" in linears and ("layers.1.qkv" in linears) is (family == "phi3")
    plain = carry_out(plan_of(published.folder, method="none"), tmp_path / "plain.edgeq", silent).file
    tokens = [1, 5, 9, 2, 30]
    with Model.load(plain.path, target="reference", threads=1) as exact:
        expected = exact.session().prefill(tokens)
    for target in ("reference", "cpu") if family == "llama_gqa" else ("reference",):
        with Model.load(file.path, target=target, threads=1) as model:
            found = model.session().prefill(tokens)
            assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def test_scaled_zero_points_that_are_no_integers_are_kept_as_offsets(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, offset="o_proj" in name or "v_proj" in name)

    published = publish(checkpoint("llama_gqa"), tmp_path / "fast", *awq("gemv_fast"), draw)

    def renamed(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"] |= {"backend": "llm-awq", "version": "gemm"}
        for name in [name for name in tensors if name.endswith(".qzeros")]:
            tensors[name.replace("qzeros", "scaled_zeros")] = tensors.pop(name)

    for each in (published.folder, rewritten(published, tmp_path / "llm-awq", renamed)):
        _, file = converted(Publication(each, published.records))
        found = codecs(file)
        assert {name.split(".")[-1] for name, codec in found.items() if codec == "i4 g32 offset"} == {"o", "v"}
        assert set(found.values()) == {"i4 g32 offset", "i4 g32 zero"}

    def damaged(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{OUT}.qzeros"][0, 3] = np.nan

    plan = plan_of(rewritten(published, tmp_path / "again", damaged))
    with pytest.raises(EdgeqError, match="o_proj.weight: the offset of row 3, group 0 is nan"):
        carry_out(plan, tmp_path / "x.edgeq", silent)


def weights(**keys: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": 4, "type": "int", "group_size": 32, **keys}}


@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize(("bits", "dense"), [(bits, True) for bits in range(2, 9)] + [(bits, False) for bits in (3, 5, 6, 7)])
def test_compressed_tensors_are_kept(checkpoint: Checkpoint, tmp_path: Path, symmetric: bool, bits: int, dense: bool) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, symmetric=symmetric, bits=bits)

    settings = compressed(dense=dense, symmetric=symmetric, group=weights(num_bits=bits))
    published = publish(checkpoint("llama_gqa"), tmp_path / "packed", *settings, draw)
    _, file = converted(published)
    assert set(codecs(file).values()) == {f"i{bits} g32" + ("" if symmetric else " zero")}


@pytest.mark.parametrize("form", ("pack-quantized", "int-quantized", "naive-quantized"))
@pytest.mark.parametrize("strategy", ("group", "channel", "tensor", "block"))
def test_all_strategies_are_kept(checkpoint: Checkpoint, tmp_path: Path, form: str, strategy: str) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        size = 32 if strategy in ("group", "block") else -1
        drawn = record(shape, seed, group_size=size)
        if strategy == "tensor":
            drawn.scale[:], drawn.zero[:] = drawn.scale[0, 0], drawn.zero[0, 0]
        if strategy == "block":
            for array in (drawn.scale, drawn.zero):
                array[:] = np.repeat(array[::BLOCK_ROWS], BLOCK_ROWS, axis=0)[: len(array)]
        return drawn

    block = {"block_structure": [BLOCK_ROWS, 32]} if strategy == "block" else {}
    size = 32 if strategy == "group" else None
    settings = compressed(form, strategy, group=weights(strategy=strategy, group_size=size, **block))
    _, file = converted(publish(checkpoint("llama_gqa"), tmp_path / "packed", *settings, draw))
    assert set(codecs(file).values()) == {"i4 g32 zero" if strategy in ("group", "block") else "i4 row zero"}


def test_older_zero_points_and_orders_of_compressed_tensors(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, order="down" in name)

    published = publish(checkpoint("llama_gqa"), tmp_path / "packed", *compressed(packed_zeros=False), draw)
    _, file = converted(published)
    assert file.metadata.linears["layers.0.down"].input_order and not file.metadata.linears["layers.0.o"].input_order

    def unset(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{OUT}.weight_g_idx"] = np.full(len(published.records[OUT].index), -1, np.int32)

    converted(Publication(rewritten(published, tmp_path / "again", unset), published.records))


def test_what_inputs_and_the_cache_were_made_for_is_left_out_and_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    group = {**weights(), "input_activations": inputs}
    settings = compressed("int-quantized", group=group, kv_cache_scheme={"num_bits": 8, "type": "float"})
    published = publish(checkpoint("llama_gqa"), tmp_path / "packed", *settings)

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{DOWN}.input_scale"] = np.ones(1, np.float32)
        tensors[f"{DOWN}.input_zero_point"] = np.zeros(1, np.int8)
        tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)

    again = Publication(rewritten(published, tmp_path / "again", change), published.records)
    plan, _ = converted(again)
    assert [line.split(":")[0] for line in plan.notes()] == [
        "the checkpoint is made for quantized inputs of its layers",
        "the checkpoint is made for a quantized cache",
    ]


@pytest.mark.parametrize(("preset", "bits"), [("W4A16", 4), ("w8a8", 8), ("INT8", 8), ("W4A16_ASYM", 4)])
def test_a_preset_says_its_bits(checkpoint: Checkpoint, tmp_path: Path, preset: str, bits: int) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, bits=bits, group_size=-1)

    settings = compressed(strategy="channel", config_groups={preset: ["Linear"]})
    converted(publish(checkpoint("llama_gqa"), tmp_path / "packed", *settings, draw))


def test_groups_of_other_bits_are_known_by_their_shapes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, bits=8 if "down" in name else 3)

    groups = {
        "one": {"targets": ["re:(a*)*b", "re:.*down_proj"], **weights(num_bits=8)},
        "other": {"targets": ["Linear"], **weights(num_bits=3)},
    }
    settings = compressed(config_groups=groups)
    _, file = converted(publish(checkpoint("llama_gqa"), tmp_path / "packed", *settings, draw))
    assert codecs(file)["layers.0.down"] == "i8 g32 zero" and codecs(file)["layers.0.o"] == "i3 g32 zero"


def test_an_index_of_groups_that_says_nothing_is_no_order(checkpoint: Checkpoint, tmp_path: Path) -> None:
    published = publish(checkpoint("llama_gqa"), tmp_path / "gptq", *gptq())
    assert plan_of(published.folder).checkpoint.order(f"{DOWN}.weight") is None

    def zeros(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("g_idx"):
                tensors[name][:] = 0

    for i, change in enumerate((without(".g_idx"), zeros)):
        again = rewritten(published, tmp_path / f"again{i}", change)
        converted(Publication(again, published.records))


def test_older_files_say_it_beside_config_json(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for method, settings, file in (
        (awq(), {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, "quant_config.json"),
        (gptq(), {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}, "quantize_config.json"),
    ):
        published = publish(checkpoint("llama_gqa"), tmp_path / file, method[0], {})
        (published.folder / file).write_text(json.dumps(settings))
        (published.folder / "model.safetensors").rename(published.folder / "gptq_model-4bit-32g.safetensors")
        converted(published)


def test_zero_points_that_were_overwritten_are_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    published = publish(checkpoint("llama_gqa"), tmp_path / "gptq", *gptq())

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{DOWN}.qzeros"][0, 0] = np.uint32(0xFFFFFF46).view(np.int32)

    plan = plan_of(rewritten(published, tmp_path / "again", change))
    assert plan.notes()[0].startswith("6 zero points lie above one that wrapped around")
    assert not plan_of(published.folder).notes()


def settings(**keys: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config["quantization_config"].update(keys)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (awq, settings(quant_method="gptq", sym=False), r"lie as AWQ's, and the configuration says GPTQ"),
        (gptq, settings(quant_method="awq", checkpoint_format="gemm"), r"lie as GPTQ's, and the configuration says AWQ"),
        (awq, settings(version="marlin"), r"AWQ's layout 'marlin' is not supported; .*again as gemm"),
        (awq, settings(bits=8), "AWQ is supported with 4 bits"),
        (awq, settings(bits="4"), "bits is '4'; expected an integer"),
        (awq, settings(group_size=None), "has no group_size"),
        (awq, settings(group_size=64), r"scales is F16 .*; expected F16 or BF16"),
        (gptq, settings(checkpoint_format="marlin"), "GPTQ's layout 'marlin' is not supported"),
        (gptq, settings(is_marlin_format=True), "GPTQ's layout 'marlin' is not supported"),
        (gptq, settings(format="exl3", checkpoint_format=None), "GPTQ's layout 'exl3' is not supported"),
        (gptq, settings(rotation="hadamard"), "rotation is 'hadamard': it changes what the weights mean"),
        (gptq, settings(bits=8), "says 8 bits; download config.json again"),
        (gptq, settings(group_size=64), "says groups of 64; download config.json again"),
        (gptq, settings(pack_dtype="float"), "pack_dtype is 'float'; supported: int8, int16, int32, int64"),
        (gptq, tensor(f"{DOWN}.g_idx", np.zeros(7, np.int32)), "g_idx is I32 .7,.; expected"),
        (gptq, tensor(f"{DOWN}.qzeros", np.zeros((1, 4), np.float16)), "qzeros is F16"),
        (gptq, tensor(f"{DOWN}.weight", np.zeros((2, 2), np.float16)), "has both .*down_proj.weight and its integers"),
        (gptq, tensor("model.layers.0.mlp.act.scales", np.ones(4, np.float16)), "belongs to no quantized weight"),
        (gptq, without(f"{DOWN}.scales"), "tensor .*down_proj.scales is missing"),
        (compressed, settings(quantization_status="frozen"), "quantization_status is 'frozen'"),
        (compressed, settings(format="nvfp4-pack-quantized"), "the format 'nvfp4-pack-quantized' is not supported"),
        (compressed, settings(format="marlin-24"), "the format 'marlin-24' is not supported"),
        (compressed, settings(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config is .*sparse-bitmask"),
        (compressed, settings(transform_config={"R1": {}}), "transform_config is .*R1"),
        (compressed, settings(config_groups={"W4AFP8": ["Linear"]}), "this preset is not supported"),
        (compressed, settings(config_groups={"a": {**weights(), "output_activations": {"num_bits": 8}}}), "output_activations"),
        (compressed, settings(config_groups={"a": {**weights(), "format": "float-quantized"}}), "format 'float-quantized'"),
        (compressed, settings(config_groups={"a": weights(type="float")}), "4 bits of type 'float'"),
        (compressed, settings(config_groups={"a": weights(num_bits=9)}), "9 bits of type 'int'"),
        (compressed, settings(config_groups={"a": weights(block_structure="128x128")}), "block_structure is 128x128"),
        (compressed, settings(config_groups={}), "no group of config.json fits"),
        (compressed, settings(config_groups={"a": weights(num_bits=8)}), "no group of config.json fits .bits: 8."),
        (compressed, tensor(f"{DOWN}.weight_shape", np.array([127, 192])), "weight_shape is .127, 192"),
        (compressed, tensor(f"{DOWN}.weight_shape", np.array([1, -1])), "weight_shape is"),
        (compressed, tensor(f"{DOWN}.weight_scale", np.ones((7, 3), np.float16)), "weight_scale has the shape .7, 3."),
        (compressed, tensor(f"{DOWN}.weight_zero_point", np.ones((7, 3), np.int32)), "weight_zero_point is I32"),
        (gptq, settings(quant_method="hqq"), r"already quantized \(hqq\); supported: .*gptq"),
        (gptq, settings(quant_method=None), r"already quantized \(method not named\); supported: "),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    checkpoint: Checkpoint,
    tmp_path: Path,
    kind: Callable[[], Any],
    change: Callable[[Tensors, dict[str, Any]], None],
    message: str,
) -> None:
    published = publish(checkpoint("llama_gqa"), tmp_path / "published", *kind())
    with pytest.raises(EdgeqError, match=message) as refusal:
        plan_of(rewritten(published, tmp_path / "again", change))
    assert "\n" not in str(refusal.value)


def test_groups_of_more_channels_in_one_than_in_another_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    published = publish(checkpoint("llama_gqa"), tmp_path / "published", *gptq())
    index = np.arange(len(published.records[DOWN].index)) // 32
    index[0] = 1
    with pytest.raises(EdgeqError, match="not every group has 32 channels"):
        plan_of(rewritten(published, tmp_path / "again", tensor(f"{DOWN}.g_idx", index.astype(np.int32))))


def test_a_scale_that_f16_does_not_hold_is_refused_where_it_is_met(checkpoint: Checkpoint, tmp_path: Path) -> None:
    published = publish(checkpoint("llama_gqa"), tmp_path / "published", *gptq())

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{DOWN}.scales"] = tensors[f"{DOWN}.scales"].astype(np.float32)
        tensors[f"{DOWN}.scales"][0, 0] = 0.1

    plan = plan_of(rewritten(published, tmp_path / "again", change))
    with pytest.raises(EdgeqError, match="down_proj.weight: the scale of row 0, group 0 is 0.1.*f16 does not hold"):
        carry_out(plan, tmp_path / "x.edgeq", silent)


def test_modules_of_other_bits_are_known_by_their_shapes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`dynamic` has patterns of a stranger, which are not run."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Record:
        return record(shape, seed, bits=8 if "down" in name else 4, group_size=64 if "down" in name else 32)

    patterns = {r"+:.*\.down_proj.*": {"bits": 8, "group_size": 64}, "(a*)*b": {}}
    _, file = converted(publish(checkpoint("llama_gqa"), tmp_path / "mixed", *gptq(dynamic=patterns), draw))
    assert codecs(file)["layers.0.down"] == "i8 g64 zero" and codecs(file)["layers.0.o"] == "i4 g32 zero"
