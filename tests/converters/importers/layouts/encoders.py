"""Encoders as llama.cpp's converter lays them out: keys, and tensors under names that its package knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.converters.importers.layouts.states import Array

ENCODERS = ("bert", "nomic-bert", "modern-bert")
ENCODERS_LACK = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
ENCODERS_LACK += ("rope.dimension_count",)
"""Keys that files of BERT do not have."""


def skipped(config: Mapping[str, Any]) -> int:
    """Rows of positions that the converter cuts: those of XLM-R up to that of the padding."""
    return int(config["pad_token_id"]) + 1 if config["model_type"] == "xlm-roberta" else 0


def encoder_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {"attention.causal": False}
    if config["model_type"] == "modernbert":
        keys |= modern_bert_metadata(config)
    else:
        keys["attention.layer_norm_epsilon"] = config["layer_norm_eps"]
    keys["context_length"] = config["max_position_embeddings"] - skipped(config)
    if config["architectures"][0].endswith("ForSequenceClassification"):
        keys |= {"classifier.output_labels": ["LABEL_0"]}
    return keys


def modern_bert_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The epsilon is there by two names, of the two that a published checkpoint has it by."""
    return {
        **{f"attention.layer_norm_{kind}epsilon": config["norm_eps"] for kind in ("", "rms_")},
        "hidden_activation": config.get("hidden_activation", "gelu"),
        "classifier.pooling_type": {"mean": 1, "cls": 2}[config.get("classifier_pooling", "cls")],
        "attention.sliding_window": config["local_attention"],
        "attention.sliding_window_pattern": config["global_attn_every_n_layers"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "rope.scaling.type": "none",
    }


def encoder_tensors(config: Mapping[str, Any], name: str, values: Array) -> dict[str, Array]:
    ranks = config["architectures"][0].endswith("ForSequenceClassification")
    if config["model_type"] == "modernbert":
        return {name.removeprefix("model.").replace("classifier.", "classifier.out_proj."): values}
    name = name.removeprefix("bert.").removeprefix("roberta.")
    # A head of two layers is written under the names that XLM-R has for it.
    name = name.replace("pooler.dense", "classifier.dense") if ranks else name
    if name in ("classifier.weight", "classifier.bias"):
        name = name.replace("classifier", "classifier.out_proj")
    if name.startswith("pooler."):
        return {}
    if name.endswith("position_embeddings.weight"):
        values = np.ascontiguousarray(values[skipped(config) :])
    return {name: values}
