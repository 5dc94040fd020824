"""Random sound model files: any configuration, any codec, any parts, of tiny and odd sizes; their data may be hostile."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.errors import FormatError
from edgeq.format.codec import GROUP_SIZES, Codec, pack_floats, pack_integers, to_bf16
from edgeq.format.manifest import (
    MODALITIES,
    array_shapes,
    fused_shapes,
    patch_contents,
    policy_input,
    policy_output,
    projector_contents,
    rotation_shapes,
)
from edgeq.format.metadata import Metadata
from edgeq.format.records import Activation, ArrayRef, KvCodec, LinearSpec, LowRank, Transform, Weight
from edgeq.format.writer import Writer
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.image_config import ImageConfig
from edgeq.network.policy_stack import PolicyStack
from edgeq.network.rope import Rope, frequencies

FLOATS = ("f32", "f16", "bf16")
BAD = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, 0.0, 65504.0, 1e30)
BAD_SCALES = (np.nan, np.inf, -np.inf, 65504, -65504, 6e-8, -1.0, 0.0)
NOWHERE = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "special": True, "normalized": False, **NOWHERE}],
        "model": {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1, "b": 2, "[UNK]": 3}, "unk_token": "[UNK]"},
    }
)


def make(path: Path, seed: int | str, hostile: float = 0.0) -> Metadata:
    """Write the file of a seed.  hostile: how often a number is one that no converter writes, from 0 to 1."""
    return _finished(_Maker(path, seed, hostile))


def make_policy(path: Path, seed: int | str) -> Metadata:
    """Write a policy of a seed: a decoder, what sees for it and what acts for it.  Of the seed are weights and codecs alone."""
    return _finished(_PolicyMaker(path, seed, 0.0))


def _finished(maker: _Maker) -> Metadata:
    metadata = maker.body()
    maker.writer.finish(metadata)
    return metadata


class _Maker:
    def __init__(self, path: Path, seed: int | str, hostile: float) -> None:
        self.r = random.Random(seed)
        self.n = np.random.default_rng(self.r.getrandbits(63))
        self.hostile = hostile
        self.writer = Writer(path)

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def power(self, low: float, high: float) -> float:
        return float(10 ** self.r.uniform(low, high))

    def rope(self, head_dim: int, wild: bool) -> Rope:
        kind, partial = (
            self.r.choice(("default", "default", "linear", "llama3", "longrope")),
            self.r.choice((1.0, 1.0, 0.5, 0.75)),
        )
        if int(head_dim * partial) < 2 or int(head_dim * partial) % 2:
            partial = 1.0
        span, pairs = (-29.9, 11.9) if wild else (-0.5, 2), int(head_dim * partial) // 2
        values: dict[str, Any] = {
            "theta": self.power(*(span if wild else (2, 6))),
            "kind": kind,
            "partial_rotary_factor": partial,
        }
        if kind != "default":
            values["factor"] = self.power(*span)
        if kind == "llama3":
            low = self.power(*span)
            values |= {"low_freq_factor": low, "high_freq_factor": min(1e12, 4 * low)}
            values["original_max_position_embeddings"] = self.r.choice((1, 64, 8192))
        if kind == "longrope":
            values |= {"attention_factor": self.power(*span), "original_max_position_embeddings": self.r.choice((1, 3, 64))}
            values |= {key: tuple(self.power(*span) for _ in range(pairs)) for key in ("short_factor", "long_factor")}
        rope = Rope(**values)
        try:
            frequencies(rope, head_dim)
        except FormatError:
            return Rope(10000.0)
        return rope

    def config(self) -> ModelConfig:
        r = self.r
        kind = r.choice(("llama", "llama", "gemma", "opt", "moe"))
        kv, layers, head_dim = r.choice((1, 1, 2, 3)), r.choice((1, 1, 2)), r.choice((2, 4, 6, 8, 10, 16, 18, 32, 34, 64, 66))
        wild = self.chance(self.hostile / 2)
        span = (-29.9, 11.9) if wild else (-0.5, 2)
        c: dict[str, Any] = {
            "model_type": "x",
            "vocab_size": r.choice((4, 5, 16, 17, 33, 100)),
            "hidden_size": r.choice((1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 64, 80, 96, 100, 128, 144, 160, 172)),
            "intermediate_size": r.choice((3, 16, 24, 32, 48, 64, 84, 112, 128, 144, 172, 208, 256)),
            "num_hidden_layers": layers,
            "num_attention_heads": kv * r.choice((1, 1, 2, 3, 5)),
            "num_key_value_heads": kv,
            "head_dim": head_dim,
            "rms_norm_eps": self.power(*span) if wild else 1e-5,
            "rope": Rope(10000.0, "learned") if kind == "opt" else self.rope(head_dim, wild),
            "max_position_embeddings": r.choice((24, 40, 130)),
            "tie_word_embeddings": self.chance(0.5),
            "hidden_act": {"gemma": "gelu_pytorch_tanh", "opt": "relu"}.get(kind, "silu"),
            "qk_norm": self.chance(0.3),
            "layer_norm": kind == "opt",
            "post_norms": kind == "gemma" and self.chance(0.7),
            "embedding_multiplier": self.power(*span) if self.chance(0.2) else 1.0,
            "query_pre_attn_scalar": self.power(*span) if self.chance(0.2) else None,
        }
        if self.chance(0.3):
            c["sliding_windows"] = tuple(r.choice((0, 1, 2, 5, 64, 10**6)) for _ in range(layers))
            c["local_rope"] = Rope(100.0) if kind == "gemma" else None
        if kind == "moe":
            experts = r.choice((1, 2, 3, 5))
            c |= {"num_experts": experts, "num_experts_per_tok": r.randint(1, experts), "norm_topk_prob": self.chance(0.5)}
            c["shared_expert_intermediate_size"] = r.choice((0, 0, 16, 48))
        return ModelConfig(**c)

    def numbers(self, shape: tuple[int, ...], scale: float = 1.0, mean: float = 0.0) -> Any:
        a = (self.n.standard_normal(shape) * scale + mean).astype(np.float32)
        if self.chance(self.hostile / 8):
            a.reshape(-1)[self.n.integers(0, a.size, self.r.choice((1, 1, 3, a.size)))] = self.r.choice(BAD)
        return a

    def floats(
        self, shape: tuple[int, ...], scale: float = 1.0, mean: float = 0.0, dtypes: tuple[str, ...] = FLOATS
    ) -> ArrayRef:
        dtype, a = self.r.choice(dtypes), self.numbers(shape, scale, mean)
        with np.errstate(all="ignore"):
            return self.writer.array(to_bf16(a) if dtype == "bf16" else a, dtype)

    def integers(self, columns: int) -> Codec:
        return Codec("int", self.r.randint(2, 8), self.r.choice((*GROUP_SIZES, 0)), self.chance(0.5))

    def codec(self, columns: int) -> Codec:
        return Codec(self.r.choice(FLOATS)) if self.chance(0.2) else self.integers(columns)  # type: ignore[arg-type]

    def weight(self, rows: int, columns: int, codec: Codec) -> Weight:
        w = self.writer
        if codec.kind != "int":
            with np.errstate(all="ignore"):
                packed = pack_floats(self.numbers((rows, columns), columns**-0.5), codec.kind)
            return Weight(codec, rows, columns, {"q": w.stream([packed], codec.kind, packed.shape)})
        parts = codec.parts(rows, columns)
        # The padding of a hostile file is anything.
        q = self.n.integers(0, 256, parts["q"].shape).astype(np.uint8)
        if not self.chance(self.hostile):
            q = pack_integers(self.n.integers(0, 1 << codec.bits, (rows, columns)).astype(np.uint8), codec.bits)
        scale = self.n.uniform(0.5, 1.5, parts["scale"].shape) * 1.5 * columns**-0.5 / (1 << codec.bits)
        scale = scale.astype(np.float16)
        if self.chance(self.hostile / 8):
            scale.reshape(-1)[self.n.integers(0, scale.size, self.r.choice((1, 1, scale.size)))] = self.r.choice(BAD_SCALES)
        arrays = {"q": w.array(q, "u8"), "scale": w.array(scale, "f16")}
        if not codec.symmetric:
            most = 256 if self.chance(self.hostile) else 1 << codec.bits
            arrays["zero"] = w.array(self.n.integers(0, most, parts["zero"].shape).astype(np.uint8), "u8")
        return Weight(codec, rows, columns, arrays)

    def transform(self, columns: int) -> Transform | None:
        sizes = [
            (k << m, stride, k)
            for stride in (1, 2, 16, 32)
            for k in (1, 3, 5, 12)
            for m in range(9)
            if columns % ((k << m) * stride) == 0 and (k << m) > 1
        ]
        if not sizes:
            return None
        size, stride, k = self.r.choice(sizes)
        base = None
        if k > 1:
            base = self.writer.array((np.linalg.qr(self.n.standard_normal((k, k)))[0] * k**0.5).astype(np.float32), "f32")
        return Transform(size, stride, base)

    def linear(self, name: str, rows: int, columns: int, plain: bool, master: bool, style: str | None = None) -> LinearSpec:
        """plain: one weight block and a bias at most;  master: the layer can be requantized;  style: layers of one style have
        the same parts and codecs, as experts must."""
        kept = self.r
        self.r = kept if style is None else random.Random(style)
        two = not plain and not master and columns > 1 and self.chance(0.2)
        cuts = [c for c in (16, 32, 64, columns // 2, columns - 1, 1, 5) if 0 < c < columns]
        cut = self.r.choice(cuts) if two else columns
        codecs = [self.codec(cut), *([self.codec(columns - cut)] if two else [])]
        order, turn, scaled, low, active = (not plain and not master and self.chance(0.2) for _ in range(5))
        if master:
            codecs, low = [self.integers(columns)], self.chance(0.3)
        rank, lows = self.r.choice((1, 2, 16, 17)), [Codec(self.r.choice(FLOATS)) for _ in range(2)]  # type: ignore[arg-type]
        high = self.r.randint(2, 8) if two else 0
        activation = Activation(self.r.randint(2, 8), high, self.chance(0.5)) if active else None
        if activation and not two and not style and self.chance(0.3):
            count, step = self.r.choice((1, MODALITIES)), 4 / max(1, (1 << (activation.bits - 1)) - 1)
            scales = self.writer.array(self.n.uniform(0.7, 1.4, count).astype(np.float32) * np.float32(step), "f32")
            activation = Activation(activation.bits, 0, True, scales)
        of_master = self.r.choice((Codec("int", 8, 32), Codec("int", 8, 0, False), Codec("f32"), Codec("f16"), Codec("bf16")))
        bias, transform_seed = self.chance(0.2), self.r.random()
        self.r = random.Random(transform_seed) if style else kept
        transform = self.transform(columns) if turn else None
        self.r = kept
        weights = [self.weight(rows, size, codec) for size, codec in zip((cut, columns - cut), codecs, strict=False)]
        return LinearSpec(
            name,
            tuple(weights),
            bias=self.floats((rows,), 0.1) if bias else None,
            input_order=self.writer.array(self.n.permutation(columns).astype(np.int32), "i32") if order else None,
            transform=transform,
            input_scale=self.floats((columns,), 0.2, 1.0, ("f32",)) if scaled else None,
            activation=activation,
            low_rank=LowRank(self.weight(rows, rank, lows[0]), self.weight(rank, columns, lows[1])) if low else None,
            master=self.weight(rows, columns, of_master) if master else None,
        )

    def rotation(self, dtype: str, shape: tuple[int, ...], head_dim: int) -> ArrayRef:
        if dtype == "i8":
            return self.writer.array(self.n.integers(-127, 128, shape).astype(np.int8), "i8")
        return self.writer.array(self.numbers(shape, 0.0, head_dim**-0.5 / 70), dtype)

    def beside(self, c: ModelConfig) -> dict[str, LinearSpec]:
        """The linear layers of what is beside the decoder."""
        return {}

    def body(self) -> Metadata:
        c, masters = self.config(), self.chance(0.2)
        linears: dict[str, LinearSpec] = {}
        for layer in range(c.num_hidden_layers):
            style = str(self.r.random())
            for fused, parts in fused_shapes(c, layer):
                expert, columns = ".experts." in fused, next(iter(parts.values()))[1]
                whole = {fused: (sum(rows for rows, _ in parts.values()), columns)}
                for name, (rows, _) in (whole if expert or self.chance(0.7) else parts).items():
                    alike = f"{style} {name.split('.')[-1]}" if expert else None
                    linears[name] = self.linear(name, rows, columns, False, masters and not expert, alike)
        linears |= self.beside(c)
        linears["head"] = self.linear("head", c.vocab_size, c.hidden_size, c.tie_word_embeddings, False)
        arrays = {}
        for name, shape in array_shapes(c).items():
            gain = len(shape) == 1 and "bias" not in name
            arrays[name] = self.floats(shape, 0.2 if gain else 1.0, 1.0 if gain else 0.0)
        if self.chance(0.2):
            for layer in range(c.num_hidden_layers):
                for name, (dtype, shape) in rotation_shapes(c, layer).items():
                    arrays[name] = self.rotation(dtype, shape, c.head_dim)
        kv = self.r.choice(("f16", "f16", "int8", "int4"))
        high = min(self.r.choice((0, 0, 1, 2, c.head_dim // 2, c.head_dim - 1, c.head_dim)), c.head_dim) if kv == "int4" else 0
        cache = KvCodec(kv, high, self.r.choice((2, 3, 4)) if kv == "int4" else 4)  # type: ignore[arg-type]
        blobs = {"tokenizer.json": self.writer.append([TOKENIZER.encode()])}
        generation: dict[str, object] = {"eos_token_ids": [0], "temperature": 0.7, "top_k": 4}
        mode = self.r.choice(("a16", "a8", "a4"))
        kernels = {f"sm_{80 + i}": self.writer.append([self.r.randbytes(70)]) for i in range(self.r.choice((0, 0, 0, 2)))}
        return Metadata(c, generation, {"method": "fuzz"}, mode, linears, arrays, blobs, cache, kernels)  # type: ignore[arg-type]


class _PolicyMaker(_Maker):
    def config(self) -> ModelConfig:
        layers: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5}
        layers |= {"num_attention_heads": 2, "hidden_act": "gelu_pytorch_tanh"}
        policy = PolicyStack(
            **layers, hidden_size=32, intermediate_size=48, rope=Rope(1e4), state_size=9, action_size=5, actions=7, steps=2,
            min_period=0.01, max_period=4.0,
        )  # fmt: skip
        image = ImageConfig(sizing="fixed", height=16, width=16, mean=(0.5,) * 3, std=(0.5,) * 3)
        vision = VisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=16, rms_norm_eps=1e-6, rope=Rope(1e4, "learned"), hidden_act="gelu_pytorch_tanh", layer_norm=True,
            gated_mlp=False,
            patch_size=8, out_hidden_size=48, image=image, image_token_id=4, position_rows=4, merge=1, temporal_patch_size=1,
            project_norm="patch", project_size=0, project_act="none",
        )  # fmt: skip
        return ModelConfig(
            **layers, model_type="pi0", vocab_size=33, hidden_size=48, intermediate_size=64, rope=Rope(1e4),
            max_position_embeddings=130, tie_word_embeddings=True, bidirectional_prompt=True, vision=vision, policy=policy,
        )  # fmt: skip

    def beside(self, c: ModelConfig) -> dict[str, LinearSpec]:
        assert c.vision is not None and c.policy is not None
        ends = patch_contents(c.vision) | projector_contents(c.vision) | policy_input(c.policy) | policy_output(c.policy)
        contents = [
            each for stack in (c.vision, c.policy) for i in range(stack.num_hidden_layers) for each in fused_shapes(stack, i)
        ]
        contents += [(name, part) for name, part in ends.items() if isinstance(part, dict)]
        shapes = {name: (sum(rows for rows, _ in part.values()), next(iter(part.values()))[1]) for name, part in contents}
        return {name: self.linear(name, rows, columns, False, False) for name, (rows, columns) in shapes.items()}
