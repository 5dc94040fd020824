"""A tiny policy, π0 with random weights, and the actions that transformers makes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.checkpoints.vision import IMAGE, TRAINED, reference_attention

SIDE, PATCH = 24, 6
TEXT: dict[str, Any] = {
    "model_type": "gemma", "vocab_size": 2052, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20, "rms_norm_eps": 3e-5, "rope_theta": 5000.0,
    "max_position_embeddings": 1024, "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
EXPERT = TEXT | {"hidden_size": 48, "intermediate_size": 80, "rope_theta": 3000.0, "num_attention_heads": 6}
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 3,
    "intermediate_size": 100, "patch_size": PATCH, "image_size": SIDE, "vision_use_head": False, "initializer_range": 0.1,
}  # fmt: skip
OWN = {"chunk_size": 7, "max_state_dim": 9, "max_action_dim": 5, "num_inference_steps": 4, "min_period": 0.01}


def build(folder: Path) -> Path:
    """Save it in float32; norms and biases are random too: a lost one shows."""
    import torch
    import transformers

    torch.set_num_threads(1)
    vlm = {"model_type": "paligemma", "text_config": TEXT, "vision_config": VISION, "projection_dim": 72}
    config = transformers.PI0Config(vlm_config={**vlm, "image_token_index": IMAGE}, dit_config=EXPERT, **OWN)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = transformers.PI0ForConditionalGeneration(config)
        for key, parameter in model.named_parameters():
            if "norm" in key:
                above = "vision" not in key
                parameter.data = float(key.endswith("weight") and not above) + 0.3 * torch.randn_like(parameter)
            elif key.endswith("bias"):
                parameter.data = 0.3 * torch.randn_like(parameter)
            elif any(part in key for part in ("vision", "multi_modal", "action", "state")):
                wide = parameter[0].numel() if parameter.ndim > 1 and "pos" not in key else 1
                parameter.data = torch.randn_like(parameter) * (1.5 / wide) ** 0.5
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        named = (TRAINED / file).read_text().replace("<|image_pad|>", "<image>")
        (folder / file).write_text(named)
    size = {"max_height": SIDE, "max_width": SIDE}
    processor = {"image_processor_type": "PI0ImageProcessor", "size": size, "pad_size": {"height": SIDE, "width": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"image_seq_length": (SIDE // PATCH) ** 2}))
    return folder


def reference(folder: Path) -> Any:
    """transformers' model in float32, whose attention rounds keys and values to f16, as edgeq's cache does."""
    import torch
    import transformers

    reference_attention()
    torch.set_num_threads(1)
    found = transformers.PI0ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="rounded")
    return found.eval()
