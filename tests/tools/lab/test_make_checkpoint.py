"""The checkpoint maker, and the splits of the corpus that the demo model was trained and is measured with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeq.tools.lab.make_checkpoint import SHAPES, make, tensors, tokenizer
from edgeq.tools.lab.peers import edgeq_pictures
from edgeq.tools.lab.training.train_text import training_texts
from edgeq.tools.quality import corpus


def test_the_splits_of_the_corpus_do_not_overlap() -> None:
    from edgeq.converters.calibration.dataset import MODULES

    assert not set(MODULES) & set(corpus.EVALUATION)
    training = set(training_texts())
    assert not training & set(corpus.modules(MODULES))
    assert not training & set(corpus.evaluation_code()) and not training & set(corpus.evaluation_docs())
    assert len(corpus.evaluation_code()) == 5 and len(corpus.evaluation_docs()) > 5


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
    assert weights("qwen2-vl-2b") == 2_208_985_600


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


@pytest.mark.exhaustive
def test_a_made_model_that_sees_is_converted_and_sees(tmp_path: Path) -> None:
    from edgeq.runtime import Model
    from edgeq.tools.measure import picture_bench

    make(tmp_path / "source", SHAPES["qwen2-vl-tiny"], seed=1)
    peer = tmp_path / "peer"
    peer.mkdir()
    edgeq_pictures.build(tmp_path / "source", peer)
    seconds = edgeq_pictures.load(peer, 1, 64, None).see((112, 56))
    assert seconds.first is not None and min(seconds.tower, seconds.processor, seconds.first) > 0
    model = Model.load(peer / "model.edgeq", image_tokens=16, context=64)
    with model.session() as session:
        logits = session.prefill(picture_bench.prompt_of(model, picture_bench.drawn(model, (112, 56))))
    assert np.isfinite(logits).all()


def test_the_tokenizer_has_exactly_the_size_of_the_vocabulary() -> None:
    for size in (2048, 5000):
        made = tokenizer(size)
        assert made.get_vocab_size() == size
        assert max(made.get_vocab().values()) == size - 1
        assert json.loads(made.to_str())["added_tokens"][1]["content"] == "<|end|>"
