"""What the README promises of a run: threads and chunks do not change the text, 8-bit activations cost little."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from edgeq.runtime import Model, Sampling
from edgeq.tools.quality.corpus import evaluation_code
from tests.targets.cases import HERE

PROMPT = "class Reader:\n    def __init__(self, path):\n" * 6


@pytest.mark.parametrize("mode", [pytest.param("a16", marks=pytest.mark.exhaustive), "a8"])
def test_one_to_eight_threads_give_the_same_text(tiny_path: Path, mode: str) -> None:
    texts = set()
    for threads in range(1, 9):
        model = Model.load(tiny_path, target="cpu", mode=mode, threads=threads)  # type: ignore[arg-type]
        texts.add("".join(model.generate(PROMPT, max_tokens=40, sampling=Sampling(temperature=0.8, seed=5))))
    assert len(texts) == 1


def test_instruction_sets_and_the_reference_agree_on_greedy_text(tiny_path: Path) -> None:
    texts = {"".join(Model.load(tiny_path, target="cpu", isa=isa).generate(PROMPT, max_tokens=32)) for isa in HERE}
    texts.add("".join(Model.load(tiny_path, target="reference").generate(PROMPT, max_tokens=32)))
    assert len(texts) == 1


def test_chunks_of_any_size_give_the_same_logits(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.runtime.session import session

    model, seen, chunks = Model.load(tiny_path, target="cpu"), [], []
    tokens = model.text.encode(PROMPT * 5)
    for seconds in (0.0, 1e-3, 1e6):
        monkeypatch.setattr(session, "CHUNK_SECONDS", seconds)
        ends: list[int] = []
        seen.append(model.session().prefill(tokens, lambda done, total, ends=ends: ends.append(done)))  # type: ignore[misc]
        chunks.append(ends)
    assert chunks[0] == [48, *range(60, len(tokens), 12), len(tokens)], "nothing is known of the machine yet"
    assert chunks[1][-1] == len(tokens) and chunks[2] == [len(tokens)], "other sessions have shown how fast it is"
    assert np.array_equal(seen[0], seen[1]) and np.array_equal(seen[0], seen[2])


@pytest.mark.exhaustive
def test_8_bit_activations_change_the_perplexity_by_less_than_0_3_percent(tiny_path: Path) -> None:
    tokens = Model.load(tiny_path).text.encode("\n".join(evaluation_code()))[: 64 * 256]
    nll = {}
    for mode in ("a16", "a8"):
        model, total = Model.load(tiny_path, target="cpu", mode=mode, max_logits=256, context=256), 0.0  # type: ignore[arg-type]
        for start in range(0, len(tokens), 256):
            window = tokens[start : start + 256]
            logits = np.concatenate([part.astype(np.float64) for part in model.session().all_logits(window)])[:-1]
            top = logits.max(1, keepdims=True)
            total += float((np.log(np.exp(logits - top).sum(1)) + top[:, 0] - logits[np.arange(255), window[1:]]).sum())
        nll[mode] = total / (64 * 255)
    assert abs(np.expm1(nll["a8"] - nll["a16"])) < 0.003, nll


def test_an_interrupt_ends_a_command_without_a_traceback(tiny_path: Path) -> None:
    code = "import edgeq.tools.cli.main; print('ready', flush=True); edgeq.tools.cli.main.main()"
    forever = ["bench", str(tiny_path), "-p", "900", "-n", "0", "-r", "1000", "--target", "reference"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *forever],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts background jobs with interrupts ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130 and b"Traceback" not in errors
