"""A decoder layer in torch, with the same modules under the same names for every family: what methods observe and change.

Its function is that of edgeq/network/config.py's record alone; the names are those of transformers' Llama, and of its
Qwen2-MoE where there are experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeq.converters.calibration.torch_states import Gain, TorchDeltaNet, TorchShortConv
from edgeq.network.rope import Rope, frequencies, rotation
from edgeq.network.stack import Stack

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [positions, pairs]."""
SCORES = 1 << 22
"""Scores of attention that are in memory at a time where they are looked at."""


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias, over the last dimension."""

    def __init__(self, config: Stack, size: int, layer_norm: bool = False) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if layer_norm else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return x if self.bias is None else x + self.bias


class TorchAttention(nn.Module):
    def __init__(self, config: Stack, biases: tuple[str, ...]) -> None:
        super().__init__()
        hidden, q, kv = config.hidden_size, config.query_size, config.kv_size
        self.head_dim, self.scale = config.head_dim, config.attention_scale
        self.q_proj = nn.Linear(hidden, q, bias="q" in biases)
        self.k_proj = nn.Linear(hidden, kv, bias="k" in biases)
        self.v_proj = nn.Linear(hidden, kv, bias="v" in biases)
        self.gate_proj = nn.Linear(hidden, q, bias=False) if config.attention_gate else None
        self.o_proj = nn.Linear(q, hidden, bias="o" in biases)
        of_queries, of_keys = config.qk_norm_sizes
        self.q_norm = Norm(config, of_queries) if config.qk_norm else None
        self.k_norm = Norm(config, of_keys) if config.qk_norm else None
        self.norm_kind = config.qk_norm_kind
        self.sinks = Gain(config.num_attention_heads) if config.attention_sinks else None

    def forward(self, hidden_states: Tensor, position_embeddings: Angles | None, attention_mask: Tensor | None) -> Tensor:
        """hidden_states [rows, tokens, hidden]; position_embeddings None: no rotation; mask True: a visible key, None: all."""
        queries, keys, values = self._heads(hidden_states, position_embeddings)
        if self.sinks is not None:
            keys, values, attention_mask = self._with_sinks(self.sinks.weight, keys, values, attention_mask)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attention_mask, scale=self.scale, enable_gqa=True
        )
        attended = attended.transpose(1, 2).flatten(2)
        if self.gate_proj is not None:
            attended = attended * self.gate_proj(hidden_states).sigmoid()
        result: Tensor = self.o_proj(attended)
        return result

    def received(self, hidden_states: Tensor, position_embeddings: Angles | None, attention_mask: Tensor | None) -> Tensor:
        """How much of what is attended to is each token, [rows, tokens]: the squares of the shares that all queries have of it,
        summed over the queries, the mean over the heads.

        So many times a change of its value counts at the outputs of attention.
        """
        queries, keys, _ = self._heads(hidden_states, position_embeddings)
        rows, heads, tokens, _ = queries.shape
        at_once, found = max(1, SCORES // (heads * tokens)), torch.zeros(rows, tokens, device=queries.device)
        for total, q, k in zip(found, queries, keys, strict=True):
            for span in torch.arange(tokens).split(at_once):
                some = slice(int(span[0]), int(span[-1]) + 1)
                # [kv_heads, heads of one, some of the queries, tokens]
                scores = q[:, some].unflatten(0, (len(k), -1)) @ k[:, None].mT * self.scale
                if attention_mask is not None:
                    scores.masked_fill_(~attention_mask[0, :, some], -torch.inf)
                if self.sinks is not None:
                    sinks = self.sinks.weight.view(len(k), -1, 1, 1).expand(*scores.shape[:-1], 1)
                    total += torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].square_().sum((0, 1, 2)) / heads
                    continue
                total += scores.softmax(-1).square_().sum((0, 1, 2)) / heads
        return found

    def _with_sinks(self, sinks: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and a mask of scores with one more of each, zeros: its score of a head is the head's sink."""
        rows, _, tokens, _ = keys.shape
        seen = keys.new_zeros(rows, 1, tokens, tokens) if mask is None else torch.where(mask, 0.0, -torch.inf)
        scores = sinks.view(1, -1, 1, 1).expand(len(seen), -1, tokens, 1)
        added = torch.cat((seen.expand(-1, len(sinks), -1, -1), scores), -1)
        return functional.pad(keys, (0, 0, 0, 1)), functional.pad(values, (0, 0, 0, 1)), added

    def _heads(self, hidden_states: Tensor, position_embeddings: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [rows, heads, tokens, head_dim]."""
        queries, keys, values = (linear(hidden_states) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if self.norm_kind == "whole":
            queries, keys = self._normed(queries, keys)
        queries, keys, values = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (queries, keys, values))
        if self.norm_kind == "heads":
            queries, keys = self._normed(queries, keys)
        if position_embeddings is not None:
            queries, keys = rotated(queries, *position_embeddings), rotated(keys, *position_embeddings)
        if self.norm_kind == "rotated":
            queries, keys = self._normed(queries, keys)
        return queries, keys, values

    def _normed(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return queries, keys
        return self.q_norm(queries), self.k_norm(keys)


class Mlp(nn.Module):
    """down(act(gate) * up), or down(act(up))."""

    def __init__(self, config: Stack, inner: int, biases: tuple[str, ...]) -> None:
        super().__init__()
        self.activation, self.clamp = ACTIVATIONS[config.hidden_act], config.clamp
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias="gate" in biases) if config.gated else None
        self.up_proj = nn.Linear(config.hidden_size, inner, bias="up" in biases)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias="down" in biases)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.clamp is not None and self.gate_proj is not None:
            alpha, limit = self.clamp
            gate, up = self.gate_proj(x).clamp(max=limit), up.clamp(-limit, limit)
            limited: Tensor = self.down_proj(gate * torch.sigmoid(alpha * gate) * (up + 1))
            return limited
        inner = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(x)) * up
        result: Tensor = self.down_proj(inner)
        return result


class TorchExperts(nn.Module):
    """Every token through the experts that the router ranks highest for it, and through the shared one."""

    def __init__(self, config: Stack, biases: tuple[str, ...]) -> None:
        super().__init__()
        of_experts = tuple(part.removeprefix("experts.") for part in biases if part.startswith("experts."))
        self.chosen, self.normalized = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias="router" in biases)
        self.experts = nn.ModuleList([Mlp(config, config.intermediate_size, of_experts) for _ in range(config.num_experts)])
        shared = config.shared_expert_intermediate_size
        self.shared_expert = Mlp(config, shared, ()) if shared else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if shared else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)  # [tokens, hidden]
        shares, experts = self._routed(x)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens, places = (experts == index).nonzero(as_tuple=True)
            if len(tokens):
                result.index_add_(0, tokens, expert(x[tokens]) * shares[tokens, places, None])
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            result += self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return result.view(hidden_states.shape)

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers of the experts of every token, [tokens, experts per token]."""
        shares, experts = self.gate(x).softmax(-1).topk(self.chosen)
        return shares / shares.sum(-1, keepdim=True) if self.normalized else shares, experts

    def run_owner(self, path: str, x: Tensor) -> None:
        """Run only the expert, or the shared one, that has the module `path` of the decoder layer, over its share of the tokens
        x [tokens, hidden].
        """
        _, owner, index, *_ = path.split(".")
        if owner == "experts":
            _, experts = self._routed(x)
            self.experts[int(index)](x[(experts == int(index)).any(-1)])
        else:
            self.get_submodule(owner)(x)


class DecoderLayer(nn.Module):
    """biases: linear parts that have one, as in edgeq.converters.families;  index: of the layer."""

    def __init__(self, config: Stack, biases: tuple[str, ...], index: int = 0) -> None:
        super().__init__()
        size, layer_norm, self.parallel = config.hidden_size, config.layer_norm, config.parallel_blocks
        self.input_layernorm = Norm(config, size, layer_norm) if config.norms_before(index) else nn.Identity()
        if index in config.conv_layers:
            self.self_attn: nn.Module = TorchShortConv(config)
        elif index in config.delta_layers:
            self.self_attn = TorchDeltaNet(config)
        else:
            self.self_attn = TorchAttention(config, biases)
        norms_after = config.norms_after(index)
        self.attention_output_norm = Norm(config, size, layer_norm) if norms_after else nn.Identity()
        own_norm = config.norms_before(index) and self.parallel != "one_norm"
        self.post_attention_layernorm = Norm(config, size, layer_norm) if own_norm else nn.Identity()
        self.mlp = TorchExperts(config, biases) if config.num_experts else Mlp(config, config.intermediate_size, biases)
        self.mlp_output_norm = Norm(config, size, layer_norm) if norms_after else nn.Identity()

    def forward(self, hidden_states: Tensor, position_embeddings: Angles | None, attention_mask: Tensor | None) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attn(normed, position_embeddings=position_embeddings, attention_mask=attention_mask)
        if self.parallel != "none":
            both: Tensor = attended + self.mlp(
                normed if self.parallel == "one_norm" else self.post_attention_layernorm(hidden_states)
            )
            return hidden_states + both
        x = hidden_states + self.attention_output_norm(attended)
        result: Tensor = x + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)))
        return result


def quantized_linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that are rounded, by module path in execution order: not what chooses among experts."""
    modules = layer.named_modules()
    return {path: module for path, module in modules if isinstance(module, nn.Linear) and path.endswith("_proj")}


class QuickGelu(nn.Module):
    """x s(1.702 x), s the logistic function."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "silu": nn.SiLU(),
    "gelu_pytorch_tanh": nn.GELU("tanh"),
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "quick_gelu": QuickGelu(),
}


def angles(rope: Rope, head_dim: int, length: int) -> Angles:
    """Cosines and sines of positions 0 ... length - 1 in a session of that length."""
    found = torch.outer(torch.arange(length).double(), torch.tensor(frequencies(rope, head_dim, length), dtype=torch.float64))
    return (found.cos() * rope.attention_factor).float(), (found.sin() * rope.attention_factor).float()


def angles_at(rope: Rope, head_dim: int, positions: Tensor) -> Angles:
    """Cosines and sines of tokens at `positions` int64 [axes, tokens]."""
    per_position, axes = rotation(rope, head_dim)
    turns = positions[list(axes)] if axes else positions[:1]
    found = turns.T.double() * torch.tensor(per_position, dtype=torch.float64)
    return (found.cos() * rope.attention_factor).float(), (found.sin() * rope.attention_factor).float()


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [..., tokens, head_dim] with its first channels, two for each angle, rotated."""
    half = cosines.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines, rest), dim=-1)
