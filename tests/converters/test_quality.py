"""On the trained tiny model AWQ loses less than rounding to nearest: what its search is for."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

from edgeq.converters.plan import ConvertOptions, convert
from edgeq.runtime import Model
from edgeq.tools.corpus import evaluation_code

SOURCE = Path(__file__).parents[2] / "models" / "tiny-llama"


def silent(*_: object) -> None:
    pass


def nll(path: Path, tokens: list[int]) -> float:
    """Mean negative log-likelihood over windows of 256 tokens."""
    model, total, count = Model.load(path, mode="a16", max_logits=256, context=256), 0.0, 0
    for start in range(0, len(tokens) - 256, 256):
        window = tokens[start : start + 256]
        logits = np.concatenate([part.astype(np.float64) for part in model.session().all_logits(window)])[:-1]
        top = logits.max(1)
        chosen = logits[np.arange(255), window[1:]]
        total += float((np.log(np.exp(logits - top[:, None]).sum(1)) + top - chosen).sum())
        count += 255
    return total / count


def test_awq_at_2_bits_loses_less_than_rounding(tmp_path: Path) -> None:
    text = tmp_path / "calibration.py"
    text.write_text(Path(textwrap.__file__).read_text()[:9000])
    files = {}
    for method in ("rtn", "awq"):
        options = ConvertOptions(
            method=method,  # type: ignore[arg-type]
            bits=2,
            group_size=32,
            head=8,
            calibration=text if method == "awq" else None,
        )
        files[method] = convert(str(SOURCE), tmp_path / f"{method}.edgeq", options, silent).path
    tokens = Model.load(files["rtn"]).text.encode("\n".join(evaluation_code()))[:8192]
    losses = {method: nll(path, tokens) for method, path in files.items()}
    # 1.5 % of perplexity
    assert losses["awq"] < losses["rtn"] - 0.015, losses


@pytest.fixture(autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
