"""Logits of a float32 file equal those of transformers, for every family, in every way of cutting the prompt.

The cache holds f16, transformers' float32.  With weights of the size that training starts from, the difference is below the
tolerance; with larger weights, which show every mistake, transformers' cache is rounded to f16 as well.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.runtime import Model
from tests.runtime.conftest import rounded_cache

FAMILIES = ("llama_mha", "llama_gqa", "llama3_rope", "mistral", "qwen2", "qwen3")
FAMILIES += ("olmo2", "olmo3", "ministral3", "qwen3_yarn", "exaone4", "granite", "glm4", "ernie4_5")
FAMILIES += ("cohere", "cohere2", "hunyuan", "stablelm", "stablelm_parallel", "starcoder2", "gpt2")
FAMILIES += ("bigcode", "bigcode_mha", "neox", "neox_sequential")
FAMILIES += ("falcon_7b", "falcon_40b", "falcon_sequential", "falcon_rw", "mpt", "bloom")
FAMILIES += ("phi3", "phi3_longrope", "phi3_shortrope", "phi4_mini", "smollm3", "gemma3", "opt", "lfm2", "qwen3_5")
FAMILIES += ("olmo_hybrid", "olmo_hybrid_still", "gemma4", "gemma4_keys", "granite_hybrid", "falcon_h1", "falcon_h1_norm")
FAMILIES += ("gemma", "gemma2", "nemotron_h", "nemotron_h_biases")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss", "gemma4_moe", "granite_hybrid_moe")
EXPERTS += ("granite_moe", "granite_moe_shared")
HAVE_CPU = importlib.util.find_spec("edgeq.targets.cpu.program") is not None
TARGETS = ("reference", pytest.param("cpu", marks=pytest.mark.skipif(not HAVE_CPU, reason="no edgeq.targets.cpu")))
TOLERANCE = 1e-3
LENGTH = 150  # more than two pages, more than twice the smallest context that rope and window were set for
TOKENS = [int(t) for t in np.random.default_rng(3).integers(2, 2048, LENGTH)]
PLAIN, ROUNDED = {"initializer_range": 0.02}, {"initializer_range": 0.05}
WAYS = {"at_once": 256, "chunked": 37, "token_by_token": 1}


def ways(target: str, *marks: pytest.MarkDecorator) -> Iterator[Any]:
    """Every family at once on both targets, and cut in one way on the cpu and in the other on the reference, by turns, with the
    larger weights; with the smaller ones every third family.  `make test` does one way on either target.

    Both targets run one list of operations, and tests/targets holds each of these against the other target.
    """
    # A cache rounded otherwise can send a token to another expert where two are close: experts only with caches rounded alike.
    for name, weights, families in (("plain", PLAIN, FAMILIES), ("rounded", ROUNDED, FAMILIES + EXPERTS)):
        for (i, family), (way, rows) in itertools.product(enumerate(families), WAYS.items()):
            cut = way == ("chunked", "token_by_token")[i % 2]
            if way != "at_once" and cut != (target == "cpu"):
                continue
            if name == "plain" and (i % 3 or (way == "at_once") != (target == "cpu")):
                continue
            common = name == "rounded" and (cut if target == "cpu" else way == "at_once")
            more = () if common else (pytest.mark.exhaustive,)
            yield pytest.param(family, weights, target, rows, marks=(*marks, *more), id=f"{way}-{target}-{family}-{name}")


CASES = [*ways("reference"), *ways("cpu", pytest.mark.skipif(not HAVE_CPU, reason="no edgeq.targets.cpu"))]

Logits = NDArray[np.float32]
Expected = Callable[[str, dict[str, Any]], Logits]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., Path]) -> Expected:
    """transformers' logits [LENGTH, vocab] for TOKENS; with ROUNDED weights through a cache of f16."""
    import torch
    from transformers import AutoModelForCausalLM

    known: dict[str, Logits] = {}

    def get(family: str, weights: dict[str, Any]) -> Logits:
        key = repr((family, weights))
        if key not in known:
            folder = checkpoint(family, dtype="float32", **weights)
            # Otherwise transformers adds the slopes of a Falcon twice.
            way = "sdpa" if family == "falcon_rw" else "eager"
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=way)
            cache = rounded_cache(model.config) if weights is ROUNDED else None
            with torch.no_grad():
                known[key] = model(torch.tensor([TOKENS]), past_key_values=cache).logits[0].numpy()
        return known[key]

    return get


def load(path: Path, target: str, max_rows: int = 256, mode: Any = "a16") -> Model:
    return Model.load(path, target=target, mode=mode, max_rows=max_rows, max_logits=max_rows, context=192)


@pytest.mark.parametrize(("family", "weights", "target", "rows"), CASES)
def test_logits_equal_transformers(
    family: str, weights: dict[str, Any], target: str, rows: int, model_path: Callable[..., Path], expected: Expected
) -> None:
    model = load(model_path(family, weights, method="none", dtype="f32"), target, rows)
    logits = np.concatenate(list(model.session().all_logits(TOKENS)))
    assert logits.shape == (LENGTH, 2048)
    assert np.abs(logits - expected(family, weights)).max() < TOLERANCE


@pytest.mark.parametrize("target", TARGETS)
def test_decode_after_a_chunked_prefill_equals_transformers(
    target: str, model_path: Callable[..., Path], expected: Expected
) -> None:
    session = load(model_path("mistral", ROUNDED, method="none", dtype="f32"), target, 16).session()
    wanted = expected("mistral", ROUNDED)
    assert np.abs(session.prefill(TOKENS[:100]) - wanted[99]).max() < TOLERANCE
    for i in range(100, LENGTH):
        assert np.abs(session.decode(TOKENS[i]) - wanted[i]).max() < TOLERANCE


@pytest.mark.parametrize("target", TARGETS)
def test_a_window_longer_than_the_prompt_gives_other_logits(
    target: str, model_path: Callable[..., Path], expected: Expected
) -> None:
    """Else the tests above would pass without windows."""
    model = load(model_path("mistral", {**ROUNDED, "sliding_window": LENGTH}, method="none", dtype="f32"), target)
    assert set(model.config.sliding_windows) == {LENGTH}
    logits = np.concatenate(list(model.session().all_logits(TOKENS)))
    difference = np.abs(logits - expected("mistral", ROUNDED)).max(axis=1)
    assert difference[:24].max() < TOLERANCE
    assert difference[24:].min() > 10 * TOLERANCE


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", ("a16", "a8"))
def test_a_row_is_bit_equal_whatever_runs_beside_it(target: str, mode: str, model_path: Callable[..., Path]) -> None:
    path = model_path("qwen3", method="rtn", bits=4, group_size=32)
    results = [np.concatenate(list(load(path, target, rows, mode).session().all_logits(TOKENS[:80]))) for rows in (256, 37, 1)]
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("target", TARGETS)
def test_an_int8_cache_is_near_and_not_equal(target: str, model_path: Callable[..., Path]) -> None:
    path = model_path("qwen3", ROUNDED, method="none", dtype="f32")
    f16, int8 = (
        Model.load(path, target=target, mode="a16", max_logits=256, context=192, kv=kv).session() for kv in ("f16", "int8")
    )
    difference = np.abs(next(f16.all_logits(TOKENS)) - next(int8.all_logits(TOKENS)))
    assert 1e-4 < difference.max() < 0.1
