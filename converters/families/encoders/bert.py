"""BERT (Devlin et al. 2018, arXiv 1810.04805), RoBERTa and XLM-RoBERTa: learned positions, norms after the blocks, biases.

A norm after a block, x = norm(x + f(x)), is counted to the block after it, which reads it and adds to it: that of the embedding
is the first layer's, and that of the last layer is the last norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.family import (
    EMBEDDING,
    NORM,
    POSITIONS,
    FamilyDescription,
    Values,
    dense_tensor,
    linear_module,
    nothing_unused,
)
from edgeq.errors import FormatError, UnsupportedError
from edgeq.format.manifest import dense_shapes
from edgeq.network.config import ModelConfig
from edgeq.network.pooling import DenseLayer, Pooling
from edgeq.network.rope import Rope

Sources = dict[str, TensorSource]
MODULES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
"""Part of a layer -> the module of the checkpoint."""
MODULE = "torch.nn.modules."
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def bert_settings(values: Values) -> dict[str, Any]:
    hidden, heads, activation = values["hidden_size"], values["num_attention_heads"], values["hidden_act"]
    if hidden % heads:
        raise FormatError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act {activation!r:.80} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return {
        "layer_norm": True,
        "rms_norm_eps": values["layer_norm_eps"],
        "rope": Rope(theta=10000.0, kind="learned"),
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "hidden_act": ACTIVATIONS[activation],
        "gated_mlp": False,
        "normed_residual": "all",
        "bidirectional": True,
    }


def first_position(values: Values) -> int:
    """The row of position 0 in XLM-RoBERTa's table: those up to that of the padding token were meant for padding."""
    padding = values["pad_token_id"]
    if type(padding) is not int or not 0 <= padding < 1 << 16:
        raise FormatError(f"pad_token_id is {padding!r:.40}; expected the id of a token")
    return padding + 1


def roberta_settings(values: Values) -> dict[str, Any]:
    rows = values["max_position_embeddings"]
    if type(rows) is not int or rows <= first_position(values):
        raise FormatError(f"max_position_embeddings is {rows!r:.40}; {first_position(values)} rows come before position 0")
    return bert_settings(values) | {"max_position_embeddings": rows - first_position(values)}


def bert_sources(config: ModelConfig, values: Values, skipped: int = 0) -> Sources:
    """`skipped`: rows of the table of positions before position 0."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    sources = {EMBEDDING: _same("embeddings.word_embeddings.weight", (config.vocab_size, hidden))}
    sources[POSITIONS] = _positions(config, values, skipped)
    for kind in ("weight", "bias"):
        norms = ["embeddings.LayerNorm", *(f"encoder.layer.{layer}.output.LayerNorm" for layer in range(layers))]
        ours = [*(f"model.layers.{layer}.input_layernorm" for layer in range(layers)), NORM.removesuffix(".weight")]
        for mine, theirs in zip(ours, norms, strict=True):
            sources[f"{mine}.{kind}"] = _same(f"{theirs}.{kind}", (hidden,))
        for layer in range(layers):
            p, theirs = f"model.layers.{layer}.", f"encoder.layer.{layer}."
            norm = f"{theirs}attention.output.LayerNorm.{kind}"
            sources[f"{p}post_attention_layernorm.{kind}"] = _same(norm, (hidden,))
            for part, module in MODULES.items():
                shape = {"up": (inner, hidden), "down": (hidden, inner)}.get(part, (hidden, hidden))
                stored: tuple[int, ...] = shape if kind == "weight" else shape[:1]
                sources[f"{p}{linear_module(part)}.{kind}"] = _same(f"{theirs}{module}.{kind}", stored)
    return sources


def _same(name: str, shape: tuple[int, ...]) -> TensorSource:
    return TensorSource(name, shape, shape)


def _positions(config: ModelConfig, values: Values, skipped: int) -> TensorSource:
    """The rows of positions, to each of which that of a segment (token type) is added; one table for each segment."""
    hidden, rows, types = config.hidden_size, config.max_position_embeddings, values["type_vocab_size"]
    parts = []
    for segment in range(config.segments):
        kind = TensorSource("embeddings.token_type_embeddings.weight", (types, hidden), (1, hidden), segment)
        table = "embeddings.position_embeddings.weight"
        parts.append(TensorSource(table, (rows + skipped, hidden), (rows, hidden), skipped, every=kind))
    whole = (config.segments * rows, hidden)
    return parts[0] if len(parts) == 1 else TensorSource("", (), whole, parts=tuple(parts))


def types_of(values: Values) -> int:
    found = values["type_vocab_size"]
    if type(found) is not int or not 1 <= found <= 1 << 10:
        raise FormatError(f"type_vocab_size is {found!r:.40}; expected an integer from 1 to 1024")
    return found


def of_checkpoint(values: Values) -> FamilyDescription:
    """The description of one BERT: where its positions lie depends on its keys."""
    given = {**BERT_DEFAULTS, **values}
    types_of(given)
    return replace(BERT, sources=lambda config: bert_sources(config, given))


def of_bert_reranker(values: Values) -> FamilyDescription:
    given, names = {**BERT_DEFAULTS, **values}, ("pooler.dense", "classifier")
    segments = segments_of(given)
    return replace(
        BERT_RERANKER,
        settings=lambda keys: bert_settings(keys) | {"segments": segments},
        sources=lambda config: bert_sources(config, given) | reranker_sources(config, names),
    )


def of_roberta(values: Values) -> FamilyDescription:
    given = {**ROBERTA_DEFAULTS, **values}
    types_of(given)
    return replace(ROBERTA, sources=lambda config: bert_sources(config, given, first_position(given)))


def of_roberta_reranker(values: Values) -> FamilyDescription:
    given, names = {**ROBERTA_DEFAULTS, **values}, ("classifier.dense", "classifier.out_proj")
    types_of(given)
    return replace(
        ROBERTA_RERANKER,
        sources=lambda config: bert_sources(config, given, first_position(given)) | reranker_sources(config, names),
    )


def score_layer(values: Values, bias: bool = True) -> DenseLayer:
    """The last layer of a reranker, which gives the score in the range in which sentence-transformers gives it: 0 to 1, unless
    the checkpoint says otherwise."""
    labels = values.get("id2label")
    if not isinstance(labels, dict) or len(labels) != 1:
        found = len(labels) if isinstance(labels, dict) else 2
        raise UnsupportedError(f"id2label has {found} labels; supported: rerankers, which have one")
    named = values.get("sentence_transformers")
    said = named.get("activation_fn") if isinstance(named, dict) else None
    said = said or values.get("sbert_ce_default_activation_function") or f"{MODULE}activation.Sigmoid"
    kinds = {f"{MODULE}activation.Sigmoid": "sigmoid", f"{MODULE}linear.Identity": "none"}
    if not isinstance(said, str) or said not in kinds:
        raise UnsupportedError(f"the score goes through {str(said)[:80]!r}; supported: {', '.join(kinds)}")
    return DenseLayer(1, bias, kinds[said])


def bert_scores(values: Values) -> Pooling:
    layers = DenseLayer(values["hidden_size"], True, "tanh"), score_layer(values)
    return Pooling("cls", False, layers, ranks=True)


def reranker_sources(config: ModelConfig, names: tuple[str, ...], norm: str = "") -> Sources:
    """`names`: of the layers of the head in the checkpoint, the last one gives the score;  `norm`: of that between them."""
    sources = {}
    for name, shape in dense_shapes(config).items():
        ours = dense_tensor(name)
        index, kind = int(ours.split(".")[1]), ours.split(".", 2)[2]
        theirs = f"{names[index]}.{kind}" if kind in ("weight", "bias") else f"{norm}.weight"
        sources[ours] = _same(theirs, shape)
    return sources


def segments_of(values: Values) -> int:
    """Tables of positions: where a second text is of another type than the first, it has its own."""
    return min(types_of(values), 2)


def unused(config: Any, tensor: str) -> bool:
    """The pooler was trained to tell whether two sentences follow one another."""
    return tensor.startswith("pooler.")


BERT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
ROBERTA_DEFAULTS: Mapping[str, Any] = {**BERT_DEFAULTS, "pad_token_id": 1}
BERT = FamilyDescription(
    "BertModel",
    BERT_DEFAULTS,
    {
        "position_embedding_type": (None, "absolute"),
        "is_decoder": (None, False),
        "add_cross_attention": (None, False),
        "embedding_size": (None,),
    },
    bert_settings,
    biases=("q", "k", "v", "o", "up", "down"),
    derived=(".position_ids",),
    renamed={"bert.": ""},
    unused=unused,
    headless=True,
    variants=of_checkpoint,
)
ROBERTA = replace(
    BERT,
    architecture="XLMRobertaModel",
    defaults=ROBERTA_DEFAULTS,
    settings=roberta_settings,
    renamed={"roberta.": ""},
    variants=of_roberta,
)
BERT_RERANKER = replace(
    BERT, architecture="BertForSequenceClassification", scores=bert_scores, variants=of_bert_reranker, unused=nothing_unused
)
ROBERTA_RERANKER = replace(
    ROBERTA,
    architecture="XLMRobertaForSequenceClassification",
    scores=bert_scores,
    variants=of_roberta_reranker,
)
BERT_FAMILIES = (
    BERT,
    ROBERTA,
    replace(ROBERTA, architecture="RobertaModel"),
    BERT_RERANKER,
    ROBERTA_RERANKER,
    replace(ROBERTA_RERANKER, architecture="RobertaForSequenceClassification"),
)
