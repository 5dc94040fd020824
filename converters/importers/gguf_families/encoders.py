"""What the keys of a GGUF file say of an encoder, as keys of transformers' config.json.

Read in llama.cpp's converter and model code.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_keys import GgufKeys, Settings
from edgeq.errors import UnsupportedError

SEGMENTS = "token_types.weight"
SCORE, POOLER = "cls.output.weight", "cls.weight"
"""The last layer of a reranker, and the one before it."""


def bert(keys: GgufKeys) -> Settings:
    """llama.cpp stores no activation: published models have this one.  Rows of positions before the first are left out."""
    return {"hidden_act": "gelu", **nomic_bert(keys)}


def nomic_bert(keys: GgufKeys) -> Settings:
    if keys.flag("attention.causal", True):
        raise keys.wrong("attention.causal", True, "false")
    return {"type_vocab_size": rows_of(keys, SEGMENTS)}


def rows_of(keys: GgufKeys, matrix: str) -> int:
    """How many rows it has; programs drop the dimension of a single one."""
    shape = keys.shapes.get(matrix, ())
    return shape[0] if len(shape) > 1 else 1


def bert_reranker(keys: GgufKeys) -> Settings:
    """UnsupportedError: a reranker of BERT whose pooler llama.cpp's converter left out."""
    keys.value("classifier.output_labels")
    if POOLER not in keys.shapes:
        raise UnsupportedError(
            f"{keys.place}: a reranker without {POOLER}, the layer before its score, which llama.cpp's converter leaves out of "
            "a BERT; convert the original checkpoint"
        )
    # How many there are is all that counts, and more than one are refused.
    return bert(keys) | {"id2label": dict.fromkeys(range(min(rows_of(keys, SCORE), 2)), "")}
