"""Layers with a state in torch, in the place of attention, over whole texts (torch_decoder.py)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeq.network.delta_net import UNIT_EPS
from edgeq.network.stack import Stack

CHUNK = 64
"""Tokens whose changes of a state are computed together."""


class Taps(nn.Module):
    """A convolution over the last tokens, channel by channel; weights [channels, taps]."""

    def __init__(self, channels: int, taps: int, biased: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, tokens, channels]."""
        before = functional.pad(x.transpose(1, 2), (self.weight.shape[1] - 1, 0))
        return functional.conv1d(before, self.weight[:, None], self.bias, groups=len(self.weight)).transpose(1, 2)


class TorchShortConv(nn.Module):
    """out_proj(c * conv(b * u)), with b, c, u = in_proj(x), in the place of attention."""

    def __init__(self, config: Stack) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.conv = Taps(hidden, config.conv_taps)
        self.out_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden_states: Tensor, position_embeddings: object, attention_mask: Tensor | None) -> Tensor:
        """hidden_states [rows, tokens, hidden]; the others are not used."""
        b, c, u = self.in_proj(hidden_states).chunk(3, dim=-1)
        result: Tensor = self.out_proj(c * self.conv(b * u))
        return result


class Gain(nn.Module):
    """Numbers, one for each channel or head, that no linear layer has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))


class TimeStep(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(heads))


class TorchDeltaNet(nn.Module):
    """o_proj(norm(delta(silu(conv(qkv_proj(x))), b(x), a(x))) * silu(gate_proj(x))), in the place of attention."""

    def __init__(self, config: Stack) -> None:
        super().__init__()
        net, hidden = config.delta_net, config.hidden_size
        assert net is not None
        self.net, self.eps = net, net.norm_eps or config.rms_norm_eps
        self.qkv_proj = nn.Linear(hidden, net.channels, bias=False)
        self.gate_proj = nn.Linear(hidden, net.value_size, bias=False)
        self.b = nn.Linear(hidden, net.value_heads, bias=False)
        self.a = nn.Linear(hidden, net.value_heads, bias=False)
        self.conv = Taps(net.channels, net.taps)
        self.decay, self.dt, self.norm = Gain(net.value_heads), TimeStep(net.value_heads), Gain(net.value_dim)
        self.o_proj = nn.Linear(net.value_size, hidden, bias=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: object = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """hidden_states [rows, tokens, hidden]; the others are not used."""
        net = self.net
        sizes = [net.key_size, net.key_size, net.value_size]
        q, k, v = functional.silu(self.conv(self.qkv_proj(hidden_states))).split(sizes, dim=-1)
        shared = net.value_heads // net.key_heads
        q, k = (_units(x.unflatten(-1, (net.key_heads, -1))).repeat_interleave(shared, 2) for x in (q, k))
        beta = net.beta_scale * self.b(hidden_states).sigmoid()
        g = -self.decay.weight.exp() * functional.softplus(self.a(hidden_states) + self.dt.bias)
        recalled = gated_delta(q * net.key_dim**-0.5, k, v.unflatten(-1, (net.value_heads, -1)), g, beta)
        normed = recalled * torch.rsqrt(recalled.square().mean(-1, keepdim=True) + self.eps) * self.norm.weight
        result: Tensor = self.o_proj(normed.flatten(2) * functional.silu(self.gate_proj(hidden_states)))
        return result


class TorchStateSpace(nn.Module):
    """out_proj(norm(scan(silu(conv(xbc)), dt_rates(x)) * silu(gate))), with xbc, gate = in_proj(x), in attention's place."""

    def __init__(self, config: Stack) -> None:
        super().__init__()
        net, hidden = config.ssd, config.hidden_size
        assert net is not None
        self.net = net
        self.in_proj = nn.Linear(hidden, net.channels + net.inner_size, bias=False)
        self.dt_rates = nn.Linear(hidden, net.heads, bias=False)
        self.conv = Taps(net.channels, net.taps, biased=True)
        self.decay, self.dt, self.skip = Gain(net.heads), TimeStep(net.heads), Gain(net.heads)
        self.norm = None if net.norm == "none" else Gain(net.inner_size)
        self.out_proj = nn.Linear(net.inner_size, hidden, bias=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: object = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """hidden_states [rows, tokens, hidden]; the others are not used."""
        net, width = self.net, self.net.groups * self.net.state_dim
        xbc, gate = self.in_proj(hidden_states).split([net.channels, net.inner_size], dim=-1)
        u, b, c = functional.silu(self.conv(xbc)).split([net.inner_size, width, width], dim=-1)
        b, c = (x.unflatten(-1, (net.groups, -1)).repeat_interleave(net.heads // net.groups, 2) for x in (b, c))
        u, step = u.unflatten(-1, (net.heads, -1)), functional.softplus(self.dt_rates(hidden_states) + self.dt.bias)
        step = step.clamp(*net.time_step_limits)
        scanned = state_space(step[..., None] * u, b, c, -self.decay.weight.exp() * step) + self.skip.weight[:, None] * u
        y, gate = scanned.flatten(2), functional.silu(gate)
        y = y if net.norm == "before_gate" else y * gate
        if self.norm is not None:
            by_groups = y.unflatten(-1, (net.groups, -1))
            y = (by_groups * torch.rsqrt(by_groups.square().mean(-1, keepdim=True) + net.norm_eps)).flatten(
                2
            ) * self.norm.weight
        result: Tensor = self.out_proj(y * gate if net.norm == "before_gate" else y)
        return result


def state_space(u: Tensor, b: Tensor, c: Tensor, g: Tensor) -> Tensor:
    """What the states of the heads give, from states of zeros on (targets/family_operations.py, SsdScan): without `skip`.

    u [rows, tokens, heads, head_dim], the step in it; b, c [..., state_dim]; g [rows, tokens, heads].
    """
    u, b, c, g = (x.transpose(1, 2) for x in (u, b, c, g))  # [rows, heads, tokens, ...]
    state, found = u.new_zeros(*u.shape[:2], b.shape[-1], u.shape[-1]), []
    for at in range(0, u.shape[2], CHUNK):
        of_u, of_b, of_c, of_g = (x[:, :, at : at + CHUNK] for x in (u, b, c, g))
        since, decay = _decays(of_g)
        whole = since.exp()[..., None]
        found.append(whole * (of_c @ state) + (of_c @ of_b.mT * decay) @ of_u)
        state = whole[:, :, -1:] * state + (of_b * (since[..., -1:] - since).exp()[..., None]).mT @ of_u
    return torch.cat(found, dim=2).transpose(1, 2)


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of g [..., tokens] up to each token, and the decays [..., tokens, tokens] from each to each after it."""
    since, count = g.cumsum(-1), g.shape[-1]
    lower = torch.ones(count, count, dtype=torch.bool, device=g.device).tril()
    # Exponents are never positive: a difference of sums over a head that forgets would overflow above the diagonal.
    return since, torch.where(lower, since[..., :, None] - since[..., None, :], -torch.inf).exp()


def _units(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """What the states of the heads give, from states of zeros on (targets/family_operations.py, DeltaRule).

    q, k [rows, tokens, heads, key_dim], v [..., value_dim], g, beta [rows, tokens, heads].  Of CHUNK tokens d is the solution
    of a triangular system (Yang et al. 2024, arXiv 2412.06464, section 3.3).
    """
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))  # [rows, heads, tokens, ...]
    state, found = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for at in range(0, q.shape[2], CHUNK):
        of_q, of_k, of_v, rate, of_g = (x[:, :, at : at + CHUNK] for x in (q, k, v, beta[..., None], g))
        count = of_q.shape[2]
        since, decay = _decays(of_g)
        whole = since.exp()[..., None]
        system = torch.eye(count, device=q.device, dtype=q.dtype) + rate * (of_k @ of_k.mT * decay).tril(-1)
        changes = torch.linalg.solve_triangular(system, rate * (of_v - whole * (of_k @ state)), upper=False)
        found.append(whole * (of_q @ state) + (of_q @ of_k.mT * decay) @ changes)
        state = whole[:, :, -1:] * state + (of_k * (since[..., -1:] - since).exp()[..., None]).mT @ changes
    return torch.cat(found, dim=2).transpose(1, 2)
