"""The checkpoint maker, the corpus, device profiles, and what the tables compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeq.devices import DEVICES, device
from edgeq.errors import InputError
from edgeq.tools import bench, corpus
from edgeq.tools.lab.make_checkpoint import SHAPES, make, tensors, tokenizer


def test_the_splits_of_the_corpus_do_not_overlap() -> None:
    assert not set(corpus.CALIBRATION) & set(corpus.EVALUATION)
    training = set(corpus.training_texts())
    assert not training & set(corpus.evaluation_code()) and not training & set(corpus.evaluation_docs())
    assert len(corpus.evaluation_code()) == 5 and len(corpus.evaluation_docs()) > 5


def test_the_digest_names_the_text() -> None:
    assert corpus.digest(["a", "b"]) != corpus.digest(["ab"]) != corpus.digest(["a", "c"])


def test_a_published_shape_has_its_published_size() -> None:
    def weights(name: str) -> int:
        total = 0
        for _, shape in tensors(SHAPES[name]):
            count = 1
            for n in shape:
                count *= n
            total += count
        return total

    assert weights("llama-3.2-1b") == 1_235_814_400
    assert weights("llama-3.2-3b") == 3_212_749_824
    assert weights("llama-3.1-8b") == 8_030_261_248


def test_a_made_checkpoint_loads_in_transformers_and_is_the_same_for_a_seed(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("a", "b"):
        make(tmp_path / name, SHAPES["tiny"], seed=4)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    text = "def f(x):\n    return x  # größer"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    ids = loaded(text, return_tensors="pt").input_ids
    assert loaded.decode(ids[0]) == text
    assert torch.isfinite(model(ids).logits).all()


def test_the_tokenizer_has_exactly_the_size_of_the_vocabulary() -> None:
    for size in (2048, 5000):
        made = tokenizer(size)
        assert made.get_vocab_size() == size
        assert max(made.get_vocab().values()) == size - 1
        assert json.loads(made.to_str())["added_tokens"][1]["content"] == "<|end|>"


def test_every_device_is_plausible() -> None:
    for name, profile in DEVICES.items():
        assert device(name) is profile and profile.usable_memory < profile.memory
        assert 4e9 < profile.usable_bandwidth <= profile.bandwidth
    assert device("raspberry-pi-5").ceiling(763_000_000) == pytest.approx(18.1, abs=0.1)
    with pytest.raises(InputError, match="'pi' is not known; choose one of raspberry-pi-4"):
        device("pi")


def test_a_sliding_window_reads_fewer_positions() -> None:
    from edgeq.config import ModelConfig, Rope

    config = ModelConfig("mistral", 64, 32, 48, 2, 2, 1, 16, 1e-5, Rope(1e4), 128, True, sliding_windows=(8, 0))
    assert config.positions_read(4) == 4 and config.positions_read(20) == (8 + 20) / 2


def test_rows_of_the_benchmark_are_named_as_llama_bench_names_them() -> None:
    assert bench.Test("pp", 512, 0).name == "pp512" and bench.Test("tg", 128, 512).name == "tg128 @ d512"


def test_compiling_is_told_in_two_lines_where_nobody_watches_and_not_at_all_when_nothing_is_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from edgeq.tools.terminal import compilation

    with compilation():
        pass
    assert capsys.readouterr() == ("", "")
    with compilation() as report:
        for done in range(4):
            report(done, 3, "compiling norm")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and len(lines) == 2 and lines[0] == "compiling 3 kernels, once on this machine ..."
    assert lines[1].startswith("kernels compiled in ") and lines[1].endswith(" s")
    with compilation() as report:
        report(0, 0, "measuring what is fastest")
        report(0, 0, "measuring what is fastest")
    assert capsys.readouterr().err == "measuring what is fastest, once on this machine ...\n"
