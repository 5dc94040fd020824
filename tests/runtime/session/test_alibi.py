"""Scores that grow with the positions of keys (ALiBi): logits of transformers, every way to run them, and wrong choices.

transformers rounds the slopes of a Falcon to bfloat16, and without sdpa adds them twice: here it has those of BLOOM, which are
float32.  Slopes of an MPT end at 2^-8 there whatever alibi_bias_max says, which the code that it was trained with reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.format.container import ModelFile
from edgeq.network import stack
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope, alibi_slopes
from edgeq.runtime import Model
from tests.runtime.conftest import rounded_cache

Logits = NDArray[np.float32]
Expected = Callable[[str], Logits]
FAMILIES = ("falcon_rw", "falcon_rw_parallel", "mpt", "mpt_odd", "bloom", "bloom_odd")
"""Every key that is read is away from its default in one of a pair; the heads of the second are not a power of two."""
WEIGHTS = {"initializer_range": 0.05}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(2, 2048, 140)]
"""More than two pages."""
PIECES = (7, 1, 20, 2, 64, 46)
MAX_DIVERGENCE = 1e-8
LOGIT_SCALE = 1.7


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., Path]) -> Iterator[Expected]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.bloom import modeling_bloom
    from transformers.models.falcon import modeling_falcon
    from transformers.models.mpt import modeling_mpt

    known: dict[str, Logits] = {}

    def get(family: str) -> Logits:
        if family not in known:
            way = "sdpa" if family.startswith("falcon") else "eager"
            folder = checkpoint(family, dtype="float32", **WEIGHTS)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=way)
            if family.startswith("mpt"):
                most = model.config.attn_config.alibi_bias_max
                model.transformer.build_mpt_alibi_tensor = partial(modeling_mpt.build_mpt_alibi_tensor, alibi_bias_max=most)
            with torch.no_grad():
                logits = model(torch.tensor([TOKENS]), past_key_values=rounded_cache(model.config)).logits
            known[family] = logits[0].numpy()
        return known[family]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor)
        yield get


def opened(path: Path, target: str, rows: int = 256, kv: Any = "f16") -> Model:
    return Model.load(path, target=target, mode="a16", max_rows=rows, max_logits=256, context=192, kv=kv)


def logits_of(model: Model, pieces: Sequence[int] = ()) -> Logits:
    """Those of all tokens, read in pieces."""
    session, found, done = model.session(), list[Logits](), 0
    for count in pieces or (len(TOKENS),):
        found += session.all_logits(TOKENS[done : done + count])
        done += count
    return np.concatenate(found)


def divergence(found: Logits, wanted: Logits) -> float:
    """The largest KL divergence of a token, in nats."""
    theirs, ours = (x.astype(np.float64) - x.max(1, keepdims=True) for x in (wanted, found))
    theirs, ours = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (theirs, ours))
    return float((np.exp(theirs) * (theirs - ours)).sum(1).max())


def ways() -> Iterator[Any]:
    """Every family, target and cut; `make test` has each family once, each target and cut in turn."""
    for i, family in enumerate(FAMILIES):
        for j, (target, cut) in enumerate((t, c) for t in ("reference", "cpu") for c in ("whole", "pieces", "rows")):
            marks = () if (i + 3) % 6 == j else pytest.mark.exhaustive
            yield pytest.param(family, target, cut, marks=marks)


@pytest.mark.parametrize(("family", "target", "cut"), list(ways()))
def test_logits_equal_transformers(
    family: str, target: str, cut: str, model_path: Callable[..., Path], expected: Expected
) -> None:
    model = opened(model_path(family, WEIGHTS, method="none", dtype="f32"), target, 1 if cut == "rows" else 256)
    found, wanted = logits_of(model, PIECES if cut == "pieces" else ()), expected(family)
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()
    assert divergence(found, wanted) <= MAX_DIVERGENCE


def sorted_slopes(rope: Rope, heads: int) -> tuple[float, ...]:
    return tuple(sorted(alibi_slopes(rope, heads), reverse=True))


def falling(rope: Rope, heads: int) -> tuple[float, ...]:
    return tuple(-each for each in alibi_slopes(rope, heads))


def plain(rope: Rope, heads: int) -> tuple[float, ...]:
    """As if their number were a power of two."""
    return tuple(rope.attention_factor * 2 ** (-rope.alibi_bias_max * (h + 1) / heads) for h in range(heads))


def none(rope: Rope, heads: int) -> tuple[float, ...]:
    return ()


def same(config: ModelConfig) -> ModelConfig:
    return config


def with_rope(**changes: float) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, rope=replace(config.rope, **changes))


WRONG: dict[str, tuple[str, Callable[[Rope, int], tuple[float, ...]], Callable[[ModelConfig], ModelConfig]]] = {
    "slopes in order of size": ("bloom_odd", sorted_slopes, same),
    "slopes of another number of heads": ("mpt_odd", plain, same),
    "scores that fall": ("mpt", falling, same),
    "no slopes": ("falcon_rw_parallel", none, same),
    "slopes after the scale": ("falcon_rw", alibi_slopes, with_rope(attention_factor=1.0)),
    "slopes within the scale": ("bloom", alibi_slopes, with_rope(attention_factor=32**-0.5)),
    "slopes that end elsewhere": ("mpt_odd", alibi_slopes, with_rope(alibi_bias_max=8.0)),
    "no limits": ("mpt", alibi_slopes, lambda c: replace(c, clip_qkv=None)),
    "the scale of heads": ("mpt", alibi_slopes, lambda c: replace(c, query_pre_attn_scalar=None)),
    "embeddings without a norm": ("bloom", alibi_slopes, lambda c: replace(c, embedding_norm=False)),
    "a stream without a norm": ("bloom_odd", alibi_slopes, lambda c: replace(c, normed_residual="none")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_shows(
    name: str, model_path: Callable[..., Path], expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would pass with it."""
    family, slopes, change = WRONG[name]
    path, open_file = model_path(family, WEIGHTS, method="none", dtype="f32"), ModelFile.open

    def other(path: Path) -> ModelFile:
        file = open_file(path)
        file.metadata = replace(file.metadata, config=change(file.metadata.config))
        return file

    wanted = expected(family)
    monkeypatch.setattr(ModelFile, "open", other)
    monkeypatch.setattr(stack, "alibi_slopes", slopes)
    assert divergence(logits_of(opened(path, "reference")), wanted) > 1000 * MAX_DIVERGENCE


@pytest.mark.parametrize("most", [8, 3])
def test_slopes_are_those_of_transformers(most: int) -> None:
    import torch
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for heads in range(1, 72):
        found = np.array(alibi_slopes(Rope(1.0, "alibi", alibi_bias_max=float(most)), heads))
        # That of a key one before the query's, with the sign turned.
        theirs = [-build_mpt_alibi_tensor(heads, 2, most)[:, 0, 0]]
        theirs += [_get_alibi_slopes(heads, torch.device("cpu"))] if most == 8 else []
        assert all(np.abs(each.numpy() - found).max() < 1e-6 for each in theirs), heads


def test_logits_are_multiplied_as_the_models_own_code_does(model_path: Callable[..., Path], expected: Expected) -> None:
    """transformers reads the key and leaves it out."""
    path = model_path("mpt", {**WEIGHTS, "logit_scale": LOGIT_SCALE}, method="none", dtype="f32")
    assert divergence(logits_of(opened(path, "reference")), LOGIT_SCALE * expected("mpt")) <= 2 * MAX_DIVERGENCE


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kv", "lost"), [("int8", 1e-3), ("int4", 0.2)])
def test_a_cache_of_integers_loses_little_and_keeps_its_bits(
    kv: str, lost: float, model_path: Callable[..., Path], expected: Expected
) -> None:
    path = model_path("mpt_odd", WEIGHTS, method="none", dtype="f32")
    whole, cut = (logits_of(opened(path, "cpu", kv=kv), pieces) for pieces in ((), PIECES))
    assert np.array_equal(whole, cut)
    assert 1e-8 < divergence(whole, expected("mpt_odd")) < lost


def test_what_is_forgotten_and_shared_leaves_no_trace(model_path: Callable[..., Path]) -> None:
    """A session that goes on elsewhere from a kept prefix, and a fork, have the bits of one that began there."""
    model = opened(model_path("bloom_odd", WEIGHTS, method="none", dtype="f32"), "cpu")
    other = [*TOKENS[:70], *TOKENS[10:50]]
    wanted = model.session().prefill(other)
    session = model.session()
    session.prefill(TOKENS)
    assert session.keep_prefix(other) == 70
    assert np.array_equal(session.fork().prefill(other[70:]), wanted)
    assert np.array_equal(session.prefill(other[70:]), wanted)
