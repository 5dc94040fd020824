"""Rerankers: scores of pairs of texts equal those of transformers, whatever is ranked beside a document."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.converters.convert import convert
from edgeq.converters.families import recognise
from edgeq.converters.families.encoders.bert import MODULE
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import CheckpointError, InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.network.pooling import DenseLayer, Pooling
from edgeq.runtime import Batch, Model
from edgeq.runtime.network.embedding import RankedDocument, ranked, sigmoid
from edgeq.targets.reference import attention as reference_attention
from tests.checkpoints.encoders import bert_reranker, modernbert_reranker, xlm_reranker

MAKERS: dict[str, Callable[[Path], Path]] = {
    "bert": bert_reranker,
    "xlm_roberta": xlm_reranker,
    "modernbert": modernbert_reranker,
}
QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris.", "The capital of France is Paris, and was so before.", "Bananas are yellow", "x" * 60, "?"]
TARGETS = ("reference", "cpu")


def loaded(path: Path, target: str = "cpu", **options: Any) -> Model:
    return Model.load(path, target=target, threads=1, threads_prefill=1, **options)


def expected(folder: Path, family: str, config: Any = None, **changes: Any) -> list[float]:
    """Scores by transformers; other `config` keys, or `changes` of what its tokenizer gives, show what else they would be."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **config or {})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for document in DOCUMENTS:
        given = {**tokenizer(QUERY, document, return_tensors="pt"), **changes}
        if family != "bert" or given.get("token_type_ids", 0) is None:
            given.pop("token_type_ids", None)
        with torch.no_grad():
            found.append(float(model(**given).logits[0, 0]))
    return [float(x) for x in sigmoid(np.array(found))] if family != "bert" else found


def scores(model: Model) -> list[float]:
    return [each.relevance_score for each in sorted(model.rerank(QUERY, DOCUMENTS))]


@pytest.mark.parametrize("family", MAKERS)
def test_scores_are_those_of_transformers(family: str, source: Any, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(source(family), family)
    assert max(wanted) - min(wanted) > 0.01
    with loaded(path(family, method="none")) as model:
        assert np.allclose(scores(model), wanted, atol=2e-3)
    with loaded(path(family, bits=4, group_size=32)) as model:
        assert len(scores(model)) == len(DOCUMENTS)
    # Keys and values as they are, not in f16.
    monkeypatch.setattr(reference_attention, "cached", lambda x, kv, keys: x)
    with loaded(path(family, method="none"), "reference") as model:
        assert np.allclose(scores(model), wanted, rtol=1e-5, atol=2e-6)


def test_the_second_text_has_a_segment_of_its_own(source: Any, path: Any) -> None:
    """Without it, as in a model of one text, the scores are others."""
    config = ModelFile.open(path("bert", method="none")).metadata.config
    assert config.segments == 2 and config.pooling == Pooling(
        "cls", False, (DenseLayer(96, True, "tanh"), DenseLayer(1, True, "none")), ranks=True
    )
    assert ModelFile.open(path("xlm_roberta", method="none")).metadata.config.segments == 1
    with loaded(path("bert", method="none")) as model:
        found = scores(model)
        assert not np.allclose(found, expected(source("bert"), "bert", token_type_ids=None), atol=2e-2)
        ((tokens, second),) = model.text.encode_pairs([("a", "b")])
        assert tokens == [2, 5, 3, 6, 3] and second == 3


def test_the_head_of_modernbert(source: Any, path: Any) -> None:
    """What the published reranker says, and another pooling, which gives other scores."""
    layers = DenseLayer(96, True, "gelu", norm=True), DenseLayer(1, True, "sigmoid")
    file = ModelFile.open(path("modernbert", method="none"))
    assert file.metadata.config.pooling == Pooling("mean", False, layers, ranks=True)
    assert file.metadata.arrays["dense.0_norm"].shape == (96,)
    published = json.loads((source("modernbert") / "config.json").read_text())
    del published["classifier_bias"], published["classifier_pooling"]
    layers = DenseLayer(96, False, "gelu", norm=True), DenseLayer(1, True, "sigmoid")
    assert recognise(published)[1].pooling == Pooling("cls", False, layers, ranks=True)
    with loaded(path("modernbert", method="none")) as model:
        for changes in ({"classifier_pooling": "cls"}, {"classifier_activation": "relu"}):
            assert not np.allclose(scores(model), expected(source("modernbert"), "modernbert", changes), atol=4e-3)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", MAKERS)
def test_a_score_does_not_depend_on_other_documents(family: str, target: str, path: Any) -> None:
    with loaded(path(family, method="none"), target) as model:
        together = model.rerank(QUERY, DOCUMENTS)
        alone = [model.rerank(QUERY, [document])[0].relevance_score for document in DOCUMENTS]
        assert [each.relevance_score for each in sorted(together)] == alone
        assert [each.relevance_score for each in together] == sorted(alone, reverse=True)
        assert model.rerank(QUERY, DOCUMENTS, top_n=2) == together[:2] and model.rerank(QUERY, []) == []


def test_the_order_of_equals_is_theirs() -> None:
    assert ranked([1.0, 2.0, 2.0, 0.5]) == [(1, 2.0), (2, 2.0), (0, 1.0), (3, 0.5)]
    assert ranked([1.0, 2.0], 1) == [RankedDocument(1, 2.0)]
    assert np.array_equal(sigmoid(np.array([-1e4, 0, 1e4], np.float32)), [0, 0.5, 1])


@pytest.mark.parametrize(
    ("query", "documents", "options", "message"),
    [
        ("", ["a"], {}, "`query` has an empty text"),
        (5, ["a"], {}, "`query` is 5"),
        ("a", "b", {}, "`documents` is 'b'; expected a list of strings"),
        ("a", ["b", ""], {}, "`documents` has an empty text"),
        ("a", [5], {}, "`documents` is 5"),
        ("a", ["b"], {"top_n": 0}, "`top_n` is 0"),
        ("a", ["b " * 200], {}, "tokens, the context 192 positions"),
        ("a", ["b"], {"instruction": "find"}, "this model reads no instruction; leave it out"),
        ("a", ["b"], {"on_progress": 5}, "`on_progress` is 5"),
    ],
)
def test_what_cannot_be_ranked_is_refused(query: Any, documents: Any, options: Any, message: str, path: Any) -> None:
    with loaded(path("bert", method="none")) as model, pytest.raises(InputError, match=message):
        model.rerank(query, documents, **options)


def test_a_reranker_does_nothing_else(path: Any, tiny_path: Path) -> None:
    with loaded(path("bert", method="none")) as model:
        for refused in (lambda: model.embed("a"), lambda: model.generate("a"), lambda: Batch(model, 2)):
            with pytest.raises(InputError, match=r"edgeq rerank, Model.rerank or /v1/rerank"):
                refused()
    with loaded(tiny_path) as model, pytest.raises(InputError, match="continues texts"):
        model.rerank("a", ["b"])


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"id2label": {"0": "a", "1": "b"}}, "id2label has 2 labels; supported: rerankers, which have one"),
        ("bert", {"id2label": None}, "id2label has 2 labels"),
        ("bert", {"sentence_transformers": {"activation_fn": f"{MODULE}activation.Tanh"}}, "the score goes through 'torch"),
        ("modernbert", {"id2label": None}, "id2label has 2 labels"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling is 'max'; supported: cls, mean"),
        ("modernbert", {"classifier_pooling": ["cls"]}, r"classifier_pooling is \['cls'\]; supported: cls, mean"),
        ("modernbert", {"classifier_activation": "relu"}, "classifier_activation is 'relu'"),
        ("modernbert", {"classifier_bias": 1}, "classifier_bias is 1; expected true or false"),
        ("modernbert", {"norm_bias": True}, "norm_bias is True"),
    ],
)
def test_what_a_reranker_cannot_have_is_refused_by_key(family: str, changes: Any, message: str, source: Any) -> None:
    config = json.loads((source(family) / "config.json").read_text())
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        recognise({**config, **changes})
    with pytest.raises(UnsupportedError, match="gives a score and no vector; leave --pooling"):
        recognise(config, pooling=Pooling("cls", True))


def test_a_tokenizer_that_joins_texts_otherwise_is_refused(source: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(source("bert"), tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["pair"] = tokenizer["post_processor"]["pair"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    try:
        file = convert(str(folder), tmp_path / "a.edgeq", ConvertOptions(method="none"), lambda *_: None)
    except UnsupportedError as error:
        assert "of a pair of texts" in str(error)
    else:
        # Where transformers takes tokenizer.json as it is, both are the same.
        assert file.metadata.config.segments == 2
