"""A policy with what transformers makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgeq.runtime import Model, Requantization
from tests.runtime.policy.policy_checkpoint import OWN, SIDE, reference

STATE = [0.3, -1.2, 0.7, 2.0, -0.1, 0.4]
Actions = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A checkpoint, its float32 file, what two cameras see, and noise."""

    folder: Path
    path: Path

    @cached_property
    def pictures(self) -> list[Image.Image]:
        pixels = np.random.default_rng(3).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
        return [Image.fromarray(each) for each in pixels]

    @cached_property
    def noise(self) -> Actions:
        return np.random.default_rng(4).standard_normal((OWN["chunk_size"], OWN["max_action_dim"])).astype(np.float32)

    @cached_property
    def wanted(self) -> Actions:
        """transformers' own, of a prompt and of pixels as its processor makes them, which needs torchvision."""
        import torch
        from transformers import AutoTokenizer

        pixels = np.stack([np.asarray(picture) for picture in self.pictures]).transpose(0, 3, 1, 2)
        tokenizer = AutoTokenizer.from_pretrained(self.folder, pad_token="<|end|>")
        text = f"{'<image>' * 16 * len(pixels)}{tokenizer.bos_token}pick up\n"
        inputs = tokenizer([text], padding="max_length", max_length=48, padding_side="right", return_tensors="pt")
        state = torch.zeros(1, OWN["max_state_dim"])
        state[0, : len(STATE)] = torch.tensor(STATE)
        found: Actions = (
            reference(self.folder)
            .sample_actions(
                state=state,
                input_ids=inputs["input_ids"],
                pixel_values=torch.from_numpy((pixels / np.float32(255) - 0.5) / 0.5).float()[None],
                attention_mask=inputs["attention_mask"],
                pixel_attention_mask=torch.ones(1, len(pixels), dtype=torch.bool),
                noise=torch.from_numpy(self.noise.copy())[None],
            )[0]
            .numpy()
        )
        return found

    def act(
        self, target: str, *, state: list[float] = STATE, requantization: Requantization | None = None, **settings: Any
    ) -> Actions:
        with Model.load(self.path, target=target, mode="a16", context=192, requantization=requantization) as model:
            return model.act(self.pictures, "pick up", state, noise=self.noise, **settings)
