"""A decoder layer in torch, with the same modules under the same names for every family: what methods observe and change.

Its function is that of edgeq/network/config.py's record alone; the names are those of transformers' Llama, and of its
Qwen2-MoE where there are experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeq.converters.calibration.attention_parts import Angles, KeptRows, added_to_scores, rotated, sloped, with_sinks
from edgeq.converters.calibration.torch_states import Gain, TorchDeltaNet, TorchShortConv, TorchStateSpace
from edgeq.network.stack import Stack

SCORES = 1 << 22
"""Scores of attention that are in memory at a time where they are looked at."""


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias, over the last dimension."""

    def __init__(self, config: Stack, size: int, layer_norm: bool = False, eps: float = 0.0) -> None:
        """eps   0: that of the stack"""
        super().__init__()
        self.eps = eps or config.rms_norm_eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if layer_norm else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return x if self.bias is None else x + self.bias


class TorchAttention(nn.Module):
    """Attention of layer `index`.  `kept`, where it runs, takes its keys and values, or has those of the layer it reads;
    `before` has those of tokens that come first."""

    def __init__(self, config: Stack, biases: tuple[str, ...], index: int) -> None:
        super().__init__()
        hidden, shape, shared = config.hidden_size, config.heads_of(index), config.shares_cache(index)
        q, kv, of_values = shape.query_size, shape.kv_size, not (shared or config.keys_are_values(index))
        self.head_dim, self.scale = shape.head_dim, config.attention_scale(index)
        self.q_proj = nn.Linear(hidden, q, bias="q" in biases)
        self.k_proj = None if shared else nn.Linear(hidden, kv, bias="k" in biases)
        self.v_proj = nn.Linear(hidden, kv, bias="v" in biases) if of_values else None
        self.gate_proj = nn.Linear(hidden, q, bias=False) if config.attention_gate else None
        self.o_proj = nn.Linear(q, hidden, bias="o" in biases)
        of_queries, of_keys = shape.norm_sizes(config.qk_norm_kind)
        self.q_norm = Norm(config, of_queries) if config.qk_norm else None
        self.k_norm = Norm(config, of_keys) if config.qk_norm and not shared else None
        self.norm_kind, self.value_eps = config.qk_norm_kind, config.rms_norm_eps if config.value_norm else None
        self.sinks = Gain(config.num_attention_heads) if config.attention_sinks else None
        self.cap, self.limit = config.attn_logit_softcapping, config.clip_qkv
        self.slopes = config.slopes(index)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles | None,
        attention_mask: Tensor | None,
        kept: KeptRows | None = None,
        before: KeptRows | None = None,
    ) -> Tensor:
        """hidden_states [rows, tokens, hidden]; position_embeddings None: no rotation; mask True: a visible key, None: all."""
        queries, keys, values = self._heads(hidden_states, position_embeddings, kept, before)
        if self.slopes:
            tokens = keys.shape[2]
            biases = sloped(self.slopes, torch.arange(tokens, device=keys.device), tokens)
            attention_mask = biases if attention_mask is None else biases + added_to_scores(attention_mask)
        if self.sinks is not None:
            keys, values, attention_mask = with_sinks(self.sinks.weight, keys, values, attention_mask)
        if self.cap is None:
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, attention_mask, scale=self.scale, enable_gqa=True
            )
        else:
            attended = self._capped(queries, keys, values, attention_mask)
        attended = attended.transpose(1, 2).flatten(2)
        if self.gate_proj is not None:
            attended = attended * self.gate_proj(hidden_states).sigmoid()
        result: Tensor = self.o_proj(attended)
        return result

    def _capped(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention whose scores z are cap tanh(z / cap)."""
        scores = self._capped_scores(queries.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT * self.scale)
        if mask is not None:
            scores.masked_fill_(~mask[:, :, None], -torch.inf)
        return (scores.softmax(-1) @ values[:, :, None]).flatten(1, 2)

    def _capped_scores(self, scores: Tensor) -> Tensor:
        return scores if self.cap is None else (scores / self.cap).tanh() * self.cap

    def received(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles | None,
        attention_mask: Tensor | None,
        kept: KeptRows | None = None,
        before: KeptRows | None = None,
    ) -> Tensor:
        """How much of what is attended to is each token, [rows, tokens]: the squares of the shares that all queries have of it,
        summed over the queries, the mean over the heads.

        So many times a change of its value counts at the outputs of attention.
        """
        queries, keys, _ = self._heads(hidden_states, position_embeddings, kept, before)
        rows, heads, tokens, _ = queries.shape
        seen = keys.shape[2]
        at_once, found = max(1, SCORES // (heads * seen)), torch.zeros(rows, seen, device=queries.device)
        for total, q, k in zip(found, queries, keys, strict=True):
            for span in torch.arange(tokens).split(at_once):
                some = slice(int(span[0]), int(span[-1]) + 1)
                # [kv_heads, heads of one, some of the queries, tokens]
                scores = self._capped_scores(q[:, some].unflatten(0, (len(k), -1)) @ k[:, None].mT * self.scale)
                if self.slopes:
                    scores += sloped(self.slopes, span.to(scores.device), tokens).unflatten(0, (len(k), -1))
                if attention_mask is not None:
                    scores.masked_fill_(~attention_mask[0, :, some], -torch.inf)
                if self.sinks is not None:
                    sinks = self.sinks.weight.view(len(k), -1, 1, 1).expand(*scores.shape[:-1], 1)
                    total += torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].square_().sum((0, 1, 2)) / heads
                    continue
                total += scores.softmax(-1).square_().sum((0, 1, 2)) / heads
        return found[:, seen - tokens :]

    def _heads(
        self, hidden_states: Tensor, position_embeddings: Angles | None, kept: KeptRows | None, before: KeptRows | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [rows, heads, tokens, head_dim]."""
        queries = self._prepared(self._limited(self.q_proj(hidden_states)), self.q_norm, position_embeddings)
        if self.k_proj is None:
            assert kept is not None
            return queries, *kept.whole.taken(kept.places, queries.device)
        projected = self._limited(self.k_proj(hidden_states))
        keys = self._prepared(projected, self.k_norm, position_embeddings)
        values = self._by_heads(projected if self.v_proj is None else self._limited(self.v_proj(hidden_states)))
        if self.value_eps is not None:
            values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.value_eps)
        if kept is not None:
            kept.whole.keep(kept.places, keys, values)
        if before is not None:
            earlier = before.whole.taken(before.places, keys.device)
            keys, values = (torch.cat(pair, 2) for pair in zip(earlier, (keys, values), strict=True))
        return queries, keys, values

    def _limited(self, x: Tensor) -> Tensor:
        return x if self.limit is None else x.clamp(-self.limit, self.limit)

    def _by_heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def _prepared(self, x: Tensor, norm: Norm | None, position_embeddings: Angles | None) -> Tensor:
        """Queries or keys [rows, tokens, heads * head_dim] by heads, normed and rotated."""
        x = self._by_heads(norm(x) if norm is not None and self.norm_kind == "whole" else x)
        if norm is not None and self.norm_kind == "heads":
            x = norm(x)
        if position_embeddings is not None:
            x = rotated(x, *position_embeddings)
        return norm(x) if norm is not None and self.norm_kind == "rotated" else x


class TorchAttentionBeside(TorchAttention):
    """Attention beside a state space that reads the same; their results are added."""

    def __init__(self, config: Stack, biases: tuple[str, ...], index: int) -> None:
        super().__init__(config, biases, index)
        space = TorchStateSpace(config)
        for name, module in space.named_children():
            self.add_module(name, module)
        # Its modules are this one's; it is none itself.
        self._space = (space,)

    def forward(self, hidden_states: Tensor, *attention: Any, **settings: Any) -> Tensor:
        found: Tensor = super().forward(hidden_states, *attention, **settings) + self._space[0](hidden_states)
        return found


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
        self.factor = config.routed_scaling_factor
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias="router" in biases)
        self.expert_biases = Gain(config.num_experts) if config.expert_scores == "sigmoid" else None
        self.experts = nn.ModuleList([Mlp(config, config.intermediate_size, of_experts) for _ in range(config.num_experts)])
        shared = config.shared_expert_intermediate_size
        gated = config.shared_expert_gate and not config.experts_beside_mlp
        self.shared_expert = Mlp(config, shared, ()) if shared else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if shared and gated else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)  # [tokens, hidden]
        result = self._summed(x, *self._routed(x))
        if self.shared_expert is not None:
            gate = self.shared_expert_gate
            result += self.shared_expert(x) if gate is None else gate(x).sigmoid() * self.shared_expert(x)
        return result.view(hidden_states.shape)

    def _summed(self, x: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        """What the experts of every token give, times their shares."""
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens, places = (experts == index).nonzero(as_tuple=True)
            if len(tokens):
                result.index_add_(0, tokens, expert(x[tokens]) * shares[tokens, places, None])
        return result

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers of the experts of every token, [tokens, experts per token]."""
        scores, bias = self.gate(x), self.expert_biases
        scores = scores.softmax(-1) if bias is None else scores.sigmoid()
        experts = (scores if bias is None else scores + bias.weight).topk(self.chosen).indices
        shares = scores.gather(-1, experts)
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) if self.normalized else shares
        return shares * self.factor, experts

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


class TorchExpertsBesideMlp(TorchExperts):
    """shared_norm(shared_expert(input_norm(x))) + experts_norm(experts of experts_input_norm(x), routed by router_norm(x))."""

    def __init__(self, config: Stack, biases: tuple[str, ...], input_norm: nn.Module) -> None:
        """`input_norm`: that of the layer, which stays its own."""
        super().__init__(config, biases)
        size = config.hidden_size
        self.shared_norm, self.router_norm = Norm(config, size), Norm(config, size)
        self.experts_input_norm, self.experts_norm = Norm(config, size), Norm(config, size)
        self.expert_scales = Gain(config.num_experts)
        # Not a module of this one too.
        self._input_norm = (input_norm,)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The stream itself: norms are within."""
        x = hidden_states.flatten(0, -2)
        summed = self._summed(self.experts_input_norm(x), *self._routed(x))
        found: Tensor = self.shared_norm(self._shared(x)) + self.experts_norm(summed)
        return found.view(hidden_states.shape)

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_expert is not None
        found: Tensor = self.shared_expert(self._input_norm[0](x))
        return found

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, experts = super()._routed(self.router_norm(x))
        return shares * self.expert_scales.weight[experts], experts

    def run_owner(self, path: str, x: Tensor) -> None:
        _, owner, index, *_ = path.split(".")
        if owner == "experts":
            _, experts = self._routed(x)
            self.experts[int(index)](self.experts_input_norm(x[(experts == int(index)).any(-1)]))
        else:
            self._shared(x)


class TorchRows(nn.Module):
    """norm(out_proj(act(gate_proj(x)) * the rows that the layer has for the tokens))."""

    def __init__(self, config: Stack) -> None:
        super().__init__()
        size = config.hidden_size_per_layer_input
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.out_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.norm = Norm(config, config.hidden_size)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        result: Tensor = self.norm(self.out_proj(self.activation(self.gate_proj(x)) * rows))
        return result


class DecoderLayer(nn.Module):
    """biases: linear parts that have one, as in edgeq.converters.families;  index: of the layer.

    self_attn   attention, or what is in its place; None: the layer is an MLP alone
    mlp         None: it has none
    """

    def __init__(self, config: Stack, biases: tuple[str, ...], index: int = 0) -> None:
        super().__init__()
        size, layer_norm, self.parallel = config.hidden_size, config.layer_norm, config.parallel_blocks
        mixes, has_mlp = config.blocks(index)
        self.input_layernorm = Norm(config, size, layer_norm) if mixes and config.norms_before(index) else nn.Identity()
        if not mixes:
            self.self_attn: nn.Module | None = None
        elif index in config.conv_layers:
            self.self_attn = TorchShortConv(config)
        elif index in config.delta_layers:
            self.self_attn = TorchDeltaNet(config)
        elif index in config.ssd_layers:
            beside = config.attends(index)
            self.self_attn = TorchAttentionBeside(config, biases, index) if beside else TorchStateSpace(config)
        else:
            self.self_attn = TorchAttention(config, biases, index)
        norms_after = config.norms_after(index)
        self.attention_output_norm = Norm(config, size, layer_norm) if norms_after else nn.Identity()
        own_norm = has_mlp and config.norms_before(index) and self.parallel != "one_norm"
        self.post_attention_layernorm = Norm(config, size, layer_norm) if own_norm else nn.Identity()
        if not has_mlp:
            self.mlp: nn.Module | None = None
        elif config.experts_beside_mlp:
            self.mlp = TorchExpertsBesideMlp(config, biases, self.post_attention_layernorm)
        else:
            self.mlp = TorchExperts(config, biases) if config.num_experts else Mlp(config, config.mlp_size(index), biases)
        self.mlp_output_norm = Norm(config, size, layer_norm) if norms_after else nn.Identity()
        self.rows = TorchRows(config) if config.hidden_size_per_layer_input else None
        self.layer_scalar = Gain(1) if config.layer_scalars else None
        # Whether attention and the MLP add to the norm that they read.
        self.norms_stream = config.norms_stream(index), config.norms_stream(index, mlp=True)

    def forward(self, hidden_states: Tensor, rows: Tensor | None = None, **attention: Any) -> Tensor:
        """`rows`: what the layer has for the tokens [rows, tokens, size];  `attention`: the arguments of TorchAttention."""
        if self.parallel != "none":
            assert self.self_attn is not None and self.mlp is not None
            normed = self.input_layernorm(hidden_states)
            other = normed if self.parallel == "one_norm" else self.post_attention_layernorm(hidden_states)
            both: Tensor = self.self_attn(normed, **attention) + self.mlp(other)
            return hidden_states + both
        return self.after_attention(self.to_mlp(hidden_states, **attention), rows)

    def to_mlp(self, x: Tensor, **attention: Any) -> Tensor:
        """The stream that attention was added to, of a layer whose MLP comes after it."""
        if self.self_attn is None:
            return x
        normed = self.input_layernorm(x)
        attended = self.attention_output_norm(self.self_attn(normed, **attention))
        found: Tensor = (normed if self.norms_stream[0] else x) + attended
        return found

    def mlp_input(self, x: Tensor) -> Tensor:
        """What the MLP reads of the stream after attention."""
        found: Tensor = x if isinstance(self.mlp, TorchExpertsBesideMlp) else self.post_attention_layernorm(x)
        return found

    def after_attention(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """The rest of a layer whose MLP comes after its attention, from the stream that attention was added to."""
        if self.mlp is None:
            return x
        read = self.mlp_input(x)
        result: Tensor = (read if self.norms_stream[1] else x) + self.mlp_output_norm(self.mlp(read))
        if self.rows is not None:
            assert rows is not None
            result = result + self.rows(result, rows)
        return result if self.layer_scalar is None else result * self.layer_scalar.weight


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.SiLU(),
    "gelu_pytorch_tanh": nn.GELU("tanh"),
    "relu": nn.ReLU(),
    "relu2": lambda x: x.relu().square(),
    "gelu": nn.GELU(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
