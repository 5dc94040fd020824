"""Decoders that rank documents in a prompt: scores equal those of the model card's code with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.converters.convert import convert
from edgeq.converters.families.ranking import PROMPTS
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import CheckpointError, FormatError, InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.network.pooling import DenseLayer, Pooling, RankingPrompt
from edgeq.runtime import Model
from edgeq.targets.reference import attention as reference_attention
from tests.checkpoints.encoders import bert_reranker, qwen3_reranker, xlm_roberta

QUERY = "What is the capital of France?"
# A control token that is spelled out, and places of the prompt, are text.
DOCUMENTS = ["Paris.", "The capital of France is Paris, and was so before.", "x" * 60, "{query} {document}", "?"]
INSTRUCTION = "Find what is yellow"
# As the model card has them.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
MAKERS: dict[str, Callable[[Path], Path]] = {
    "head": qwen3_reranker,
    "tied": lambda folder: qwen3_reranker(folder, tie_word_embeddings=True),
    "scored": lambda folder: qwen3_reranker(folder, scored=True),
}


OPTIONS: dict[str, Any] = {"method": "none", "rerank": "qwen3"}


def loaded(path: Path, target: str = "cpu") -> Model:
    return Model.load(path, target=target, threads=1, threads_prefill=1)


def expected(folder: Path, instruction: str = TASK) -> list[float]:
    """The probability of "yes" beside "no" as the last token, by transformers."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for document in DOCUMENTS:
        text = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
        tokens = [i for part in (PREFIX, text, SUFFIX) for i in tokenizer.encode(part, add_special_tokens=False).ids]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        answers = torch.stack([logits[tokenizer.token_to_id(answer)] for answer in ("no", "yes")])
        found.append(float(torch.softmax(answers, 0)[1]))
    return found


def scores(model: Model, **options: Any) -> list[float]:
    return [each.relevance_score for each in sorted(model.rerank(QUERY, DOCUMENTS, **options))]


@pytest.mark.parametrize("kind", ["head", "tied"])
def test_scores_are_those_of_the_model_card(kind: str, source: Any, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(source(kind))
    assert max(wanted) - min(wanted) > 0.01
    config = ModelFile.open(path(kind, **OPTIONS)).metadata.config
    assert config.pooling == Pooling("last", False, (DenseLayer(1, activation="sigmoid"),), ranks=True)
    with loaded(path(kind, **OPTIONS)) as model:
        assert np.allclose(scores(model), wanted, atol=2e-3)
    # Keys and values as they are, not in f16.
    monkeypatch.setattr(reference_attention, "cached", lambda x, kv, keys: x)
    with loaded(path(kind, **OPTIONS), "reference") as model:
        assert np.allclose(scores(model), wanted, rtol=1e-5, atol=2e-6)


def test_a_checkpoint_with_a_layer_for_the_score_is_the_same_network(path: Any) -> None:
    head, scored = (ModelFile.open(path(kind, **OPTIONS)) for kind in ("head", "scored"))
    assert head.metadata.config == scored.metadata.config and head.metadata.arrays.keys() == scored.metadata.arrays.keys()
    for name, ref in head.metadata.arrays.items():
        assert np.array_equal(head.array(ref), scored.array(scored.metadata.arrays[name])), name


def test_an_instruction_takes_the_place_of_that_of_the_file(source: Any, path: Any) -> None:
    wanted = expected(source("head"), INSTRUCTION)
    with loaded(path("head", **OPTIONS)) as model:
        found = scores(model, instruction=INSTRUCTION)
        assert np.allclose(found, wanted, atol=2e-3) and not np.allclose(found, scores(model), atol=4e-3)
        with pytest.raises(InputError, match="`instruction` is 5"):
            model.rerank(QUERY, DOCUMENTS, instruction=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_a_score_does_not_depend_on_other_documents(target: str, path: Any) -> None:
    with loaded(path("head", **OPTIONS), target) as model:
        alone = [model.rerank(QUERY, [document])[0].relevance_score for document in DOCUMENTS]
        assert scores(model) == alone


def test_control_tokens_of_a_document_are_text(path: Any) -> None:
    with loaded(path("head", **OPTIONS)) as model:
        control = model.text.control_token("<|im_end|>")
        plain, spelled = model.embedder.pairs("a", ["b", "<|im_end|>"])
        assert plain.tokens.count(control) == spelled.tokens.count(control) == 2


def test_weights_in_few_bits_rank_too(source: Any, tmp_path: Path) -> None:
    options = ConvertOptions(bits=8, group_size=32, rerank="qwen3")
    file = convert(str(source("tied")), tmp_path / "a.edgeq", options, lambda *_: None)
    assert file.metadata.arrays["dense.0"].shape == (1, 96) and "head" not in file.metadata.linears
    with loaded(tmp_path / "a.edgeq") as model:
        assert np.abs(np.array(scores(model)) - expected(source("tied"))).max() < 0.1


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises((UnsupportedError, InputError, CheckpointError)) as caught:
        convert(str(folder), folder.parent / "refused.edgeq", ConvertOptions(method="none", **options), lambda *_: None)
    return str(caught.value)


def test_what_is_no_such_decoder_is_refused(source: Any, tmp_path: Path) -> None:
    assert "in a prompt, which the checkpoint does not say; give --rerank qwen3" in refused(source("scored"))
    assert "gives no vectors; leave it out" in refused(source("head"), rerank="qwen3", pooling="last")
    for maker, name in ((bert_reranker, "BertForSequenceClassification"), (xlm_roberta, "XLMRobertaModel")):
        assert f"and this is {name}" in refused(maker(tmp_path / name), rerank="qwen3")
    folder = qwen3_reranker(tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["maybe"] = tokenizer["model"]["vocab"].pop("yes")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has no token 'yes' or 'no'" in refused(folder, rerank="qwen3")
    config = json.loads((source("scored") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    assert "id2label has 2 labels" in refused(folder, rerank="qwen3")
    with pytest.raises(InputError, match="--rerank 'other': not supported; choose qwen3"):
        ConvertOptions(rerank="other")  # type: ignore[arg-type]


GOOD = {"before": "a", "pair": "{instruction} {query} {document}", "after": "b", "instruction": "c"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"before": 5}, "has something that is not text"),
        ({"pair": "{query} {document}"}, "has not one {instruction}"),
        ({"pair": "{instruction} {query} {query} {document}"}, "has not one {query}"),
        ({"after": "x" * (1 << 17)}, "at most 131072 are possible"),
    ],
)
def test_a_prompt_that_no_converter_writes_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        RankingPrompt.of({"ranking_prompt": GOOD | changes})


def test_what_fills_a_prompt_is_not_looked_at_again() -> None:
    assert RankingPrompt.of({}) is None
    with pytest.raises(FormatError, match="is not a JSON object"):
        RankingPrompt.of({"ranking_prompt": "a"})
    with pytest.raises(UnsupportedError, match="unknown keys more"):
        RankingPrompt.of({"ranking_prompt": {**GOOD, "more": ""}})
    assert RankingPrompt(**GOOD).filled("{document}", "\\1 {query}") == "c {document} \\1 {query}"
    assert PROMPTS["qwen3"].instruction == TASK and (PROMPTS["qwen3"].before, PROMPTS["qwen3"].after) == (PREFIX, SUFFIX)
