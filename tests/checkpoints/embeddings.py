"""Random checkpoints of embedding models as sentence-transformers saves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

PROMPTS = {"query": "Instruct: find what answers\nQuery: ", "document": ""}
MODES = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def write_settings(
    folder: Path,
    pooling: str,
    *,
    normalize: bool = True,
    prompts: dict[str, str] | None = None,
    width: int = 128,
    **settings: Any,
) -> None:
    """modules.json and what it names, as sentence-transformers wrote them up to version 5.0."""
    kinds = ["Transformer", "Pooling", "Normalize"][: 2 + normalize]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    switches = {name: name == MODES[pooling] for name in MODES.values()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **switches}))
    written = {"prompts": prompts or {}, "default_prompt_name": None, "similarity_fn_name": "cosine", **settings}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(written))


def embedding_checkpoint(source: Path, folder: Path, pooling: str, *, ends: bool = False, **settings: Any) -> Path:
    """The decoder of a checkpoint without its head, its tensors named without `model.`; `ends`: its tokenizer ends texts."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoConfig, AutoModel

    dtype = AutoConfig.from_pretrained(source).dtype or torch.float32
    AutoModel.from_pretrained(source, dtype=dtype).save_pretrained(folder)
    shutil.copy(source / "tokenizer_config.json", folder / "tokenizer_config.json")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if ends:
        tokenizer.post_processor = TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_settings(folder, pooling, **settings)
    return folder
