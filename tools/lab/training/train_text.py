"""Train the demo model; models/tiny-llama was made by `python -m edgeq.tools.lab.training.train_text OUT --seconds 4200`.

A Llama of 5.2 M parameters (hidden 256, 6 layers, 8 heads of 32, 4 key/value heads, FFN 768, 2048-token byte-level BPE, tied
head) trained from scratch on the text every Python carries.  4200 seconds on 2 CPU cores gave the checkpoint in the repository.
It is not trained on the text of evaluation (edgeq.tools.quality.corpus) and calibration (edgeq.converters.calibration.dataset).
"""

from __future__ import annotations

import math
import os
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.terminal import note
from edgeq.tools.quality.corpus import EVALUATION, evaluation_code, evaluation_docs, topics

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

WINDOW, BATCH, RATE = 256, 16, 3e-3
VOCABULARY, BEGIN, END = 2048, 0, 1
EVALUATED = 32768
"""Tokens of each evaluation split."""
SKIPPED = ("site-packages", "/test", "/tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__", "config-")
"""Parts of paths of the standard library that are not read."""


def training_texts() -> list[str]:
    """Every module that is neither evaluated nor calibrated with, and three quarters of the language reference, three times."""
    return [*(path.read_text(encoding="utf-8", errors="ignore") for path in _training_modules()), *_training_docs() * 3]


def _training_docs() -> list[str]:
    return [text for i, text in enumerate(topics()) if i % 4]


def _training_modules() -> Iterator[Path]:
    from edgeq.converters.calibration.dataset import MODULES

    library = sysconfig.get_paths()["stdlib"]
    for folder, folders, files in sorted(os.walk(library)):
        folders.sort()
        if any(part in folder for part in SKIPPED):
            continue
        for name in sorted(files):
            held_out = folder == library and name in (*EVALUATION, *MODULES)
            if name.endswith(".py") and not held_out:
                yield Path(folder, name)


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE with VOCABULARY tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """int64 [tokens]: every text between begin and end."""
    import torch

    ids = [i for encoded in tokenizer.encode_batch(list(texts)) for i in (BEGIN, *encoded.ids, END)]
    return torch.tensor(ids, dtype=torch.int64)


def new_model() -> LlamaForCausalLM:
    """Random weights in the shape of the demo model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, share: float) -> float:
    """A hundred steps of warm-up, constant for a fifth of the time, then a cosine down to 3 %."""
    level = 1.0 if share < 0.2 else 0.5 * (1 + math.cos(math.pi * (share - 0.2) / 0.8)) * 0.97 + 0.03
    return RATE * min(1.0, (step + 1) / 100) * level


def train(model: LlamaForCausalLM, data: torch.Tensor, seconds: float) -> None:
    """AdamW on random windows of `data`, int64 [tokens], for so many seconds of steps."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    used, step = 0.0, 0
    while used < seconds:
        started = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, used / seconds)
        starts = torch.randint(0, len(data) - WINDOW - 1, (BATCH,)).tolist()
        batch = torch.stack([data[i : i + WINDOW] for i in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        used, step = used + time.monotonic() - started, step + 1
        if step % 100 == 0:
            note(f"step {step}, {used:.0f} of {seconds:.0f} s, loss {loss.item():.3f}")


def perplexity(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Over windows of `ids`, int64 [tokens], each from an empty cache."""
    import torch

    model.eval()
    rows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    with torch.no_grad():
        losses = [model(part, labels=part).loss.item() * len(part) for part in rows.split(BATCH)]
    return math.exp(sum(losses) / len(rows))


@click.command(cls=Command)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seconds", default=4200.0, show_default=True, help="Seconds of training steps.")
def main(out: Path, seconds: float) -> None:
    """Train the demo model and save it in the folder OUT.  Needs torch and transformers."""
    import torch
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    texts = training_texts()
    tokenizer = train_tokenizer(texts)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>")
    wrapped.save_pretrained(out)
    data = encode(tokenizer, [texts[i] for i in np.random.default_rng(0).permutation(len(texts))])
    model = new_model()
    train(model, data, seconds)
    for name, split in (("code", evaluation_code()), ("docs", evaluation_docs())):
        note(f"perplexity of {name}: {perplexity(model, encode(tokenizer, split)[:EVALUATED]):.2f}")
    model.bfloat16().save_pretrained(out)


if __name__ == "__main__":
    main()
