"""Small random checkpoints of encoders: models whose tokens see both ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.checkpoints.embeddings import PROMPTS, write_settings

TINY = Path(__file__).parents[2] / "models" / "tiny-llama"
WINDOW = 18
LAYERS = 4


def randomize(model: Any, seed: int = 5) -> Any:
    """Every tensor is random, norms and biases too: one that is lost or taken for another shows."""
    import torch

    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                gain = name.endswith("weight") and not type(model).__name__.startswith("Gemma")
                parameter.data = float(gain) + 0.3 * noise
            else:
                parameter.data = noise * (0.6 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model.eval()


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)


def write_word_pieces(folder: Path, segments: bool = True) -> None:
    """A WordPiece tokenizer of letters, as BERT has it: [CLS] first [SEP] second [SEP], in lower case, of segments 0 and 1."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!-'"
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
        "the",
        "paris",
        "##ing",
    ]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if segments else "[CLS] $A [SEP] [SEP] $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    kind = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    kind = kind if segments else {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **names}))


def write_dense(folder: Path, sizes: list[tuple[int, int]], activation: str = "linear.Identity", bias: bool = False) -> None:
    """Dense modules of these (in, out) after the pooling of a checkpoint, before its Normalize."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(3)
    modules = json.loads((folder / "modules.json").read_text())
    dense = []
    for index, (columns, rows) in enumerate(sizes, 2):
        place = folder / f"{index}_Dense"
        place.mkdir(exist_ok=True)
        settings = {"in_features": columns, "out_features": rows, "bias": bias}
        settings |= {"activation_function": f"torch.nn.modules.{activation}"}
        (place / "config.json").write_text(json.dumps(settings))
        tensors = {"linear.weight": rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)}
        tensors |= {"linear.bias": rng.normal(0, 0.3, rows).astype(np.float32)} if bias else {}
        save_file(tensors, place / "model.safetensors")
        dense.append({"path": place.name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules[:2] + dense + modules[2:]))


def through_dense(folder: Path, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the Dense modules of a checkpoint make of vectors [texts, channels]."""
    from safetensors.numpy import load_file

    for place in sorted(folder.glob("*_Dense")):
        settings, tensors = json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")
        x = x @ tensors["linear.weight"].T + tensors.get("linear.bias", np.float32(0))
        x = np.tanh(x) if settings["activation_function"].endswith("Tanh") else x
    return x


def embedding_gemma(folder: Path, **overrides: Any) -> Path:
    """Gemma 3 both ways, with windows of WINDOW, then a mean, two Dense modules and a Normalize."""
    import transformers

    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    settings: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 11, "rms_norm_eps": 3e-5,
        "max_position_embeddings": 192, "use_bidirectional_attention": True, "layer_types": kinds,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
        },
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    model = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**settings | overrides))
    save(randomize(model), folder)
    write_settings(folder, "mean", prompts=PROMPTS, width=96)
    write_dense(folder, [(96, 144), (144, 72)])
    return folder


BERT: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 192, "layer_norm_eps": 3e-4, "type_vocab_size": 3,
}  # fmt: skip
PADDING = 0
"""The token of XLM-R's padding, behind whose id positions begin."""


def bert(folder: Path, **overrides: Any) -> Path:
    """BERT with the vector of its first token."""
    import transformers

    model = transformers.BertModel(transformers.BertConfig(**BERT | {"hidden_act": "gelu_new"} | overrides))
    save(randomize(model), folder)
    write_word_pieces(folder)
    write_settings(folder, "cls", prompts=PROMPTS, width=96)
    return folder


def xlm_roberta(folder: Path, **overrides: Any) -> Path:
    """XLM-R with the mean of all tokens."""
    import transformers

    positions = {"max_position_embeddings": 192 + PADDING + 1, "pad_token_id": PADDING, "type_vocab_size": 1}
    model = transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**BERT | positions | overrides))
    save(randomize(model), folder)
    write_settings(folder, "mean", normalize=False, prompts=PROMPTS, width=96)
    return folder


def bert_reranker(folder: Path, **overrides: Any) -> Path:
    """One label, token types of two texts, and the score as it is."""
    import transformers

    settings = BERT | {"num_labels": 1, "type_vocab_size": 2} | overrides
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**settings))
    save(randomize(model), folder)
    write_word_pieces(folder)
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def xlm_reranker(folder: Path, **overrides: Any) -> Path:
    """One label, one token type, and the sigmoid that sentence-transformers puts after a score."""
    import transformers

    positions = {"max_position_embeddings": 192 + PADDING + 1, "pad_token_id": PADDING, "type_vocab_size": 1}
    settings = BERT | positions | {"num_labels": 1} | overrides
    model = transformers.XLMRobertaForSequenceClassification(transformers.XLMRobertaConfig(**settings))
    save(randomize(model), folder)
    write_word_pieces(folder, segments=False)
    return folder


MODERNBERT: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
    "max_position_embeddings": 192, "norm_eps": 3e-4, "local_attention": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
    },
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 1,
}  # fmt: skip


def modernbert(folder: Path, **overrides: Any) -> Path:
    """ModernBERT with windows in two of four layers, of WINDOW tokens in all."""
    import transformers

    model = transformers.ModernBertModel(transformers.ModernBertConfig(**MODERNBERT | overrides))
    save(randomize(model), folder)
    write_settings(folder, "mean", prompts=PROMPTS, width=96)
    return folder


def modernbert_reranker(folder: Path, **overrides: Any) -> Path:
    """One label, the mean of all tokens, a bias of the layer before the score."""
    import transformers

    settings = MODERNBERT | {"num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True} | overrides
    model = transformers.ModernBertForSequenceClassification(transformers.ModernBertConfig(**settings))
    save(randomize(model), folder)
    write_word_pieces(folder, segments=False)
    return folder


def nomic_bert(folder: Path, **overrides: Any) -> Path:
    """Nomic BERT with the mean of all tokens."""
    import transformers

    settings = BERT | {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}} | overrides
    model = transformers.NomicBertModel(transformers.NomicBertConfig(**settings))
    save(randomize(model), folder)
    write_word_pieces(folder)
    write_settings(folder, "mean", prompts=PROMPTS, width=96)
    return folder


def qwen3_reranker(folder: Path, scored: bool = False, **overrides: Any) -> Path:
    """A causal Qwen3 whose tokenizer has "yes", "no" and the control tokens of its prompt; `scored`: as it is converted to one
    that gives a score, which is the same: its row is that of "yes" less that of "no" in the head."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 3e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    # The last word is made of others by the last rule.
    words["yes"] = words.pop("\u0120*,")
    tokenizer["model"]["merges"].pop()
    for name, word in (("<|im_start|>", "<|begin|>"), ("<|im_end|>", "<|end|>")):
        words[name] = words.pop(word)
        next(each for each in tokenizer["added_tokens"] if each["content"] == word)["content"] = name
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings | overrides))
    model = randomize(model, seed=7)
    if model.config.tie_word_embeddings:
        # Logits of rows as large as those of an embedding are far apart, and all scores 0 or 1.
        model.lm_head.weight.data[[words["yes"], words["no"]]] *= 0.1
    if scored:
        head, states = model.lm_head.weight, model.model.state_dict()
        config = transformers.Qwen3Config(**settings | overrides | {"num_labels": 1})
        model = transformers.Qwen3ForSequenceClassification(config).eval()
        model.model.load_state_dict(states)
        model.score.weight.data = (head[words["yes"]] - head[words["no"]])[None].detach().clone()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
