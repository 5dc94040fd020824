"""The trained tiny Llama by every kind of method on the emulated device: logits, distributions and greedy texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.format.container import ModelFile
from edgeq.format.records import KvCodec, Mode
from edgeq.runtime import Model
from edgeq.runtime.answers.tokenizer import Tokenizer
from edgeq.runtime.network.decoder import decoder
from edgeq.targets import TargetChoice, load
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.target import Options, Target
from tests.cuda.comparing import kl
from tests.cuda.emulated import EmulatedDevice
from tests.targets.cases import rows_of

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

TOKENS, GREEDY = 256, 24
MAX_ERROR = 1e-2
"""As a share of the largest logit of the reference, in a16 with a cache of f16."""
MAX_KL = 1e-3
"""Nats in the mean: in integer modes and caches a last bit can turn a code."""
TIE = 1e-2
"""Between the two logits, of which rounding decides."""
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "awq": {"calibration_rows": 2, "calibration_length": 64},
    "ttq": {"bits": 4, "rank": 4, "group_size": 32},
    "resq": {"calibration_rows": 4, "calibration_length": 64},
    "quarot": {},
    "smoothquant": {"calibration_rows": 2, "calibration_length": 64},
}


@pytest.mark.parametrize("method", METHODS)
def test_256_tokens_of_code(method: str, model_path: Callable[..., Path]) -> None:
    """In a16 with a cache of f16 the logits; in a8 with caches of integers the distributions, beside the CPU's at 4 bits."""
    file = ModelFile.open(model_path("tiny-llama", method=method, **METHODS[method]))
    text = (Path(__file__).parents[3] / "runtime" / "sampling.py").read_text(encoding="utf-8")
    tokens = np.array(Tokenizer.from_file(file).encode(text)[:TOKENS], np.int32)
    graph = decoder(file.metadata, 512)

    def run(target: Target, mode: Mode, kv: KvCodec) -> np.ndarray:
        program = target.compile(graph, file, Options(mode, max_rows=TOKENS, max_logits=TOKENS, kv=kv))
        rows = rows_of(program, TOKENS)
        rows.tokens = tokens
        return np.asarray(program.run(rows)).copy()

    wanted, found = (run(target, "a16", KvCodec()) for target in (load("reference"), CudaTarget(EmulatedDevice())))
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    print(f"{method}: largest error {error:.1e} of the largest logit")
    assert error <= MAX_ERROR
    of_4_bits = any(each.activation and each.activation.bits < 8 for each in file.metadata.linears.values())
    for kv in (KvCodec("int8"), KvCodec("int4", file.metadata.kv.high)):
        wanted, found = (run(t, "a8", kv) for t in (load("reference"), CudaTarget(EmulatedDevice())))
        ours, most = kl(wanted, found), MAX_KL
        if kv.kind == "int4" or of_4_bits:
            # Codes of 4 bits turn a last bit into a sixteenth of a range, on every target.
            most = 2 * max(MAX_KL, kl(wanted, run(load("cpu"), "a8", kv)))
        print(f"{method}, a8, {kv.name}: KL {ours:.1e} nats, at most {most:.1e}")
        assert ours <= most


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_the_reference_but_for_ties(
    method: str, model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each after those that the reference chose, so that a tie changes none of the others and all are counted."""
    monkeypatch.setattr(
        "edgeq.runtime.model.pick",
        lambda name, file: TargetChoice(CudaTarget(EmulatedDevice()) if name == "cuda" else load(name), []),
    )
    path = model_path("tiny-llama", method=method, **METHODS[method])
    options: dict[str, Any] = {"mode": "a16", "kv": "f16", "context": 192}
    ties = list[float]()
    with Model.load(path, target="reference", **options) as reference, Model.load(path, target="cuda", **options) as model:
        sessions = reference.session(), model.session()
        prompt = model.text.encode("def read_file(path):")
        wanted, found = (session.prefill(prompt).copy() for session in sessions)
        if model.requantization:
            for session in sessions:
                session.requantize()
        for _ in range(GREEDY):
            token, ours = int(wanted.argmax()), int(found.argmax())
            if ours != token:
                ties.append(float(wanted[token] - wanted[ours]))
            wanted, found = (session.decode(token).copy() for session in sessions)
    print(f"{method}: {len(ties)} of {GREEDY} tokens are ties")
    assert all(gap < TIE for gap in ties)
