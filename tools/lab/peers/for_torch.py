"""PyTorch in bf16 on a GPU, by transformers: eager, and compiled with a static cache and CUDA graphs.

The integers and steps of the model (weights.py) are exact in bf16: the same network as the files of 4 bits with a head of 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from edgeq.format.manifest import fused_shapes
from edgeq.network.config import ModelConfig
from edgeq.tools.lab.peers.peer import Stored, Times, Variant
from edgeq.tools.lab.peers.weights import head_slabs, head_step, matrix, step

VARIANTS = (
    Variant("torch-bf16-eager", "torch", "torch-bf16", 0, 8, "eager", "cuda"),
    Variant("torch-bf16-compiled", "torch", "torch-bf16", 0, 8, "compiled", "cuda"),
)
DEVICE = "cuda"
COMPILE: dict[str, Any] = {"mode": "reduce-overhead", "fullgraph": True}
MODULES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
MODULES |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
HEAD, HEAD_BITS = "model.embed_tokens.weight", 8


def version() -> str:
    """ImportError: torch, transformers or safetensors is missing.  ValueError: torch has no GPU to run on."""
    torch, transformers = import_module("torch"), import_module("transformers")
    import_module("safetensors.torch")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} has no GPU here: {torch.version.cuda or 'it was built without CUDA'}")
    return f"{torch.__version__}, transformers {transformers.__version__}"


def build(config: ModelConfig, variant: Variant, folder: Path) -> Stored:
    """A file of tensors for each layer: a large model does not have to fit into memory twice."""
    torch, save = import_module("torch"), import_module("safetensors.torch").save_file
    weights = 0
    for layer in range(config.num_hidden_layers):
        tensors = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in _matrices(config, layer)}
        weights += sum(tensor.nbytes for tensor in tensors.values())
        save(tensors, folder / f"layer-{layer}.safetensors")
    center, value = 1 << (HEAD_BITS - 1), np.float32(head_step(HEAD_BITS))
    slabs = ((slab.astype(np.float32) - center) * value for slab in head_slabs(config, HEAD_BITS))
    head = torch.cat([torch.from_numpy(slab).to(torch.bfloat16) for slab in slabs])
    save({HEAD: head}, folder / "head.safetensors")
    return Stored(weights, head.nbytes)


def _matrices(config: ModelConfig, layer: int) -> Iterator[tuple[str, Any]]:
    """Names in transformers' Llama and values, float32."""
    for _, parts in fused_shapes(config, layer):
        for name, (rows, columns) in parts.items():
            values = (matrix(name, rows, columns).astype(np.float32) - 8) * np.float32(step(columns))
            yield f"model.layers.{layer}.{MODULES[name.rpartition('.')[2]]}.weight", values


def load(config: ModelConfig, variant: Variant, folder: Path, threads: int, context: int) -> Torch:
    return Torch(config, folder, variant.mode == "compiled", context)


class Torch:
    """A loaded model; see `Runner`.  Norms have gains of one, as they are made."""

    def __init__(self, config: ModelConfig, folder: Path, compiled: bool, context: int) -> None:
        self._torch = torch = import_module("torch")
        transformers, read = import_module("transformers"), import_module("safetensors.torch").load_file
        about = transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta, max_position_embeddings=config.max_position_embeddings, tie_word_embeddings=True,
            attn_implementation="sdpa",
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(DEVICE):
                self._model = transformers.LlamaForCausalLM(about).eval()
        finally:
            torch.set_default_dtype(before)
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for path in sorted(folder.glob("*.safetensors")):
                for name, tensor in read(path).items():
                    own[name].copy_(tensor)
        kept = {"max_batch_size": 1, "max_cache_len": context, "device": DEVICE, "dtype": torch.bfloat16}
        self._cache = transformers.StaticCache(config=about, **kept)
        self._decode = torch.compile(self._model.forward, **COMPILE) if compiled else self._model.forward
        how = "compiled, CUDA graphs" if compiled else "eager"
        self.settings = f"decode {how}, prompt eager, static cache, scaled_dot_product_attention"

    def _draw(self, forward: Any, tokens: Sequence[int], first: int) -> int:
        torch = self._torch
        positions = torch.arange(first, first + len(tokens), device=DEVICE)
        found = forward(
            input_ids=torch.tensor([list(tokens)], device=DEVICE), position_ids=positions[None], cache_position=positions,
            past_key_values=self._cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        # Reading the number waits for the GPU.
        return int(found.logits[0, -1].argmax())

    def run(self, prompt: Sequence[int], steps: int) -> Times:
        with self._torch.no_grad():
            self._cache.reset()
            began = perf_counter()
            tokens = [self._draw(self._model.forward, prompt, 0)]
            first = perf_counter()
            for i in range(steps):
                tokens.append(self._draw(self._decode, tokens[-1:], len(prompt) + i))
            return Times(first - began, perf_counter() - first, tokens)
