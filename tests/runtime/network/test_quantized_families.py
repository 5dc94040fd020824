"""Families whose weights are rearranged or whose blocks are ordered otherwise, in 4 bits: every method, target and cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.runtime import Model
from tests.runtime.network.test_parity import HAVE_CPU, ROUNDED, TOKENS, load

FAMILIES = ("olmo2", "exaone4", "granite", "glm4", "ernie4_5", "cohere", "cohere2", "hunyuan", "stablelm", "stablelm_parallel")
FAMILIES += ("starcoder2", "gpt2", "bigcode", "bigcode_mha", "neox", "falcon_40b", "bloom", "mpt", "falcon_rw")
METHODS = ("rtn", "awq", "gptq")
MODES = ("a16", "a8")
LENGTH = 80
MAX_ERROR = 1e-3
"""Largest error of the cpu target as a share of the largest logit of the reference: a cache of f16 makes steps of last bits."""
LOST = 0.06
"""The largest mean divergence from the model in floats, in nats, of 4 bits in groups of 32."""


def logits_of(model: Model) -> NDArray[np.float32]:
    return np.concatenate(list(model.session().all_logits(TOKENS[:LENGTH])))


def divergence(exact: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Mean KL divergence of the rows, in nats."""
    p, q = (x.astype(np.float64) - x.max(axis=1, keepdims=True) for x in (exact, found))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def in_turn(choices: tuple[str, ...], always: tuple[str, ...] = ()) -> list[Any]:
    """Every family with one of the choices, by turns, and with those of `always`; in `make test` every eighth family with its
    turn."""
    found = []
    for i, family in enumerate(FAMILIES):
        turn = choices[i // 4 % len(choices)]
        for each in choices:
            if each == turn or each in always:
                marks = () if i % 8 == 0 and each == turn else pytest.mark.exhaustive
                found.append(pytest.param(family, each, marks=marks, id=f"{family}-{each}"))
    return found


# Rounding to nearest, which no family changes, is that of the file below.
@pytest.mark.parametrize(("family", "method"), in_turn(METHODS, always=("awq", "gptq")))
def test_four_bits_lose_little_and_targets_agree(family: str, method: str, model_path: Callable[..., Path]) -> None:
    exact = logits_of(load(model_path(family, ROUNDED, method="none", dtype="f32"), "reference"))
    calibrated = {} if method == "rtn" else {"calibration_rows": 4, "calibration_length": 128}
    path = model_path(family, ROUNDED, method=method, bits=4, group_size=32, **calibrated)
    wanted = logits_of(load(path, "reference"))
    assert 1e-5 < divergence(exact, wanted) < LOST
    if HAVE_CPU:
        error = np.abs(logits_of(load(path, "cpu")) - wanted).max() / np.abs(wanted).max()
        print(f"{family} {method}: divergence {divergence(exact, wanted):.4f}, largest error {error:.1e} of the largest logit")
        assert error < MAX_ERROR


@pytest.mark.skipif(not HAVE_CPU, reason="no edgeq.targets.cpu")
@pytest.mark.parametrize(("family", "mode"), in_turn(MODES))
def test_a_session_cut_in_chunks_gives_the_same_bits(family: str, mode: str, model_path: Callable[..., Path]) -> None:
    path = model_path(family, ROUNDED, method="rtn", bits=4, group_size=32)
    whole, *cut = [logits_of(load(path, "cpu", rows, mode)) for rows in (256, 37, 1)]
    assert all(np.array_equal(whole, each) for each in cut)
