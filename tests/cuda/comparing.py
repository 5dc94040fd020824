"""Small graphs on the emulated device and on the reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgeq.format.records import KvCodec, Mode
from edgeq.targets import load
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.graph import Graph
from edgeq.targets.rows import PAGE
from edgeq.targets.target import Options, Program
from tests.cuda.emulated import FORWARD, EmulatedDevice
from tests.targets.cases import Arrays, rows_of

F16 = KvCodec()


def program_of(
    graph: Graph, arrays: Arrays, count: int, mode: Mode = "a16", kv: KvCodec = F16, order: int | None = FORWARD
) -> Program:
    """On an emulated device whose threads run in `order`; None: on the reference."""
    target = load("reference") if order is None else CudaTarget(EmulatedDevice(order))
    return target.compile(graph, arrays, Options(mode, max_rows=count, max_logits=count, kv=kv))  # type: ignore[arg-type]


def read(program: Program, count: int, chunks: Sequence[int] = (), modality: np.ndarray | None = None) -> np.ndarray:
    """The results of `count` rows, in runs of `chunks` rows over one cache."""
    pages, first, seen = [program.new_page() for _ in range((count - 1) // PAGE + 1)], 0, []
    states = [program.new_state()] if program.snapshot_pages else []  # type: ignore[attr-defined]
    for part in chunks or [count]:
        rows = rows_of(program, part, first, pages)
        rows = replace(rows, modality=None if modality is None else modality[first : first + part], states=states)
        seen.append(program.run(rows).copy())
        first += part
    assert first == count
    return np.concatenate(seen)


def both(graph: Graph, arrays: Arrays, count: int, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Results of the reference and of the device."""
    with np.errstate(all="ignore"):
        oracle = read(program_of(graph, arrays, count, order=None, **options), count)  # type: ignore[arg-type]
    return oracle, read(program_of(graph, arrays, count, **options), count)  # type: ignore[arg-type]


def adapter(folder: Path, projections: dict[str, tuple[int, int]], layers: Sequence[int]) -> Path:
    """A LoRA adapter of random factors of rank 4, for projections of attention of these (rows, columns)."""
    from safetensors.numpy import save_file

    rng, factors = np.random.default_rng(0), dict[str, np.ndarray]()
    for layer in layers:
        for name, (rows, columns) in projections.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            factors[f"{module}.lora_A.weight"] = rng.normal(0, 0.2, (4, columns)).astype(np.float32)
            factors[f"{module}.lora_B.weight"] = rng.normal(0, 0.2, (rows, 4)).astype(np.float32)
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def kl(wanted: np.ndarray, found: np.ndarray) -> float:
    """Mean over rows of logits of the divergence of `found` from `wanted`, in nats."""
    theirs, ours = log_softmax(wanted), log_softmax(found)
    return float((np.exp(theirs) * (theirs - ours)).sum(axis=1).mean())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))
