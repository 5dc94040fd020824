"""Train a tiny policy: `python -m edgeq.tools.lab.training.train_policy models/tiny-qwen2vl OUT`, a π0 of 1.2 M parameters.

It learns to reach: the first three numbers of an action go in a straight line from the robot's to a goal that the first camera
shows (how much brighter each colour is on the left than on the right), the other three to a goal of the second camera (at the
top than at the bottom).  Pictures, states and lines of text are made as `edgeq compare` makes situations of them
(tools/quality/compare_actions.py), so that a file of it can be compared on what it was trained for.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.terminal import note
from edgeq.tools.quality.compare_actions import COARSE

if TYPE_CHECKING:
    import torch

SIDE, PATCH, CAMERAS, NUMBERS, ACTIONS, STEPS = 24, 6, 2, 6, 16, 10
IMAGE_TOKENS = (SIDE // PATCH) ** 2
IMAGE, BEGIN, VOCABULARY = 2049, 0, 2052
TEXT_TOKENS = 8
DECODER: dict[str, Any] = {
    "model_type": "gemma", "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": BEGIN,
    "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
EXPERT = DECODER | {"hidden_size": 64, "intermediate_size": 192}
TOWER = {
    "model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 3,
    "intermediate_size": 192, "patch_size": PATCH, "image_size": SIDE, "vision_use_head": False,
}  # fmt: skip
SPREAD = 2 * (1 / 12 / (COARSE * COARSE / 2)) ** 0.5
"""Standard deviation of the mean of half a picture of uniform pixels from -1 to 1 less that of the other half, about."""
Floats = NDArray[np.float32]


def pictures(rng: np.random.Generator, count: int) -> Floats:
    """Pixels float32 [count, cameras, 3, SIDE, SIDE] from -1 to 1."""
    from PIL import Image

    coarse = rng.integers(0, 256, (count * CAMERAS, COARSE, COARSE, 3), np.uint8)
    images = [Image.fromarray(each).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for each in coarse]
    pixels = np.stack([np.asarray(each, np.float32) for each in images]) / 127.5 - 1
    return pixels.transpose(0, 3, 1, 2).reshape(count, CAMERAS, 3, SIDE, SIDE)


def reached(pixels: Floats, states: Floats) -> Floats:
    """The actions float32 [count, ACTIONS, NUMBERS] that the policy learns."""
    half = SIDE // 2
    across = pixels[:, 0, :, :, :half].mean((2, 3)) - pixels[:, 0, :, :, half:].mean((2, 3))
    down = pixels[:, 1, :, :half].mean((2, 3)) - pixels[:, 1, :, half:].mean((2, 3))
    goals = np.concatenate([across, down], 1) / np.float32(2**0.5 * SPREAD)
    done = np.arange(1, ACTIONS + 1, dtype=np.float32)[:, None] / ACTIONS
    return np.asarray(states[:, None] + done * (goals - states)[:, None], np.float32)


def batch(rng: np.random.Generator, count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the policy reads, and the actions that it should make."""
    import torch

    pixels, states = pictures(rng, count), rng.standard_normal((count, NUMBERS), np.float32)
    tokens = np.full((count, CAMERAS * IMAGE_TOKENS + 1 + TEXT_TOKENS), IMAGE)
    tokens[:, -1 - TEXT_TOKENS] = BEGIN
    tokens[:, -TEXT_TOKENS:] = rng.integers(2, 2048, (count, TEXT_TOKENS))
    actions = torch.from_numpy(reached(pixels, states))
    given = {"state": states, "input_ids": tokens, "pixel_values": pixels, "attention_mask": np.ones_like(tokens)}
    seen = torch.ones(count, CAMERAS, dtype=torch.bool)
    return {name: torch.from_numpy(value) for name, value in given.items()} | {"pixel_attention_mask": seen}, actions


@click.command(cls=Command, help=__doc__)
@click.argument("tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seconds", type=int, default=420, show_default=True, help="How long.")
@click.option("--batch", "size", type=int, default=32, show_default=True)
def main(tokenizer: Path, out: Path, seconds: int, size: int) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    vlm = {"model_type": "paligemma", "text_config": DECODER, "vision_config": TOWER, "projection_dim": DECODER["hidden_size"]}
    sizes = {"chunk_size": ACTIONS, "max_state_dim": NUMBERS, "max_action_dim": NUMBERS, "num_inference_steps": STEPS}
    config = transformers.PI0Config(vlm_config={**vlm, "image_token_index": IMAGE}, dit_config=EXPERT, **sizes)
    model = transformers.PI0ForConditionalGeneration(config)
    parameters = list(model.parameters())
    note(f"{sum(each.numel() for each in parameters):,} parameters")
    optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.01, betas=(0.9, 0.98))
    began, steps, share, losses = time.monotonic(), 0, 0.0, list[float]()
    while share < 1:
        share = (time.monotonic() - began) / seconds
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (steps + 1) / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1, share))) / 2)
        given, actions = batch(rng, size)
        loss = model(**given, actions=actions).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        steps += 1
        if steps % 200 == 0:
            note(f"step {steps}, {share:.0%}: loss {np.mean(losses[-200:]):.4f}")
    model.eval()
    given, actions = batch(np.random.default_rng(1), 64)
    found = model.sample_actions(**given)
    left = (found - actions).square().mean() / actions.var()
    note(f"{steps} steps; of the variance of the actions of 64 situations {left:.3f} are missed")
    save(model, tokenizer, out)


def save(model: Any, tokenizer: Path, out: Path) -> None:
    model.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (out / file).write_text((tokenizer / file).read_text().replace("<|image_pad|>", "<image>"))
    edges = {"max_height": SIDE, "max_width": SIDE}
    processor = {"image_processor_type": "PI0ImageProcessor", "size": edges, "pad_size": {"height": SIDE, "width": SIDE}}
    (out / "preprocessor_config.json").write_text(json.dumps(processor | {"image_seq_length": IMAGE_TOKENS}))


if __name__ == "__main__":
    main()
