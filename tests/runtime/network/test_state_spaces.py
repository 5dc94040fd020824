"""Models with a state space give transformers' distributions, and would not with any other choice that is easily made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.families.network import described, open_tensors
from edgeq.converters.importers import open_source
from edgeq.format.records import ArrayRef
from edgeq.network.stack import Stack
from edgeq.runtime import Model
from edgeq.runtime.network import decoder, state_blocks
from edgeq.runtime.network.block_parts import norm
from edgeq.targets.family_operations import GatedNorm, Route, ScaleAdd, SiluConv, SsdScan
from edgeq.targets.graph import Activate, Experts, Operation
from edgeq.targets.reference import states
from edgeq.targets.reference.context import RunContext

GRANITES = ("granite_hybrid", "granite_hybrid_moe")
FAMILIES = (*GRANITES, "falcon_h1", "falcon_h1_norm", "falcon_h1_gate", "nemotron_h", "nemotron_h_biases")
FAMILIES += ("nemotron_h_experts",)
LENGTH = 150
TOKENS = [int(t) for t in np.random.default_rng(3).integers(2, 2048, LENGTH)]
WEIGHTS = {"initializer_range": 0.05}
RIGHT, WRONG = 1e-8, 1e-7
"""The largest KL divergence of the right computation, and the smallest of a wrong one."""

Logits = NDArray[np.float64]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., Path]) -> Callable[[str], Logits]:
    """transformers' logits [LENGTH, vocab], in float32 and with keys and values in f16, as they are here."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    class RoundedCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **settings: Any) -> Any:
            return super().update(key_states.half().float(), value_states.half().float(), *args, **settings)

    known: dict[str, Logits] = {}

    def get(family: str) -> Logits:
        if family not in known:
            folder = checkpoint(family, dtype="float32", **WEIGHTS)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            with torch.no_grad():
                out = model(torch.tensor([TOKENS]), past_key_values=RoundedCache(config=model.config))
            known[family] = out.logits[0].double().numpy()
        return known[family]

    return get


def divergence(wanted: Logits, found: NDArray[Any]) -> float:
    """The largest KL divergence of a position."""
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=1, keepdims=True) for x in (wanted, found))
    return float((np.exp(p) * (p - q)).sum(axis=1).max())


def logits(path: Path, target: str, lengths: tuple[int, ...] = (LENGTH,)) -> NDArray[Any]:
    threads = 2 if target == "cpu" else 0
    with Model.load(path, target=target, mode="a16", context=192, max_logits=LENGTH, threads=threads) as model:
        session, found, turn = model.session(), [], 0
        while len(session.tokens) < LENGTH:
            at = len(session.tokens)
            found += session.all_logits(TOKENS[at : min(LENGTH, at + lengths[turn % len(lengths)])])
            turn += 1
        return np.concatenate(found)


@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_distributions_are_those_of_transformers(
    family: str, target: str, model_path: Callable[..., Path], expected: Callable[[str], Logits]
) -> None:
    """The prompt whole, in odd chunks, and row by row, of which the bits are the same."""
    path = model_path(family, WEIGHTS, method="none", dtype="f32")
    whole = logits(path, target)
    assert divergence(expected(family), whole) < RIGHT
    for lengths in ((7, 1, 20, 2), (1,)):
        assert np.array_equal(logits(path, target, lengths), whole)


CHOICES: dict[str, Callable[..., Any]] = {
    "the norm before the gate": lambda op: replace(op, gate_first=False) if isinstance(op, GatedNorm) else op,
    "one norm over all groups": lambda op: (
        replace(op, heads=1, head_dim=op.heads * op.head_dim) if isinstance(op, GatedNorm) else op
    ),
    "the epsilon of the divided stream": lambda op: replace(op, eps=op.eps / 0.4**2) if isinstance(op, GatedNorm) else op,
    "a step without limits": lambda op: replace(op, limits=(0.0, 1e30)) if isinstance(op, SsdScan) else op,
    "the wrong bias": lambda op: replace(op, dt_bias=op.skip) if isinstance(op, SsdScan) else op,
    "the wrong skip": lambda op: replace(op, skip=op.dt_bias) if isinstance(op, SsdScan) else op,
    "no bias of the convolution": lambda op: replace(op, bias=None) if isinstance(op, SiluConv) else op,
}


@pytest.mark.parametrize("wrong", CHOICES)
def test_another_choice_gives_other_distributions(
    wrong: str, model_path: Callable[..., Path], expected: Callable[[str], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, block = model_path("granite_hybrid", WEIGHTS, method="none", dtype="f32"), state_blocks.ssd_block
    monkeypatch.setattr(
        "edgeq.runtime.network.decoder.ssd_block", lambda *args, **settings: map(CHOICES[wrong], block(*args, **settings))
    )
    assert divergence(expected("granite_hybrid"), logits(path, "reference")) > WRONG


@pytest.mark.parametrize("family", GRANITES)
def test_rope_is_where_the_family_says(
    family: str, model_path: Callable[..., Path], expected: Callable[[str], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_path(family, WEIGHTS, method="none", dtype="f32")
    monkeypatch.setattr(Stack, "layer_rope", lambda self, layer: None if self.layers_without_rope == () else self.rope)
    assert divergence(expected(family), logits(path, "reference")) > WRONG


@pytest.mark.parametrize("family", ["falcon_h1", "falcon_h1_norm", "falcon_h1_gate"])
def test_both_sides_of_a_layer_read_the_stream_before_it(
    family: str, model_path: Callable[..., Path], expected: Callable[[str], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that read what the state space has added to would give something else."""
    path, block = model_path(family, WEIGHTS, method="none", dtype="f32"), decoder.attention_block

    def after(metadata: Any, config: Any, layer: int, *args: Any, **settings: Any) -> Iterator[Operation]:
        yield norm(metadata, config, layer, "x", f"layers.{layer}.attention_norm", "normed")
        yield from block(metadata, config, layer, *args, **settings)

    monkeypatch.setattr(decoder, "attention_block", after)
    assert divergence(expected(family), logits(path, "reference")) > WRONG


NEMOTRON_CHOICES: dict[str, Callable[..., Any]] = {
    "relu without its square": lambda op: replace(op, function="relu") if isinstance(op, Activate) else op,
    "the norm before the gate": lambda op: replace(op, gate_first=False) if isinstance(op, GatedNorm) else op,
    "one norm over all groups": lambda op: (
        replace(op, heads=1, head_dim=op.heads * op.head_dim) if isinstance(op, GatedNorm) else op
    ),
    "the floor of prompts": lambda op: replace(op, limits=(0.5, op.limits[1])) if isinstance(op, SsdScan) else op,
}


@pytest.mark.parametrize("wrong", NEMOTRON_CHOICES)
def test_another_choice_gives_other_distributions_of_nemotron_h(
    wrong: str, model_path: Callable[..., Path], expected: Callable[[str], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, change = model_path("nemotron_h", WEIGHTS, method="none", dtype="f32"), NEMOTRON_CHOICES[wrong]
    for name in ("ssd_block", "mlp_block"):
        block = getattr(decoder, name)
        monkeypatch.setattr(decoder, name, lambda *args, block=block, **settings: map(change, block(*args, **settings)))
    assert divergence(expected("nemotron_h"), logits(path, "reference")) > WRONG


EXPERT_CHOICES: dict[str, Callable[..., Any]] = {
    "no bias": lambda op: replace(op, bias=replace(op.bias, dtype="zeros")) if isinstance(op, Route) else op,
    "a softmax": lambda op: replace(op, bias=None) if isinstance(op, Route) else op,
    "shares without their factor": lambda op: replace(op, factor=1.0) if isinstance(op, Route) else op,
    "shares that are not divided": lambda op: replace(op, normalized=False) if isinstance(op, Route) else op,
    "relu without its square": lambda op: replace(op, function="relu") if isinstance(op, Experts) else op,
    "a shared expert of relu": lambda op: replace(op, function="relu") if isinstance(op, Activate) else op,
    "no shared expert": lambda op: replace(op, factor=0.0) if isinstance(op, ScaleAdd) else op,
}


@pytest.mark.parametrize("wrong", EXPERT_CHOICES)
def test_another_choice_gives_other_distributions_of_nemotron_3(
    wrong: str, model_path: Callable[..., Path], expected: Callable[[str], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, block = model_path("nemotron_h_experts", WEIGHTS, method="none", dtype="f32"), decoder.experts
    array = RunContext.array

    def arrays(self: RunContext, ref: ArrayRef) -> NDArray[np.float32]:
        return np.zeros(ref.shape, np.float32) if ref.dtype == "zeros" else array(self, ref)

    monkeypatch.setattr(RunContext, "array", arrays)
    monkeypatch.setattr(decoder, "experts", lambda *args: map(EXPERT_CHOICES[wrong], block(*args)))
    assert divergence(expected("nemotron_h_experts"), logits(path, "reference")) > WRONG


@pytest.mark.parametrize("fused", [False, True])
def test_experts_lie_apart_or_in_one_tensor_of_each_kind(
    fused: bool, checkpoint: Callable[..., Path], model_path: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    folder = checkpoint("nemotron_h_experts", dtype="float32", **WEIGHTS)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    if fused:
        layers = sorted({name.partition("experts.0.")[0] for name in tensors if ".mixer.experts.0." in name})
        assert len(layers) == 3
        for layer in layers:
            for part in ("up_proj", "down_proj"):
                apart = [tensors.pop(f"{layer}experts.{expert}.{part}.weight") for expert in range(7)]
                tensors[f"{layer}experts.{part}"] = np.stack(apart)
        save_file(tensors, tmp_path / "model.safetensors")
    opened = open_source(str(tmp_path), HubAccess())
    family, _ = described(opened)
    read = open_tensors(opened, family)
    plain = load_file(folder / "model.safetensors")
    for part in ("up", "down"):
        found = read.whole(f"model.layers.1.mlp.experts.3.{part}_proj.weight")
        wanted = plain[f"backbone.layers.1.mixer.experts.3.{part}_proj.weight"]
        assert np.array_equal(found, wanted)


def test_attention_of_nemotron_h_does_not_rotate(
    model_path: Callable[..., Path], expected: Callable[[str], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_path("nemotron_h", WEIGHTS, method="none", dtype="f32")
    monkeypatch.setattr(Stack, "layer_rope", lambda self, layer: self.rope)
    assert divergence(expected("nemotron_h"), logits(path, "reference")) > WRONG


def test_steps_of_nemotron_h_have_the_limits_of_its_own_code(
    checkpoint: Callable[..., Path], model_path: Callable[..., Path]
) -> None:
    """transformers raises steps to time_step_min in a prompt and not after it: token by token it is right."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    raised, count = WEIGHTS | {"time_step_min": 0.6}, 24
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint("nemotron_h", dtype="float32", **raised), dtype=torch.float32, attn_implementation="eager"
    )
    tokens, cache = torch.tensor([TOKENS[:count]]), DynamicCache(config=model.config)
    with torch.no_grad():
        at_once = model(tokens).logits[0].double().numpy()
        # A first token alone is a prompt too: it makes the states.
        for mixer in (layer.mixer for layer in model.model.layers if layer.block_type == "linear_attention"):
            mixer.time_step_limit = (0.0, float("inf"))
        steps = [model(tokens[:, i : i + 1], past_key_values=cache).logits[0] for i in range(count)]
    wanted = torch.cat(steps).double().numpy()
    with Model.load(model_path("nemotron_h", raised, method="none", dtype="f32"), target="reference", mode="a16") as found:
        ours = np.concatenate(list(found.session().all_logits(TOKENS[:count])))
    # Its cache is not rounded to f16 here.
    assert divergence(wanted, ours) < WRONG < divergence(at_once, ours)


def test_groups_are_of_neighbouring_heads(
    model_path: Callable[..., Path], expected: Callable[[str], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order of the heads the numbers of channels are the same, and the result is not."""
    path = model_path("granite_hybrid", WEIGHTS, method="none", dtype="f32")

    def tiled(x: Any, count: Any, axis: int | None = None) -> Any:
        return np.concatenate([x] * count, axis) if axis == 1 else repeat(x, count, axis)

    repeat = np.repeat
    monkeypatch.setattr(states.np, "repeat", tiled)
    assert divergence(expected("granite_hybrid"), logits(path, "reference")) > WRONG
