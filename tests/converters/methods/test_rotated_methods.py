"""QuaRot and ResQ: the rotated model is the same function, the file has its parts, what cannot be rotated is refused."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import ConvertOptions, convert
from edgeq.converters.families import HEAD, NORM, recognise
from edgeq.converters.importers import open_source
from edgeq.converters.methods.quarot import QuaRot
from edgeq.converters.methods.resq import ResQ, high_columns, output_order
from edgeq.converters.methods.rotated import Rotated
from edgeq.converters.rotation.hadamard import hadamard
from edgeq.converters.rotation.orthogonal import signs
from edgeq.errors import InputError, UnsupportedError
from edgeq.format.codec import from_bf16
from edgeq.format.container import ModelFile
from edgeq.format.records import Activation, KvCodec

METHODS = {"quarot": QuaRot, "resq": ResQ}
Folders = Callable[..., Path]


def silent(*_: object) -> None:
    pass


def tokens() -> Tensor:
    return torch.randint(0, 2048, (4, 40), generator=torch.Generator().manual_seed(5))


def opened(folder: Path) -> tuple[Checkpoint, Any, Any]:
    source = Checkpoint(open_source(str(folder), HubAccess()))
    family, config = recognise(source.config)
    source.arrange(family.sources())
    return source, family, config


def method_of(name: str, folder: Path, **options: Any) -> tuple[Rotated, Checkpoint]:
    source, family, config = opened(folder)
    return METHODS[name](ConvertOptions(method=name, **options), family, config), source


def study_of(method: Rotated, source: Checkpoint) -> Any:
    forward = BlockForward(source, method.family, method.config, tokens())
    return method.study(forward, silent) if method.studies else {}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.py"
    path.write_text(Path(textwrap.__file__).read_text()[:6000])
    return path


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama_mha", {}),
    ("llama_gqa", {"head_dim": 128}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("smollm3", {}),
    ("phi3", {}),
    ("mixtral", {}),
    ("qwen2_moe", {}),
]


@pytest.mark.parametrize(
    ("family", "overrides", "name"),
    [
        pytest.param(*model, name, marks=() if (i + j) % 2 == 0 else pytest.mark.exhaustive)
        for i, model in enumerate(CASES)
        for j, name in enumerate(METHODS)
    ],
    ids=str,
)
@torch.no_grad()
def test_without_rounding_the_rotated_model_gives_the_logits_of_the_original(
    checkpoint: Folders, name: str, family: str, overrides: dict[str, Any]
) -> None:
    folder = checkpoint(family, **overrides)
    method, source = method_of(name, folder)
    rotated = method.tensors(source, study_of(method, source))
    forward = BlockForward(source, method.family, method.config, tokens(), rotated)
    for index in range(method.config.num_hidden_layers):
        layer = forward.load(index)
        method.install(index, layer)
        forward.advance(index, layer)
    x = forward.hidden
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + method.config.rms_norm_eps)
    assert (rotated.whole(NORM) == 1).all()
    found = x @ torch.from_numpy(rotated.whole(HEAD)).T
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens()).logits
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize(("name", "error"), [("quarot", 1e-6), ("resq", 0.03)])
def test_scores_stay_when_queries_and_keys_are_rotated(checkpoint: Folders, name: str, error: float) -> None:
    method, source = method_of(name, checkpoint("llama_gqa"))
    rotated = method.tensors(source, study_of(method, source))
    matrix = rotated.whole("layers.1.key_rotation")
    assert np.array_equal(matrix, matrix.astype(np.int8)) and np.abs(matrix).max() == 127
    q = matrix * rotated.whole("layers.1.key_rotation_scale")
    assert np.abs(q @ q.T - np.eye(32)).max() < error


@torch.no_grad()
def test_resq_takes_the_axes_of_what_passes_through_the_model(checkpoint: Folders) -> None:
    """Against transformers' own keys after RoPE, values and hidden states."""
    folder = checkpoint("qwen3")
    method, source = method_of("resq", folder)
    study = study_of(method, source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = DynamicCache()
    model(tokens(), past_key_values=cache)
    for layer in range(2):
        found: Any = cache.layers[layer]
        for kv_head in range(2):
            u = torch.from_numpy(study["values"][layer, kv_head])
            assert torch.allclose(u.T @ u, torch.eye(64, dtype=torch.float64), atol=1e-10)
            assert_high_energy(found.values[:, kv_head].reshape(-1, 64), u, 8)
        assert_high_energy(found.keys.reshape(-1, 64), torch.from_numpy(study["keys"][layer]), 8)
    embedded = model.model.embed_tokens(tokens()).reshape(-1, 128)
    u = torch.from_numpy(study["residual"])
    assert torch.allclose(u.T @ u, torch.eye(128, dtype=torch.float64), atol=1e-10)
    assert (embedded.double() @ u).square().mean(0)[-32:].mean() > 1.2 * embedded.square().mean()


def assert_high_energy(x: Tensor, u: Tensor, high: int) -> None:
    """The last `high` coordinates of x u hold the energy of the first principal components of x."""
    x = x.double()
    most = torch.linalg.eigvalsh(x.T @ x)[-high:].sum()
    assert (x @ u)[:, -high:].square().sum() > 0.999 * most


@pytest.mark.parametrize("family", ["llama_gqa", "qwen2"])
def test_rank_zero_with_hadamard_matrices_is_quarot_without_its_transform_across_heads(
    checkpoint: Folders, family: str
) -> None:
    quarot, source = method_of("quarot", checkpoint(family))
    resq, _ = method_of("resq", checkpoint(family), high_fraction=0.0)
    head, sign = hadamard(32).matrix().numpy(), signs(128, torch.Generator().manual_seed(0))
    study = {
        "residual": hadamard(128)(torch.diag(sign)).numpy(),
        "values": np.broadcast_to(head, (2, 2, 32, 32)).copy(),
        "keys": np.broadcast_to(head, (2, 32, 32)).copy(),
    }
    ours, theirs = resq.tensors(source, study), quarot.tensors(source, {})
    across = quarot.before_o()
    assert across is not None and resq.before_o() is None
    names = {tensor: part for layer in range(2) for part, tensor in quarot.family.layer_tensors(layer).items()}
    for tensor in [*names, HEAD, "model.embed_tokens.weight", "layers.0.key_rotation"]:
        mine = torch.from_numpy(ours.whole(tensor))
        mine = across(mine) if names.get(tensor) == "o" else mine
        assert torch.allclose(mine, torch.from_numpy(theirs.whole(tensor)), atol=1e-5), tensor
    assert resq.recipe("layers.0.qkv", 128, "bf16").high is None and resq.kv == KvCodec("int4")


def test_a_resq_file_has_its_parts(checkpoint: Folders, tmp_path: Path, text: Path) -> None:
    options = ConvertOptions(method="resq", calibration=text, head=8)
    file = convert(str(checkpoint("qwen2", hidden_size=256, num_attention_heads=8)), tmp_path / "o.edgeq", options, silent)
    metadata, linears = file.metadata, file.metadata.linears
    assert (metadata.default_mode, metadata.kv) == ("a4", KvCodec("int4", 4))
    assert not metadata.config.tie_word_embeddings and metadata.arrays["embedding"].shape == (2048, 256)
    for name in ("qkv", "o", "gate_up"):
        linear = linears[f"layers.1.{name}"]
        assert [(w.codec.name, w.columns) for w in linear.weights] == [("i4 row", 224), ("i8 row", 32)], name
        assert linear.activation == Activation(4, 8, symmetric=False) and linear.transform is None
        assert (linear.input_order is not None) is (name == "o")
    order = file.array(linears["layers.1.o"].input_order)  # type: ignore[arg-type]
    assert order[-32:].tolist() == [32 * head + dim for head in range(8) for dim in range(28, 32)]
    down = linears["layers.1.down"]
    assert [(w.codec.name, w.columns) for w in down.weights] == [("i4 row", 256)]
    assert down.activation == Activation(4, 0, symmetric=False)
    assert down.transform is not None and (down.transform.size, down.transform.stride, down.transform.base) == (256, 1, None)
    assert metadata.arrays["layers.1.key_rotation"].dtype == "i8"
    assert linears["head"].activation == Activation(8)
    assert linears["layers.0.qkv"].bias is not None and linears["layers.0.qkv"].bias.dtype == "f32"
    assert metadata.provenance["details"]["high_channels"] == {"hidden": 32, "o": 32, "head_dim": 4}  # type: ignore[index]
    assert (norm_of(file) == 1).all()


def norm_of(file: ModelFile) -> Any:
    ref = file.metadata.arrays["layers.0.mlp_norm"]
    return from_bf16(file.array(ref)) if ref.dtype == "bf16" else file.array(ref)


def test_a_quarot_file_has_its_parts(checkpoint: Folders, tmp_path: Path) -> None:
    folder = checkpoint("llama_mha", hidden_size=192, num_attention_heads=12, num_key_value_heads=4, head_dim=32)
    file = convert(str(folder), tmp_path / "o.edgeq", ConvertOptions(method="quarot"), silent)
    linears = file.metadata.linears
    assert (file.metadata.default_mode, file.metadata.kv) == ("a4", KvCodec("int4"))
    for name in ("qkv", "o", "gate_up", "down"):
        linear = linears[f"layers.0.{name}"]
        assert [w.codec.name for w in linear.weights] == ["i4 row"] and linear.activation == Activation(4)
    across = linears["layers.0.o"].transform
    assert across is not None and across.base is not None and (across.size, across.stride) == (12, 32)
    assert np.array_equal(file.array(across.base), hadamard(12).base)  # type: ignore[arg-type]


def test_every_expert_has_the_transform_of_its_own_width(checkpoint: Folders, tmp_path: Path) -> None:
    file = convert(str(checkpoint("qwen2_moe")), tmp_path / "o.edgeq", ConvertOptions(method="quarot"), silent)
    sizes = {name: x.transform.size for name, x in file.metadata.linears.items() if x.transform and name.endswith("down")}
    assert {sizes[f"layers.1.experts.{i}.down"] for i in range(6)} == {64} and sizes["layers.1.shared.down"] == 96
    assert file.metadata.linears["layers.0.router"].weights[0].codec.kind == "f32"


@pytest.mark.parametrize(
    ("bits", "mode", "kv", "activation"),
    [
        ({"activation_bits": 8}, "a8", KvCodec("int4", 4), Activation(8, 8, symmetric=False)),
        ({"bits": 3, "activation_bits": 8, "kv_bits": 3}, "a8", KvCodec("int4", 4, bits=3), Activation(8, 8, symmetric=False)),
        ({"bits": 3, "activation_bits": 8, "kv_bits": 8}, "a8", KvCodec("int8"), Activation(8, 8, symmetric=False)),
        ({"activation_bits": 16, "kv_bits": 16}, "a16", KvCodec(), None),
    ],
)
def test_bits_of_activations_and_cache_are_as_asked(
    checkpoint: Folders, bits: dict[str, int], mode: str, kv: KvCodec, activation: Activation | None
) -> None:
    method, _ = method_of("resq", checkpoint("llama_gqa"), **bits)
    recipe = method.recipe("layers.0.qkv", 128, "bf16")
    assert (method.mode, method.kv, recipe.activation) == (mode, kv, activation)
    assert recipe.codec.bits == bits.get("bits", 4)
    assert bool(method.extras(0)) is (kv.kind == "int4")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_conversion_ends_in_the_same_bytes(checkpoint: Folders, tmp_path: Path, text: Path, name: str) -> None:
    folder = str(checkpoint("llama_gqa"))
    options = ConvertOptions(method=name, gptq=True, calibration=text, head=8)
    whole = convert(folder, tmp_path / "whole.edgeq", options, silent).path.read_bytes()

    labels: list[str] = []

    def stop(done: float, total: float, label: str) -> None:
        labels.append(label)
        # Within the third stage.
        if len(dict.fromkeys(labels)) == 3 and labels.count(label) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "o.edgeq", options, stop)
    assert convert(folder, tmp_path / "o.edgeq", options, silent).path.read_bytes() == whole


def test_high_columns_leave_a_low_block_of_whole_chunks() -> None:
    for columns, wanted, high in (
        (256, 32, 32),
        (2048, 256, 256),
        (3072, 384, 384),
        (896, 112, 128),
        (128, 16, 32),
        (400, 50, 80),
    ):
        assert high_columns(columns, wanted) == high
        assert (columns - high) % 32 == 0
    assert high_columns(400, 0) == 0
    with pytest.raises(UnsupportedError, match="resq splits 32 channels"):
        high_columns(32, 4)


def test_the_high_columns_of_the_output_projection_are_the_last_of_every_head() -> None:
    order = output_order(heads=14, head_dim=64, high=128)
    assert sorted(order.tolist()) == list(range(14 * 64))
    last = {(column // 64, column % 64) for column in order[-128:].tolist()}
    assert {(head, dim) for head in range(14) for dim in range(56, 64)} <= last
    assert {dim for _, dim in last} == set(range(54, 64))
    assert (np.diff(order[:-128]) > 0).all() and (np.diff(order[-128:]) > 0).all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("family", "reason"), [("gemma3", "norms after attention and MLP"), ("opt", "LayerNorm")])
def test_networks_that_a_rotation_cannot_pass_are_refused(checkpoint: Folders, name: str, family: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} cannot rotate a {family}.*: it has {reason}"):
        method_of(name, checkpoint(family))


def test_a_fraction_that_leaves_no_high_dimension_is_refused(checkpoint: Folders) -> None:
    with pytest.raises(UnsupportedError, match="of head_dim 32 that is none; choose --high-fraction 0 or at least 0.03125"):
        method_of("resq", checkpoint("llama_gqa"), high_fraction=0.02)


def test_too_little_text_for_the_axes_is_refused_with_the_number_needed(checkpoint: Folders) -> None:
    method, source = method_of("resq", checkpoint("llama_gqa"))
    forward = BlockForward(source, method.family, method.config, tokens()[:3])
    with pytest.raises(InputError, match="120 tokens; resq needs at least 128"):
        method.study(forward, silent)


@pytest.mark.parametrize("name", METHODS)
def test_a_size_without_a_transform_is_refused_before_anything_is_read(checkpoint: Folders, name: str) -> None:
    with pytest.raises(UnsupportedError, match="2062 channels have no fast orthogonal transform"):
        method_of(name, checkpoint("llama_gqa", intermediate_size=2062))
