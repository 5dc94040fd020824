"""Decoders that rank documents: Qwen3-Reranker (Zhang et al. 2025, arXiv 2506.05176), by what it would answer.

The score is the softmax over the logits of "yes" and "no" after the prompt, which is the sigmoid of their difference: of one
row, that of "yes" less that of "no" in the head.  Checkpoints for sequence classification hold that row.
"""

from __future__ import annotations

from dataclasses import replace

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.checkpoint.tokenizer import TextAssets
from edgeq.converters.families.decoders.llama import LLAMA_FAMILIES
from edgeq.converters.families.encoders.bert import reranker_sources, score_layer
from edgeq.converters.families.family import EMBEDDING, HEAD, Family, Values
from edgeq.errors import UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.pooling import DenseLayer, Pooling, RankingPrompt
from edgeq.text import foreign_tokenizer

YES, NO = "yes", "no"
PROMPTS = {
    "qwen3": RankingPrompt(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Given a web search query, retrieve relevant passages that answer the query",
    )
}
"""Option -> the prompt of a decoder that ranks, as its authors publish it."""
ANSWERS = Pooling("last", False, (DenseLayer(1, activation="sigmoid"),), ranks=True)
"""How much more likely one answer is than the other."""


SCORING = ("Qwen3ForSequenceClassification",)
"""Architectures with a layer for the score in place of the head."""
ANSWERING = ("Qwen3ForCausalLM", *SCORING)


def _architecture(values: Values) -> object:
    found = values.get("architectures")
    return found[0] if isinstance(found, list) and found else found


def answering_pooling(values: Values) -> Pooling | None:
    """That of a decoder with a head, by its config.json; None: the checkpoint has a layer for the score."""
    return ANSWERS if _architecture(values) == ANSWERING[0] else None


def check_ranking(values: Values, prompt: str | None, place: str) -> None:
    """UnsupportedError: by its config.json a decoder that ranks and no prompt, or a prompt for a model that reads none."""
    found = _architecture(values)
    if prompt is not None and found not in ANSWERING:
        raise UnsupportedError(
            f"{place}: --rerank {prompt} is for decoders that answer yes or no, such as Qwen/Qwen3-Reranker-0.6B "
            f"({' or '.join(ANSWERING)}), and this is {str(found)[:80]}; leave it out"
        )
    if prompt is None and found in SCORING:
        raise UnsupportedError(
            f"{place}: a decoder that ranks documents reads them in a prompt, which the checkpoint does not say; give "
            f"--rerank {' or '.join(PROMPTS)}"
        )


def answering(family: Family, text: TextAssets, values: Values) -> Family:
    """The family of a decoder whose score is its head's row of one answer less that of the other; `values`: its config.json.

    UnsupportedError: the tokenizer has no token for one of them.
    """
    config, description = family.config, family.description
    if description.scores is not None:
        return family
    assert isinstance(config, ModelConfig)
    library = foreign_tokenizer.load(text.blobs["tokenizer.json"]).tokenizer
    yes, no = (library.token_to_id(answer) for answer in (YES, NO))
    if yes is None or no is None:
        raise UnsupportedError(
            f"the tokenizer has no token {YES!r} or {NO!r}; supported: rerankers that answer with one of them"
        )
    table, row = (config.vocab_size, config.hidden_size), (1, config.hidden_size)
    head = EMBEDDING if values.get("tie_word_embeddings", description.defaults["tie_word_embeddings"]) else HEAD
    sources = {
        "dense.0.weight": TensorSource(head, table, row, yes, every=TensorSource(head, table, row, no, factor=-1.0)),
        # What else is made of it does not take it away.
        EMBEDDING: TensorSource(EMBEDDING, table, table),
    }
    return replace(family, description=replace(description, sources=lambda config: description.sources(config) | sources))


def decoder_scores(values: Values) -> Pooling:
    return Pooling("last", False, (score_layer(values, bias=False),), ranks=True)


RANKING_FAMILIES = tuple(
    replace(
        each,
        architecture=SCORING[0],
        sources=lambda config: reranker_sources(config, ("score",)),
        scores=decoder_scores,
    )
    for each in LLAMA_FAMILIES
    if each.architecture == ANSWERING[0]
)
