"""Rows of llama.cpp in the table of quality."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import InputError
from edgeq.tools.lab import llama_cpp_types

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny-llama"
installed = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in llama_cpp_types.PACKAGES), reason="needs llama-cpp-python and gguf"
)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp_types, "PACKAGES", {"no_such_module_a": "package-a", "json": "json", "no_such_b": "b"})
    with pytest.raises(InputError, match="this needs package-a and b, not installed: pip install package-a b"):
        llama_cpp_types.measure(str(TINY), ["Q4_K_M"], ["code"], 64, 512)


def test_inputs_are_weighed_by_their_mean_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeq.converters.calibration import dataset
    from edgeq.converters.calibration.logits import Network

    monkeypatch.setattr(dataset, "MAX_ROWS", 2)

    network = Network.open(str(TINY))
    weights = llama_cpp_types.importance(network, lambda done, total, label: None)
    names = llama_cpp_types.names(network)
    matrices = {name for name in names if "norm" not in name}
    assert set(weights) == matrices and len(matrices) == 6 * 7 + 1
    assert np.array_equal(weights["blk.2.attn_q.weight"], weights["blk.2.attn_k.weight"])
    assert weights["blk.0.ffn_down.weight"].shape == (768,) and all((x > 0).all() for x in weights.values())
    # RMSNorm makes the mean square 1, then its gain is applied.
    gain = network.checkpoint.whole("model.layers.0.input_layernorm.weight")
    assert np.mean(weights["blk.0.attn_q.weight"] / gain**2) == pytest.approx(1, rel=0.01)


def test_rows_are_folded_to_whole_blocks() -> None:
    assert [llama_cpp_types.rows_per_block(columns) for columns in (256, 768, 576, 960, 96, 100)] == [1, 1, 4, 4, 8, 64]
    weights = {"blk.0.attn_q.weight": np.arange(1, 97, dtype=np.float32), "blk.0.ffn_down.weight": np.ones(512, np.float32)}
    found = llama_cpp_types.folded_inputs(weights)
    assert found["blk.0.attn_q.weight"].shape == (768,) and found["blk.0.ffn_down.weight"].shape == (512,)
    # A folded row is eight rows, which have the same inputs.
    assert np.array_equal(found["blk.0.attn_q.weight"][96:192], weights["blk.0.attn_q.weight"])


def test_folded_files_read_back_as_the_checkpoint(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from edgeq.converters.calibration.logits import Network

    network = Network.open(str(checkpoint("llama_gqa")))
    llama_cpp_types.write_floats(network, tmp_path / "folded.gguf", folded=True)
    columns = {name: network.checkpoint.whole(tensor).shape[-1] for name, (tensor, _) in llama_cpp_types.names(network).items()}
    back = llama_cpp_types.ReadBack(network, tmp_path / "folded.gguf", columns)
    assert any(llama_cpp_types.rows_per_block(count) > 1 for count in columns.values())
    for name, _, nbytes, _ in back.sizes():
        tensor, _ = llama_cpp_types.names(network)[name]
        expected = network.checkpoint.whole(tensor)
        assert np.array_equal(back.whole(tensor).reshape(expected.shape), expected) and nbytes == expected.nbytes


@installed
def test_more_bits_lose_less_and_nothing_is_lost_in_floats(tmp_path: Path) -> None:
    rows = llama_cpp_types.measure(str(TINY), ["Q2_K", "Q4_K_M", "F16"], ["code"], 64, 1024)
    q2, q4, f16 = (row["texts"]["code"]["files"][0]["kl_mean"] for row in rows)
    assert q2 > 4 * q4 > 0.004 and f16 < 1e-5
    assert rows[0]["read_bytes"] < rows[1]["read_bytes"] < 3.3e6 and rows[1]["head"] == "Q6_K"
    with pytest.raises(InputError, match="no type 'Q9'; supported: .*Q4_K_M"):
        llama_cpp_types.measure(str(TINY), ["Q9"], ["code"], 64, 1024)
