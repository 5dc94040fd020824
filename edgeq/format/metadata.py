"""The metadata of a model file: everything in it but its data."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeq.format.records import ArrayRef, KvCodec, LinearSpec, Mode
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.draft_stack import DraftStack
from edgeq.network.policy_stack import PolicyStack

ALIGNMENT = 64
"""Every segment starts at a multiple of it, and has at least one byte."""
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Segment:
    """A run of bytes in the data area; offset from the start of the file, padding excluded from length."""

    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True)
class Metadata:
    """Everything in a model file but its data.

    linears   layers by name, in execution order;  arrays: everything else that is stored, by name;  blobs: name -> segment
    kv        the cache that the file was made for
    vision_mode  the mode in which the vision tower runs; None: the default mode, or there is none
    kernels   architecture (`sm_87`) -> segment of its compiled kernels, which are opened only by a target that runs them

    Names: `layers.3.qkv`, `layers.3.o`, `layers.3.gate_up`, `layers.3.down`, `head`; where the parts of q, k, v (or gate, up)
    differ they are stored apart as `layers.3.q` ...; an MLP without a gate has `layers.3.up`; with experts there are
    `layers.3.router`, `layers.3.experts.7.gate_up`, `layers.3.experts.7.down`, and for a shared one `layers.3.shared_gate`,
    `layers.3.shared.gate_up`, `layers.3.shared.down`; in place of attention a convolution has `layers.3.conv_in` and
    `layers.3.conv_out`, and the array `layers.3.conv`; an embedding that is not the head and has a codec is `embedding`.
    A model that embeds texts has no `head`.  Where layers have rows of their own for each token, there are the table
    `layer_rows`, `row_context`, `layers.3.row_gate` and `layers.3.row_out`, and the arrays `row_context_norm` and
    `layers.3.row_norm`.  With factors of the stream there is the array `layers.3.layer_scalar`.
    Arrays: `embedding` (absent when it is that, or tied to the head), `positions` where they are learned,
    `layers.3.attention_norm`, `layers.3.mlp_norm`, `layers.3.q_norm`, `layers.3.k_norm`, `norm`, of a LayerNorm also
    `layers.3.mlp_norm_bias` ..., where attention and MLP end in a norm `layers.3.post_attention_norm` and
    `layers.3.post_mlp_norm`; where queries and keys are rotated after RoPE `layers.3.key_rotation` i8 [head_dim, head_dim] and
    `layers.3.key_rotation_scale` f32 [1].  A vision tower has the linear layers `vision.patch`, `vision.layers.3.qkv` ... as in
    a decoder, `vision.project.0`, `vision.project.1`, for taps `vision.taps.0.project.0` ..., and the arrays
    `vision.layers.3.attention_norm` ..., `vision.norm`, `vision.positions`, `vision.pre_norm`, `vision.taps.0.norm`.
    A layer that drafts has `draft.embedding`, `draft.hidden` and, as a layer of the decoder, `draft.layers.0.qkv` ..., and the
    arrays `draft.embedding_norm`, `draft.hidden_norm`, `draft.layers.0.attention_norm` ... and `draft.norm`.
    Blobs: `tokenizer.json`, `chat_template`, `preprocessor.json`.
    """

    config: ModelConfig
    generation: dict[str, object]
    provenance: dict[str, object]
    default_mode: Mode
    linears: dict[str, LinearSpec]
    arrays: dict[str, ArrayRef]
    blobs: dict[str, int] = field(default_factory=dict)
    kv: KvCodec = KvCodec()
    kernels: dict[str, int] = field(default_factory=dict)
    vision_mode: Mode | None = None

    def vision_bytes(self) -> int:
        """Bytes of the vision tower and its projector."""
        return self._bytes_of(VisionConfig.prefix)

    def draft_bytes(self) -> int:
        """Bytes of the layer that drafts, without the head and the embedding, which it shares."""
        return self._bytes_of(DraftStack.prefix)

    def policy_bytes(self) -> int:
        """Bytes of the expert that makes actions."""
        return self._bytes_of(PolicyStack.prefix)

    def _bytes_of(self, prefix: str) -> int:
        linears = sum(x.nbytes for name, x in self.linears.items() if name.startswith(prefix))
        return linears + sum(a.nbytes for name, a in self.arrays.items() if name.startswith(prefix))

    def idle_bytes(self) -> int:
        """Bytes of the experts that a token does not use, without those of the layer that drafts."""
        own = {name: x for name, x in self.linears.items() if not name.startswith(DraftStack.prefix)}
        experts = sum(x.nbytes for name, x in own.items() if ".experts." in name)
        return experts - experts * self.config.num_experts_per_tok // max(self.config.num_experts, 1)

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes read to decode one token: `weights`, `head`, 0 where there is none, and `kv_per_position` of the cache that the
        file was made for, in the layers that have keys and values.
        """
        head = self.linears["head"].nbytes if "head" in self.linears else 0
        norms = sum(a.nbytes for name, a in self.arrays.items() if name not in ("embedding", "positions"))
        config = self.config
        own = [i for i in range(config.num_hidden_layers) if config.attends(i) and not config.shares_cache(i)]
        # One row of a table is read, which is not worth counting.
        all_weights = sum(x.nbytes for name, x in self.linears.items() if name not in ("embedding", "layer_rows")) + norms
        return {
            "weights": all_weights - self.idle_bytes() - head - self.vision_bytes() - self.draft_bytes() - self.policy_bytes(),
            "head": head,
            "kv_per_position": sum(2 * each.kv_heads * self.kv.head_bytes(each.head_dim) for each in map(config.heads_of, own)),
        }
