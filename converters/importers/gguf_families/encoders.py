"""What the keys of a GGUF file say of an encoder, as keys of transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_keys import GgufKeys, Settings
from edgeq.converters.importers.gguf_settings import windows
from edgeq.errors import UnsupportedError

SEGMENTS = "token_types.weight"
SCORE, POOLER = "cls.output.weight", "cls.weight"
"""The last layer of a reranker, and the one before it."""
SCORED = {1: "mean", 2: "cls"}
"""Values of `classifier.pooling_type`."""
WINDOWS_PERIOD = 3
"""llama.cpp's own, for files of ModernBERT that do not say in which layers a token sees all: the first of three."""


def bert(keys: GgufKeys) -> Settings:
    """llama.cpp stores no activation: published models have this one.  Rows of positions before the first are left out."""
    return {"hidden_act": "gelu", **nomic_bert(keys)}


def nomic_bert(keys: GgufKeys) -> Settings:
    sees_both_ways(keys)
    return {"type_vocab_size": rows_of(keys, SEGMENTS)}


def sees_both_ways(keys: GgufKeys) -> None:
    if keys.flag("attention.causal", True):
        raise keys.wrong("attention.causal", True, "false")


def modern_bert(keys: GgufKeys) -> Settings:
    """Files that name no activation are older than models with another.  llama.cpp halves the window, as the checkpoints do."""
    sees_both_ways(keys)
    # That of rerankers, which files of others have too.
    keys.value("classifier.pooling_type")
    # llama.cpp's converter writes it beside the epsilon of the norms that there are.
    keys.only("attention.layer_norm_rms_epsilon", keys.number("attention.layer_norm_epsilon"))
    activation = keys.value("hidden_activation", "gelu")
    if not isinstance(activation, str):
        raise keys.wrong("hidden_activation", activation, "a name")
    local, everywhere = windows(keys, WINDOWS_PERIOD, first=True), keys.number("rope.freq_base", 10000.0)
    return {
        "hidden_activation": activation,
        # Nothing has a window of one where no layer has any.
        "local_attention": local["sliding_window"] or 1,
        "layer_types": local.get("layer_types") or ["full_attention"] * keys.layers(),
        "global_rope_theta": everywhere,
        "local_rope_theta": keys.number("rope.freq_base_swa", everywhere),
    }


def modern_bert_reranker(keys: GgufKeys) -> Settings:
    """Files that do not say of which states a score is made are of models that take their mean."""
    found = keys.integer("classifier.pooling_type", 1)
    if found not in SCORED:
        raise keys.wrong("classifier.pooling_type", found, " or ".join(map(str, SCORED)))
    pooling = {"classifier_pooling": SCORED[found], "classifier_bias": "cls.bias" in keys.shapes}
    return modern_bert(keys) | scores(keys) | pooling


def rows_of(keys: GgufKeys, matrix: str) -> int:
    """How many rows it has; programs drop the dimension of a single one."""
    shape = keys.shapes.get(matrix, ())
    return shape[0] if len(shape) > 1 else 1


def bert_reranker(keys: GgufKeys) -> Settings:
    """UnsupportedError: a reranker of BERT whose pooler llama.cpp's converter left out."""
    if POOLER not in keys.shapes:
        raise UnsupportedError(
            f"{keys.place}: a reranker without {POOLER}, the layer before its score, which llama.cpp's converter leaves out of "
            "a BERT; convert the original checkpoint"
        )
    return bert(keys) | scores(keys)


def scores(keys: GgufKeys) -> Settings:
    """How many there are is all that counts, and more than one are refused."""
    keys.value("classifier.output_labels")
    return {"id2label": dict.fromkeys(range(min(rows_of(keys, SCORE), 2)), "")}
