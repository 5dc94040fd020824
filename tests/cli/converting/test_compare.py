"""`edgeq compare`: what a file loses against its source and others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.running import REFERENCE, Run, objects


def test_compare_with_itself_finds_no_difference(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text(Path(__file__).read_text(encoding="utf-8"))
    options = ("--text", text, "--window", 64, "--limit", 256, "--json", *REFERENCE)
    facts = objects(edgeq("compare", demo, "--against", demo, *options))
    (file,) = facts["files"]
    assert file["kl_mean"] == 0 and file["top1_agreement"] == 1 and file["perplexity"] == facts["source"]["perplexity"]
    assert file["perplexity_ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert facts["windows"] == 4 and facts["predicted_tokens"] == 4 * 63


def test_a_source_is_scored_once_for_a_text(
    edgeq: Run, demo: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeq.converters.calibration import logits
    from edgeq.tools.quality import kept_predictions

    options = ("--against", tiny_llama, "--window", 64, "--json", "--limit")
    monkeypatch.setattr(kept_predictions, "cache_folder", lambda: tmp_path)
    first = edgeq("compare", demo, *options, 512)
    assert "tiny-llama: scoring 512 tokens, in up to 0.7 GB of memory" in first.stderr
    runs: list[object] = []
    monkeypatch.setattr(logits, "stream_logits", lambda *arguments: runs.append(arguments))
    second = edgeq("compare", demo, *options, 512)
    assert objects(second) == objects(first) and not runs and "scoring" not in second.stderr
    monkeypatch.setattr("edgeq.tools.quality.scorers.available_bytes", lambda: 750_000_000)
    monkeypatch.setattr("edgeq.converters.calibration.logits.available_bytes", lambda: 750_000_000)
    other = edgeq("compare", demo, *options, 8192)
    assert other.exit_code == 1 and re.search(r"scoring 8192 tokens needs 0\.8 GB .*; --limit (\d+) would fit", other.stderr)
    assert not runs


@pytest.mark.exhaustive
def test_compare_orders_files_by_their_bits(edgeq: Run, demo: Path, tiny_llama: Path, tmp_path: Path) -> None:
    two = tmp_path / "two.edgeq"
    assert edgeq("convert", tiny_llama, "-o", two, "--bits", 2, "--group-size", 32).exit_code == 0
    facts = objects(edgeq("compare", demo, two, "--against", tiny_llama, "--window", 128, "--limit", 1024, "--json"))
    four_bits, two_bits = facts["files"]
    assert 0 < four_bits["kl_mean"] < two_bits["kl_mean"] and four_bits["top1_agreement"] > two_bits["top1_agreement"]
    assert facts["source"]["perplexity"] < two_bits["perplexity"]
    (pair,) = facts["pairs"]
    assert pair["perplexity_ratio"]["low"] > 1
    table = edgeq("compare", demo, "--against", tiny_llama, "--window", 128, "--limit", 512)
    assert re.search(r"^tiny.edgeq +4.58 +3.2 +a16 ", table.stdout, re.M) and four_bits["bits_per_weight"] < 5
    assert table.exit_code == 0 and "against source" in table.stdout and "4 windows of 128 tokens of code" in table.stdout
