"""Changes of basis absorbed by the weights of a decoder layer; its function stays the same.

A rotation is a function x -> x Q on the last axis, Q orthogonal, in float64.  In the row convention y = x W^T:

    a layer that reads the residual stream after a norm      W <- (W diag(gain)) Q, the norm's gain becomes 1
    a layer that writes to the residual stream               W <- Q^T W, b <- b Q
    value and output projection, for every KV head           rows of W_v <- Q^T W_v, b_v <- b_v Q; columns of W_o <- W_o Q
    a layer whose input is transformed online by x -> x T    W <- W T

RMSNorm commutes with Q once its gain is 1: it divides by a norm, which Q keeps (Ashkboos et al. 2024, SliceGPT,
arXiv 2401.15024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rotation = Callable[[Tensor], Tensor]
"""x float64 [..., channels] -> x Q."""

# Linear layers that read the residual stream -> the norm before them; "gate", "up" and "down" also of every expert.
READERS = {
    "q": "attention_norm",
    "k": "attention_norm",
    "v": "attention_norm",
    "gate": "mlp_norm",
    "up": "mlp_norm",
    "router": "mlp_norm",
    "shared_gate": "mlp_norm",
}
WRITERS = ("o", "down")


def role(part: str) -> str:
    """What a weight of a decoder layer is: "gate" for gate, experts.7.gate and shared.gate; of a bias o.bias, down.bias ..."""
    weight = part.removesuffix(".bias")
    return weight.rpartition(".")[2] + part[len(weight) :]


def dense(q: Tensor) -> Rotation:
    """The rotation by a matrix float64 [channels, channels]."""
    return lambda x: x @ q


@dataclass(frozen=True)
class LayerRotation:
    """What a decoder layer absorbs.

    residual      of the residual stream, the same for all layers
    values        of the values, one per KV head; query head h reads KV head h // (heads / kv_heads)
    before_o      the online transform of the output projection's input, None: none;  before_down: likewise
    """

    residual: Rotation
    values: Sequence[Rotation]
    before_o: Rotation | None = None
    before_down: Rotation | None = None


def rotate_part(part: str, weight: Tensor, gain: Tensor | None, rotation: LayerRotation, heads: int) -> Tensor:
    """A tensor of a decoder layer, "q", "v.bias", "attention_norm" ..., after `rotation`, float32.

    gain   of the norm before a layer that reads the residual stream, None for other tensors; rows of such a layer but for
           the values may come in any portion
    """
    kind, x = role(part), weight.double()
    if part in READERS.values():
        return torch.ones_like(weight)
    if kind in READERS:
        assert gain is not None
        x = rotation.residual(x * gain.double())
        return (_rotate_outputs(x, rotation.values) if kind == "v" else x).float()
    if kind == "v.bias":
        return _rotate_outputs(x[:, None], rotation.values)[:, 0].float()
    if kind in ("o.bias", "down.bias"):
        return rotation.residual(x).float()
    if kind == "o":
        x = _rotate_inputs(x, rotation.values, heads)
    online = {"o": rotation.before_o, "down": rotation.before_down}.get(kind)
    if online is not None:
        x = online(x)
    if kind in WRITERS:
        x = rotation.residual(x.T).T
    return x.float().contiguous()


def _rotate_outputs(weight: Tensor, rotations: Sequence[Rotation]) -> Tensor:
    """Rows of the value projection [kv_heads * head_dim, any], head by head: Q^T W."""
    heads = weight.unflatten(0, (len(rotations), -1))
    return torch.cat([rotate(w.T).T for rotate, w in zip(rotations, heads, strict=True)])


def _rotate_inputs(weight: Tensor, rotations: Sequence[Rotation], heads: int) -> Tensor:
    """Columns of the output projection [hidden, heads * head_dim], query head by query head: W Q."""
    groups = heads // len(rotations)
    columns = weight.unflatten(1, (heads, -1)).unbind(1)
    return torch.cat([rotations[j // groups](w) for j, w in enumerate(columns)], 1)
