"""Fused launches against the operations one by one: the same bits, and as few launches as there are to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.format.container import ModelFile
from edgeq.format.records import KvCodec, Mode
from edgeq.runtime.network.adapted import adapted
from edgeq.runtime.network.decoder import decoder
from edgeq.targets import load
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.rows import PAGE, Page
from edgeq.targets.target import Options
from tests.cuda.comparing import adapter, read
from tests.cuda.emulated import BACKWARD, SHUFFLED, EmulatedDevice
from tests.targets.cases import rows_of

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

F16, INT8, INT4 = KvCodec(), KvCodec("int8"), KvCodec("int4")
RUNS = (20, 1, 3, 16)
"""Rows of the runs of a session: more than fused launches take, one token, and tiles of 8 in part and in full."""
NEIGHBOURS = 4
"""Launches of a token outside of the layers: embedding, what is added to it, the choice of rows, the head."""


def launches(program: CudaProgram, device: EmulatedDevice, fused: bool) -> tuple[list[np.ndarray], list[bytes], list[int]]:
    """Logits and pages of a session, and how many kernels each of its runs launched."""
    pages: list[Page] = [program.new_page() for _ in range((sum(RUNS) - 1) // PAGE + 1)]
    logits, counts, first = list[np.ndarray](), list[int](), 0
    for count in RUNS:
        device.launches.clear()
        # Times are those of operations.
        program.record(not fused)
        logits.append(program.run(rows_of(program, count, first, pages)).copy())
        counts.append(sum(device.launches.values()))
        first += count
    return logits, [program.save_page(page) for page in pages], counts


def compiled(device: EmulatedDevice, file: ModelFile, mode: Mode, kv: KvCodec, **options: Any) -> CudaProgram:
    return CudaTarget(device).compile(
        decoder(file.metadata, 192), file, Options(mode, max_rows=max(RUNS), max_logits=max(RUNS), kv=kv, **options)
    )


def equal(file: ModelFile, mode: Mode, kv: KvCodec, order: int = 0) -> float:
    """Asserts that fused launches give the same bits; returns launches of a token per layer."""
    device = EmulatedDevice(order)
    program = compiled(device, file, mode, kv)
    wanted, wanted_pages, apart = launches(program, device, fused=False)
    found, pages, together = launches(program, device, fused=True)
    assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert pages == wanted_pages and not any(np.isnan(each).any() for each in found)
    assert together[0] <= apart[0] and together[1] < apart[1]
    # The host starts experts by what it reads of their routing.
    assert program.kernels_per_token == together[1] or file.metadata.config.num_experts
    return (together[1] - NEIGHBOURS) / file.metadata.config.num_hidden_layers


FAMILIES = {
    "llama3_rope": (5, "a16", F16),
    "mistral": (5, "a8", INT8),
    "qwen2": (5, "a4", F16),
    "phi3": (5, "a8", F16),
    "qwen3": (5, "a16", KvCodec("int4", 4)),
    "gemma3": (7, "a16", INT8),
    "opt": (5, "a16", F16),
    "qwen2_moe": (60, "a16", F16),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_of_every_family(family: str, model_path: Callable[..., Path]) -> None:
    most, mode, kv = FAMILIES[family]
    file = ModelFile.open(model_path(family, {"initializer_range": 0.05}, method="rtn", bits=4, group_size=32))
    assert equal(file, mode, kv) <= most  # type: ignore[arg-type]


METHODS: dict[str, tuple[int, Mode, KvCodec, dict[str, Any]]] = {
    "rtn": (5, "a16", F16, {}),
    "quarot": (7, "a4", INT4, {}),
    "resq": (6, "a8", KvCodec("int4", 4), {"calibration_rows": 4, "calibration_length": 64}),
    "ttq": (9, "a8", INT8, {"bits": 4, "rank": 4, "group_size": 32}),
    "smoothquant": (5, "a8", F16, {"calibration_rows": 2, "calibration_length": 64}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_token_by_every_kind_of_method(method: str, model_path: Callable[..., Path]) -> None:
    """Transforms, rotated heads, orders, weights in two blocks, low rank, one scale per token; in another order of threads."""
    most, mode, kv, options = METHODS[method]
    file = ModelFile.open(model_path("tiny-llama", method=method, **options))
    assert equal(file, mode, kv, SHUFFLED if method == "resq" else BACKWARD) <= most


def test_a_token_with_an_adapter_beside_the_file(model_path: Callable[..., Path], tmp_path: Path) -> None:
    """One product gets a low-rank part in two of four layers, and costs one launch more there."""
    file = ModelFile.open(model_path("llama_gqa", {"initializer_range": 0.05}, method="rtn", bits=4, group_size=32))
    both = adapted(file, adapter(tmp_path / "adapter", {"q_proj": (128, 128), "v_proj": (64, 128)}, (0, 1)))
    assert equal(both, "a16", F16) == 5.5
    wanted, found, without = (
        target.compile(decoder(each.metadata, 192), each, Options("a16", max_rows=20, max_logits=20))
        for target, each in ((load("reference"), both), (CudaTarget(EmulatedDevice()), both), (load("reference"), file))
    )
    logits = [read(each, 20) for each in (wanted, found, without)]
    assert np.abs(logits[1] - logits[0]).max() <= 1e-2 * np.abs(logits[0]).max() < np.abs(logits[2] - logits[0]).max()


def test_a_token_with_requantized_weights(model_path: Callable[..., Path]) -> None:
    file = ModelFile.open(model_path("tiny-llama", method="ttq", bits=4, rank=0, group_size=32))
    device = EmulatedDevice()
    program = compiled(device, file, "a16", F16, requantize=True)
    weights, rng = program.new_weights(), np.random.default_rng(0)
    program.requantize(weights, [rng.uniform(0.5, 2, s.columns).astype(np.float32) for s in program.new_sums().inputs])
    results = []
    for on in (True, False):
        program.record(on)
        pages = [program.new_page()]
        for first, count in ((0, 5), (5, 1)):
            device.launches.clear()
            logits = program.run_requantized(rows_of(program, count, first, pages), weights).copy()
        results.append(logits)
    assert np.array_equal(*results)
    assert sum(device.launches.values()) <= 5 * file.metadata.config.num_hidden_layers + NEIGHBOURS
