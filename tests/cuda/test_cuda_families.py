"""Whole models on the emulated device: one tiny random one of every family, and the tiny Llama by several methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.container import ModelFile
from edgeq.records import KvCodec, Mode
from edgeq.runtime.decoder import decoder
from edgeq.runtime.tokenizer import Text
from edgeq.targets import load
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.target import Options
from tests.cuda.comparing import kl, read
from tests.cuda.emulated import EmulatedDevice
from tests.targets.cases import rows_of

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

FAMILIES = (
    "llama3_rope", "mistral", "qwen2", "qwen3", "phi3", "phi3_longrope", "smollm3", "gemma3", "opt", "mixtral", "qwen2_moe",
    "qwen3_moe",
)  # fmt: skip
LENGTH = 70
LARGEST_ERROR = 1e-2
"""Of the largest logit of the reference, in a16."""
LARGEST_KL = 1e-3
"""Nats in the mean: in integer modes and caches a last bit can turn a code."""


def logits(target: Any, file: ModelFile, count: int, mode: Mode, kv: KvCodec, chunks: tuple[int, ...] = ()) -> np.ndarray:
    options = Options(mode, max_rows=count, max_logits=count, kv=kv)
    return read(target.compile(decoder(file.metadata, 192), file, options), count, chunks)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family(family: str, model_path: Callable[..., Path]) -> None:
    """Tokens are 0 to 69; weights large enough that a mistake shows."""
    file = ModelFile.open(model_path(family, {"initializer_range": 0.05}, method="rtn", bits=4, group_size=32))
    f16 = KvCodec()
    wanted, found = (logits(t, file, LENGTH, "a16", f16) for t in (load("reference"), CudaTarget(EmulatedDevice())))
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    print(f"{family}: largest error {error:.1e} of the largest logit")
    assert error <= LARGEST_ERROR
    for cuts in ((1, 17, 52),):
        assert np.array_equal(logits(CudaTarget(EmulatedDevice()), file, LENGTH, "a16", f16, cuts), found)


def test_an_untied_embedding_and_a_head_of_floats(model_path: Callable[..., Path]) -> None:
    file = ModelFile.open(model_path("llama_mha", {"initializer_range": 0.05}, method="none", dtype="bf16"))
    wanted, found = (logits(t, file, 20, "a16", KvCodec()) for t in (load("reference"), CudaTarget(EmulatedDevice())))
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()


METHODS: dict[str, dict[str, Any]] = {
    "awq": {"calibration_rows": 2, "calibration_length": 64},
    "ttq": {"bits": 4, "rank": 4, "group_size": 32},
    "resq": {"calibration_rows": 4, "calibration_length": 64},
    "quarot": {},
    "smoothquant": {"calibration_rows": 2, "calibration_length": 64},
}


@pytest.mark.parametrize("method", METHODS)
def test_the_tiny_llama_by_every_kind_of_method(method: str, model_path: Callable[..., Path]) -> None:
    """In a16 with a cache of f16 the logits; in a8 and the file's own cache the distributions, beside those of the CPU."""
    file = ModelFile.open(model_path("tiny-llama", method=method, **METHODS[method]))
    text = (Path(__file__).parents[2] / "runtime" / "sampling.py").read_text(encoding="utf-8")
    tokens = np.array(Text.from_file(file).encode(text)[:256], np.int32)
    graph = decoder(file.metadata, 512)

    def run(target: Any, mode: Mode, kv: KvCodec) -> np.ndarray:
        program = target.compile(graph, file, Options(mode, max_rows=256, max_logits=256, kv=kv))
        rows = rows_of(program, 256)
        rows.tokens = tokens
        return np.asarray(program.run(rows)).copy()

    wanted, found = (run(t, "a16", KvCodec()) for t in (load("reference"), CudaTarget(EmulatedDevice())))
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    int4 = KvCodec("int4", file.metadata.kv.high)
    wanted, found, cpu = (run(t, "a8", int4) for t in (load("reference"), CudaTarget(EmulatedDevice()), load("cpu")))
    print(f"{method}: error {error:.1e}; a8, {int4.name}: KL {kl(wanted, found):.1e} nats, of the CPU {kl(wanted, cpu):.1e}")
    assert error <= LARGEST_ERROR
    # Activations and caches of 4 bits turn a last bit into a sixteenth of a range, on every target.
    assert kl(wanted, found) <= max(LARGEST_KL, 1.5 * kl(wanted, cpu))
