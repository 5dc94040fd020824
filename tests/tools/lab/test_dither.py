"""Sources for comparisons: near the published weights, on no grid, and the same each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import convert
from edgeq.converters.exporters.export import export
from edgeq.converters.importers import open_source
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import InputError
from edgeq.format.codec import dequantized
from edgeq.tools.lab.dither import dither

Checkpoint = Callable[..., Path]
PROJECTION = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def quantized(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A folder with weights of 4 bits in groups of 32."""
    options = ConvertOptions(method="rtn", bits=4, group_size=32, symmetric=True)
    file = convert(str(checkpoint("llama_gqa")), tmp_path / "a.edgeq", options, lambda *_: None)
    export(file.path, "compressed-tensors", tmp_path / "quantized", False, lambda *_: None)
    return tmp_path / "quantized"


def test_weights_move_by_half_a_step_at_most(quantized: Path, tmp_path: Path) -> None:
    dither(str(quantized), tmp_path / "out", 0)
    source = open_source(str(quantized), HubAccess()).tensors()[PROJECTION]
    assert source.codec is not None
    rows, columns = source.shape
    arrays = source.quantized(0, rows, PROJECTION)  # type: ignore[attr-defined]
    step = np.repeat(arrays["scale"].astype(np.float32), 32, axis=1)[:, :columns]
    moved = load_file(tmp_path / "out" / "model.safetensors")[PROJECTION].astype(np.float32)
    shares = (moved - dequantized(source.codec, columns, arrays)) / step
    # Evenly drawn, but for what float16 rounds.
    assert 0.49 < np.abs(shares).max() < 0.505
    assert np.std(shares) == pytest.approx(12**-0.5, rel=0.1) and abs(shares.mean()) < 0.05


def test_the_folder_is_a_checkpoint_and_the_same_each_time(quantized: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        dither(str(quantized), tmp_path / out, 7)
    dither(str(quantized), tmp_path / "c", 8)
    first, again, other = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("a", "b", "c"))
    assert first == again != other
    options = ConvertOptions(method="rtn", bits=8)
    assert convert(str(tmp_path / "a"), tmp_path / "again.edgeq", options, lambda *_: None).metadata.linears


def test_floats_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its weights are floats"):
        dither(str(checkpoint("llama_gqa")), tmp_path / "out", 0)
    assert not (tmp_path / "out").exists()
