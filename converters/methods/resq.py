"""ResQ: mixed-precision quantization with low-rank residuals (Saxena et al. 2024, arXiv 2412.14363).

The residual stream, every KV head's values and every layer's keys are taken into their principal axes: those of the
uncentered second moments of calibration text, ascending, so that the last 1/8 of the coordinates carry most of the energy.
They are stored and multiplied in 8 bits, the others in 4; a random rotation inside either part spreads what outliers are left.

    U_A   residual stream, one for the model: absorbed                     moments of the normalized inputs of attention and MLP
    U_B   values, one per layer and KV head: absorbed                      moments of the values
    U_C   queries and keys after RoPE, one per layer: online, in int8      moments of the keys after RoPE
    U_D   input of the down projection: an online Hadamard transform, no split

U = P blockdiag(R_low, R_high), with two R for the whole model: of the hidden size and of head_dim.  The high columns of the
output projection, the last of every head, are gathered after the low ones.  Activations are asymmetric, one scale per token
and part (the paper's code has one per head and part before the output projection).  A weight block is a multiple of 32
columns wide, as the kernels read it: the high part is rounded up to one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from edgeq.converters.calibration.attention_parts import Angles, rotated
from edgeq.converters.calibration.forward import BlockForward, TokenForward
from edgeq.converters.families import LINEARS, NORMS, Family
from edgeq.converters.method import Study
from edgeq.converters.methods.rotated import Rotated, stored_transform
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.rotation.fuse import Rotation, dense
from edgeq.converters.rotation.hadamard import hadamard
from edgeq.converters.rotation.orthogonal import generator, principal_axes, split_rotation
from edgeq.converters.rounding.linears import Recipe
from edgeq.errors import InputError, UnsupportedError
from edgeq.format.codec import CHUNK, Codec
from edgeq.format.records import Activation, KvCodec
from edgeq.network.config import ModelConfig

HIGH_BITS = 8
HIDDEN_SEED, HEAD_SEED = 1, 2


class ResQ(Rotated):
    """W, A and KV in 4 bits by default, 1/8 of the channels in 8, weights rounded or by GPTQ."""

    name = "resq"
    studies = True

    def __init__(self, options: ConvertOptions, family: Family, config: ModelConfig) -> None:
        super().__init__(options, family, config)
        fraction = self.options.high_fraction
        assert fraction is not None
        self._high_dims = int(config.head_dim * fraction)
        if fraction and not self._high_dims:
            raise UnsupportedError(
                f"resq keeps {fraction:g} of every head in {HIGH_BITS} bits: of head_dim {config.head_dim} that is none; "
                f"choose --high-fraction 0 or at least {1 / config.head_dim:g}"
            )
        self._high_hidden = high_columns(config.hidden_size, config.hidden_size * fraction)
        self._high_o = high_columns(config.query_size, config.num_attention_heads * self._high_dims)

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        bits, part = self.options.activation_bits, name.rpartition(".")[2]
        high = 0 if part == "down" else self._high_o if part == "o" else self._high_hidden
        order = output_order(self.config.num_attention_heads, self.config.head_dim, high) if part == "o" and high else None
        activation = Activation(bits, HIGH_BITS if high else 0, symmetric=False) if bits in (4, 8) else None
        return Recipe(
            self.codec(columns - high),
            self.preset,
            high=Codec("int", HIGH_BITS, 0, symmetric=True) if high else None,
            high_columns=high,
            order=order,
            transform=stored_transform(hadamard(columns)) if part == "down" else None,
            activation=activation,
        )

    @property
    def kv(self) -> KvCodec:
        found = super().kv
        return replace(found, high=self._high_dims) if found.kind == "int4" else found

    @property
    def details(self) -> dict[str, object]:
        high = {"hidden": self._high_hidden, "o": self._high_o, "head_dim": self._high_dims}
        seeds = {"hidden": HIDDEN_SEED, "head_dim": HEAD_SEED}
        return {"high_channels": high, "seeds": seeds, "activation_scales": "token and part"}

    def memory_bytes(self, tokens: int) -> int:
        """Beyond what rotating needs: the moments of the residual stream, their axes and what finds them."""
        return super().memory_bytes(tokens) + 64 * self.config.hidden_size**2

    def residual(self, study: Study) -> Rotation:
        return dense(torch.from_numpy(study["residual"]))

    def values(self, layer: int, study: Study) -> list[Rotation]:
        return [dense(torch.from_numpy(u)) for u in study["values"][layer]]

    def keys(self, layer: int, study: Study) -> Tensor:
        return torch.from_numpy(study["keys"][layer])

    def study(self, forward: TokenForward, on_layer: Callable[[int], None]) -> Study:
        """U_A [hidden, hidden], U_B [layers, kv_heads, head_dim, head_dim] and U_C [layers, head_dim, head_dim], float64."""
        c = self.config
        assert isinstance(forward, BlockForward)
        tokens = forward.hidden.shape[0] * forward.hidden.shape[1]
        if tokens < c.hidden_size:
            raise InputError(
                f"calibration text: {tokens} tokens; resq needs at least {c.hidden_size}, one for each channel whose principal "
                "axes it looks for; give a longer text with --calibration"
            )
        moments = ModelMoments(c)
        for index in range(c.num_hidden_layers):
            on_layer(index)
            layer = forward.load(index)
            hooks = moments.hooks(index, layer, forward.attention_arguments(index)["position_embeddings"])
            forward.advance(index, layer)
            for hook in hooks:
                hook.remove()
            forward.unload(layer)
        of_hidden = split_rotation(c.hidden_size, self._high_hidden, generator(HIDDEN_SEED))
        of_head = split_rotation(c.head_dim, self._high_dims, generator(HEAD_SEED))
        return {
            "residual": (principal_axes(moments.residual) @ of_hidden).numpy(),
            "values": _rotated_axes(moments.values, of_head),
            "keys": _rotated_axes(moments.keys, of_head),
        }


class ModelMoments:
    """Uncentered second moments sum x^T x, float64, of the residual stream, values and keys of the unquantized model.

    residual   [hidden, hidden]: inputs of attention and of MLP in all layers, divided by their norm, without the norms' gains
    values     [layers, kv_heads, head_dim, head_dim]
    keys       [layers, head_dim, head_dim]: after RoPE, all KV heads together
    """

    def __init__(self, config: ModelConfig) -> None:
        layers, kv_heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self._eps, self._qk_norm = config.rms_norm_eps, config.qk_norm
        self.residual = torch.zeros(config.hidden_size, config.hidden_size, dtype=torch.float64)
        self.values = torch.zeros(layers, kv_heads, size, size, dtype=torch.float64)
        self.keys = torch.zeros(layers, size, size, dtype=torch.float64)

    def hooks(self, index: int, layer: nn.Module, angles: Angles | None) -> list[RemovableHandle]:
        """Observe decoder layer `index`, whose queries and keys are rotated by `angles`, until the hooks are removed."""
        norms = [layer.get_submodule(NORMS[part]) for part in ("attention_norm", "mlp_norm")]
        keys = layer.get_submodule(NORMS["k_norm"] if self._qk_norm else LINEARS["k"])

        def add_keys(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            by_head = output if self._qk_norm else self._by_head(output)
            after_rope = by_head if angles is None else rotated(by_head, *angles)
            self.keys[index] += torch.einsum("rhti,rhtj->ij", after_rope, after_rope).cpu().double()

        def add_values(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            by_head = self._by_head(output)
            self.values[index] += torch.einsum("rhti,rhtj->hij", by_head, by_head).cpu().double()

        return [
            *(norm.register_forward_pre_hook(lambda module, args: self._add_residual(args[0])) for norm in norms),
            keys.register_forward_hook(add_keys),
            layer.get_submodule(LINEARS["v"]).register_forward_hook(add_values),
        ]

    def _by_head(self, x: Tensor) -> Tensor:
        """[rows, tokens, kv_heads * head_dim] -> [rows, kv_heads, tokens, head_dim]"""
        by_head: Tensor = x.unflatten(-1, (-1, self.keys.shape[-1])).transpose(1, 2)
        return by_head

    def _add_residual(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)
        # Not every GPU has float64.
        wide = x.cpu().double()
        self.residual += wide.T @ wide


def high_columns(columns: int, wanted: float) -> int:
    """`wanted` columns rounded up so that the low block, and as a rule the high one too, is a multiple of 32 wide; 0: none.

    UnsupportedError: nothing would be left for the low block.
    """
    if not wanted:
        return 0
    high = int(-(-wanted // CHUNK)) * CHUNK
    high += (columns - high) % CHUNK
    if high >= columns:
        raise UnsupportedError(
            f"resq splits {columns} channels into blocks of at least {CHUNK}: {wanted:g} in {HIGH_BITS} bits leave none in "
            "fewer; choose a smaller --high-fraction or another method"
        )
    return high


def output_order(heads: int, head_dim: int, high: int) -> NDArray[np.int32]:
    """Columns of the output projection, i32 [heads * head_dim]: the low ones, then `high` of them, each in their own order.

    High are the last of every head; what is more than a multiple of `heads` comes from the first heads.
    """
    dims, head = np.arange(heads * head_dim) % head_dim, np.arange(heads * head_dim) // head_dim
    last_first = np.lexsort((head, -dims))
    return np.concatenate([np.sort(last_first[high:]), np.sort(last_first[:high])]).astype(np.int32)


def _rotated_axes(moments: Tensor, rotation: Tensor) -> NDArray[np.float64]:
    """P R of every moment matrix [..., n, n]."""
    flat = moments.flatten(0, -3)
    found: NDArray[np.float64] = torch.stack([principal_axes(m) @ rotation for m in flat]).view(moments.shape).numpy()
    return found
