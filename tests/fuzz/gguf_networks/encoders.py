"""Encoders and rerankers."""

from __future__ import annotations

from gguf_networks.entries import LAYER_NORM, Entries, layer_norms, layers, matrices, norms, of

BERT_LAYER = {f"{norm}.{kind}": [0, [64]] for norm in ("attn_output_norm", "layer_output_norm") for kind in ("weight", "bias")}
BERT_LAYER |= matrices(8, attn_q=[64, 64], attn_k=[64, 64], attn_v=[64, 64], attn_output=[64, 64])
BERT_LAYER |= matrices(2, ffn_up=[96, 64], ffn_down=[64, 96])
BERT_LAYER |= {f"{name}.bias": [0, [64]] for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")}
BERT_LAYER |= {"ffn_up.bias": [0, [96]]}
BERT_KEYS = of("bert", LAYER_NORM, block_count=1, feed_forward_length=96, attention__causal=False, pooling_type=2)
BERT_ENDS = {"position_embd.weight": [0, [64, 64]], "token_types.weight": [0, [2, 64]]}
BERT_ENDS |= {f"token_embd_norm.{kind}": [0, [64]] for kind in ("weight", "bias")}
SCORE = {"cls.weight": [0, [64, 64]], "cls.bias": [0, [64]], "cls.output.weight": [0, [1, 64]], "cls.output.bias": [0, [1]]}
MODERN_KEYS = of("modern-bert", LAYER_NORM, block_count=2, feed_forward_length=96, attention__causal=False, pooling_type=1)
MODERN_KEYS |= {"modern-bert.attention.sliding_window": 8, "modern-bert.attention.sliding_window_pattern": 2}
MODERN_KEYS |= {"modern-bert.rope.freq_base_swa": 1e3, "modern-bert.hidden_activation": "silu"}
MODERN_KEYS |= {"modern-bert.classifier.pooling_type": 2}
MODERN_LAYER = norms("ffn_norm") | matrices(8, attn_qkv=[192, 64], attn_output=[64, 64])
MODERN_LAYER |= matrices(2, ffn_up=[192, 64], ffn_down=[64, 96])
MODERN = norms("token_embd_norm", "output_norm") | layers(MODERN_LAYER, norms("attn_norm") | MODERN_LAYER)
MODERN_SCORE = norms("cls.norm") | {name: SCORE[name] for name in SCORE if name != "cls.bias"}
NOMIC_KEYS = of("nomic-bert", LAYER_NORM, block_count=1, feed_forward_length=96, attention__causal=False, pooling_type=1)
NOMIC_LAYER = layer_norms("attn_output_norm", "layer_output_norm") | matrices(8, attn_qkv=[192, 64], attn_output=[64, 64])
NOMIC_LAYER |= matrices(2, ffn_up=[96, 64], ffn_gate=[96, 64], ffn_down=[64, 96])
NOMIC = layer_norms("token_embd_norm") | {"token_types.weight": [0, [2, 64]]} | layers(NOMIC_LAYER)
ENCODERS: dict[str, tuple[Entries, Entries]] = {
    "bert": (BERT_KEYS, BERT_ENDS | layers(BERT_LAYER)),
    "bert-reranker": (BERT_KEYS, BERT_ENDS | SCORE | layers(BERT_LAYER)),
    "modern-bert": (MODERN_KEYS, MODERN),
    "modern-bert-reranker": (MODERN_KEYS, MODERN | MODERN_SCORE),
    "nomic-bert": (NOMIC_KEYS, NOMIC),
}
"""Name -> metadata of the network, and its tensors, the embedding left out."""
