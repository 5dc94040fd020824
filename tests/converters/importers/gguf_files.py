"""GGUF files of tiny checkpoints, as llama.cpp's converter lays them out; names and quantization by the package gguf."""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from edgeq.converters.families.decoders.lfm import mlp_width
from edgeq.converters.importers.gguf_types import BLOCK_TYPES
from tests.converters.importers.layouts.encoders import (
    ENCODERS,
    ENCODERS_LACK,
    encoder_metadata,
    encoder_tensors,
)
from tests.converters.importers.layouts.granite import GRANITES, granite_mlp
from tests.converters.importers.layouts.states import (
    Array,
    delta_net_metadata,
    delta_net_tensors,
    draft_name,
    nemotron_h_config,
    state_space_metadata,
    state_space_tensors,
)

ARCHITECTURES = {
    "llama": ("llama", "LLAMA"),
    "mistral": ("llama", "LLAMA"),
    "mixtral": ("llama", "LLAMA"),
    "smollm3": ("smollm3", "SMOLLM3"),
    "qwen2": ("qwen2", "QWEN2"),
    "qwen3": ("qwen3", "QWEN3"),
    "qwen2_vl_text": ("qwen2vl", "QWEN2VL"),
    "qwen2_5_vl_text": ("qwen2vl", "QWEN2VL"),
    "qwen3_vl_text": ("qwen3vl", "QWEN3VL"),
    "phi3": ("phi3", "PHI3"),
    "gemma3_text": ("gemma3", "GEMMA3"),
    "qwen2_moe": ("qwen2moe", "QWEN2MOE"),
    "qwen3_moe": ("qwen3moe", "QWEN3MOE"),
    "olmo2": ("olmo2", "OLMO2"),
    "olmo3": ("olmo2", "OLMO2"),
    "exaone4": ("exaone4", "EXAONE4"),
    "glm4": ("glm4", "GLM4"),
    "ernie4_5": ("ernie4_5", "ERNIE4_5"),
    "granite": ("granite", "GRANITE"),
    "granitemoe": ("granitemoe", "GRANITE_MOE"),
    "granitemoeshared": ("granitemoe", "GRANITE_MOE"),
    "stablelm": ("stablelm", "STABLELM"),
    "starcoder2": ("starcoder2", "STARCODER2"),
    "cohere": ("command-r", "COMMAND_R"),
    "cohere2": ("cohere2", "COHERE2"),
    "hunyuan_v1_dense": ("hunyuan-dense", "HUNYUAN_DENSE"),
    "gpt2": ("gpt2", "GPT2"),
    "gpt_neox": ("gptneox", "GPTNEOX"),
    "gpt_bigcode": ("starcoder", "STARCODER"),
    "lfm2": ("lfm2", "LFM2"),
    "gpt_oss": ("gpt-oss", "GPT_OSS"),
    "gemma4_text": ("gemma4", "GEMMA4"),
    "granitemoehybrid": ("granitehybrid", "GRANITE_HYBRID"),
    "falcon_h1": ("falcon-h1", "FALCON_H1"),
    "nemotron_h": ("nemotron_h", "NEMOTRON_H"),
    "qwen3_next": ("qwen3next", "QWEN3NEXT"),
    "qwen3_5_text": ("qwen35", "QWEN35"),
    "qwen3_5_moe_text": ("qwen35moe", "QWEN35MOE"),
    "falcon": ("falcon", "FALCON"),
    "bloom": ("bloom", "BLOOM"),
    "mpt": ("mpt", "MPT"),
    "bert": ("bert", "BERT"),
    "xlm-roberta": ("bert", "BERT"),
    "nomic_bert": ("nomic-bert", "NOMIC_BERT"),
    "modernbert": ("modern-bert", "MODERN_BERT"),
}
"""`model_type` of config.json -> llama.cpp's name, and that of the package."""
INTERLEAVED = ("llama", "mistral", "mixtral", "smollm3", "granite", *GRANITES)
GPT2_KEYS = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
GPT2_KEYS |= {"max_position_embeddings": "n_positions", "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon"}
ALIBI_KEYS = {
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "mpt": {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model"}
    | {"max_position_embeddings": "max_seq_len"},
}
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
SCALES |= {"TQ1_0": (52,), "TQ2_0": (64,)}
"""Bytes of a block at which it has an f16; of the other types the first."""


def random_blocks(number: int, rows: int, blocks: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks of any bytes, with finite scales of both signs; of MXFP4 powers of two of an f16, of TQ2_0 three values."""
    rng, block = np.random.default_rng(seed), BLOCK_TYPES[number]
    raw = rng.integers(0, 256, (rows, blocks, block.nbytes), np.uint8)
    if block.name == "MXFP4":
        raw[..., 0] = rng.integers(104, 144, (rows, blocks))
        return raw
    if block.name == "TQ2_0":
        raw &= ~(raw >> 1 & 0x55)
    for at in SCALES.get(block.name, (0,)):
        scales = rng.normal(0, 0.01, (rows, blocks)).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw


FLOATS = re.compile(r"gate_inp|conv\.weight|conv1d|ssm_norm|ssm_[ad]$|\.bias")
"""Names of tensors that llama.cpp leaves in float32."""


def exact_float(name: str, values: Array) -> Type:
    """Matrices of bfloat16, as the checkpoints are; vectors in float32."""
    return Type.BF16 if values.ndim > 1 and values.shape[-1] > 1 else Type.F32


def in_type(kind: Type) -> Callable[[str, Array], Type]:
    """Matrices of `kind` where its blocks divide their rows."""
    return lambda name, values: kind if values.ndim > 1 and not FLOATS.search(name) else Type.F32


def write_gguf(
    folder: Path,
    path: Path,
    choose: Callable[[str, Array], Type] = exact_float,
    change: Callable[[dict[str, Any]], None] = lambda keys: None,
    tensors: Mapping[str, Array] = MappingProxyType({}),
    without: tuple[str, ...] = (),
) -> None:
    """Write the checkpoint in `folder`.

    choose   type of a tensor by its name and values;  change  the metadata;  tensors  some in place of those made of it
    without  llama.cpp's names of tensors of layers that are left out
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] in ("gpt2", "gpt_bigcode"):
        config |= {key: config[theirs] for key, theirs in GPT2_KEYS.items()}
    if config["model_type"] in ALIBI_KEYS:
        config |= {key: config[theirs] for key, theirs in ALIBI_KEYS[config["model_type"]].items()}
        config |= {"intermediate_size": 4 * config["hidden_size"], "layer_norm_eps": config["layer_norm_epsilon"]}
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config["model_type"] == "falcon":
        config |= {"intermediate_size": config["ffn_hidden_size"], "layer_norm_eps": config["layer_norm_epsilon"]}
        config["num_key_value_heads"] = config["num_kv_heads"]
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = 1
    if config["model_type"] == "nemotron_h":
        config = nemotron_h_config(config)
    own, name = ARCHITECTURES[config["model_type"]]
    if own == "nemotron_h" and config.get("num_experts"):
        own, name = "nemotron_h_moe", "NEMOTRON_H_MOE"
    writer = gguf.GGUFWriter(path, own)
    keys = metadata(config, own)
    change(keys)
    for key, value in keys.items():
        add(writer, key, value)
    layers = config["num_hidden_layers"] + config.get("mtp_num_hidden_layers", 0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name], layers)
    for theirs, values in {**llama_cpp_tensors(config, folder), **tensors}.items():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
        if ours.split(".")[2:3] and ours.split(".")[2] in without:
            continue
        kind = choose(ours, values)
        if kind == Type.F32:
            writer.add_tensor(ours, values)
        elif kind.name.endswith("_K") or kind == Type.IQ4_NL:
            # The package reads these types and does not write them.
            block, rows = BLOCK_TYPES[int(kind)], math.prod(values.shape[:-1])
            raw = random_blocks(int(kind), rows, values.shape[-1] // block.width, zlib.crc32(ours.encode()))
            writer.add_tensor(ours, raw.reshape(*values.shape[:-1], -1), raw_dtype=kind)
        else:
            writer.add_tensor(ours, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def metadata(config: Mapping[str, Any], own: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        **({"feed_forward_length": config["intermediate_size"]} if "intermediate_size" in config else {}),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(full.get("rope_theta", 10000)),
        "rope.dimension_count": round(head_dim * full.get("partial_rotary_factor", 1)),
        "vocab_size": config["vocab_size"],
    }
    if own in ("gpt2", "starcoder", "gptneox"):
        # Those of llama.cpp's converter; it leaves the base of GPT-NeoX out, and here it may differ.
        absent = ["attention.key_length", "attention.value_length"]
        absent += ["attention.head_count_kv"] if own != "starcoder" else []
        absent += ["rope.freq_base", "rope.dimension_count"] if own != "gptneox" else []
        keys = {key: value for key, value in keys.items() if key not in absent}
    if own in ENCODERS:
        keys |= encoder_metadata(config)
        keys = {key: value for key, value in keys.items() if key not in ENCODERS_LACK}
        # Those of BERT rotate nothing.
        keys |= {"rope.freq_base": float(full["rope_theta"])} if own != "bert" else {}
    if own == "gptneox":
        keys["use_parallel_residual"] = config["use_parallel_residual"]
    if full.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(full["factor"])}
    if full.get("rope_type") == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(full["factor"])}
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        options = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        keys |= {f"rope.scaling.yarn_{ours}": float(full[key]) for key, ours in options.items() if full.get(key) is not None}
    if full.get("rope_type") == "longrope":
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if own in ("gemma3", "phi3"):
        keys["attention.sliding_window"] = config.get("sliding_window") or 0
    for epsilon in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon"):
        if epsilon in config:
            keys[f"attention.layer_norm_{'rms_' * (epsilon == 'rms_norm_eps')}epsilon"] = config[epsilon]
    multipliers = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    multipliers |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "logit_scale": "logit_scale"}
    stated = {} if own == "falcon-h1" else multipliers
    keys |= {key: float(config[name]) for name, key in stated.items() if config.get(name) is not None}
    if full.get("rope_type") == "dynamic":
        # Hunyuan's: a constant that the base takes.
        keys["rope.freq_base"] *= full["alpha"] ** (head_dim / (head_dim - 2))
        keys |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
        keys["rope.scaling.original_context_length"] = config["max_position_embeddings"]
    if config["model_type"] in ("olmo3", "exaone4", "cohere2") and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if own == "lfm2":
        attends = [each == "full_attention" for each in config["layer_types"]]
        keys["attention.head_count_kv"] = [config["num_key_value_heads"] * each for each in attends]
        keys |= {"shortconv.l_cache": config["conv_L_cache"], "attention.layer_norm_rms_epsilon": config["norm_eps"]}
        keys["feed_forward_length"] = mlp_width({"block_ff_dim": None, "block_auto_adjust_ff_dim": True, **config})
        keys = {key: value for key, value in keys.items() if key not in ("attention.key_length", "attention.value_length")}
    if own in ALIBI_KEYS:
        lacking = ("rope.freq_base", "rope.dimension_count", "attention.key_length", "attention.value_length")
        keys = {key: value for key, value in keys.items() if key not in lacking}
    if own == "mpt":
        keys["attention.max_alibi_bias"] = float(config["attn_config"]["alibi_bias_max"])
        keys |= {"attention.clamp_kqv": clip} if (clip := config["attn_config"]["clip_qkv"]) else {}
    if own == "gemma4":
        keys |= gemma4_metadata(config, rope)
    if config.get("linear_num_value_heads"):
        keys |= delta_net_metadata(config, own)
    if "mamba_n_heads" in config:
        keys |= state_space_metadata(config, own)
    if own == "gpt-oss":
        keys |= {"attention.sliding_window": config["sliding_window"]}
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if config["model_type"] == "olmo3":
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        keys |= {"expert_count": experts, "expert_used_count": config.get("top_k_experts") or config["num_experts_per_tok"]}
    if config["model_type"] == "granitemoeshared":
        keys["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    if config.get("moe_intermediate_size"):
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        keys["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return {f"{own}.{key}": value for key, value in keys.items()}


def llama_cpp_tensors(config: Mapping[str, Any], folder: Path) -> dict[str, Array]:
    """The tensors of the checkpoint as llama.cpp has them, under transformers' names."""
    stored = load_file(folder / "model.safetensors")
    found = {draft_name(config, name): values.float().numpy() for name, values in stored.items()}
    kind = config["model_type"]
    for name, values in list(found.items()):
        if kind in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            found[name] = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if kind == "gpt2" and values.ndim == 2 and ".h." in name:
            found[name] = np.ascontiguousarray(values.T)
        if kind == "falcon" and "query_key_value" in name:
            groups, size = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
            by_group = values.reshape(groups, -1, size, values.shape[-1])
            apart = [by_group[:, part].reshape(-1, values.shape[-1]) for part in (slice(-2), -2, -1)]
            found[name] = np.concatenate(apart)
        elif "query_key_value" in name:
            by_heads = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
            found[name] = np.ascontiguousarray(by_heads.swapaxes(0, 1)).reshape(values.shape)
        if kind == "bloom":
            found[name.removeprefix("transformer.")] = found.pop(name)
        if kind == "gemma3_text" and "norm" in name:
            found[name] = values + 1
        if "mamba_n_heads" in config:
            found |= state_space_tensors(config, name, found.pop(name))
        if kind in GRANITES and name in found:
            found |= granite_mlp(config, name, found.pop(name))
        if config.get("linear_num_value_heads"):
            found |= delta_net_tensors(config, name, found.pop(name))
        if kind in ("bert", "xlm-roberta", "modernbert"):
            found |= encoder_tensors(config, name, found.pop(name))
        if name.endswith("shared_expert_gate.weight"):
            found[name] = values[0]
        if name.endswith("conv.conv.weight"):
            found[name] = values[:, 0]
        if kind == "gpt_oss" and ".experts." in name:
            found |= gpt_oss_experts(name, found.pop(name))
        if name.endswith((".sinks", ".layer_scalar")):
            found[f"{name}.weight"] = found.pop(name)
        if kind == "gemma4_text" and (name.endswith("scale") or ".experts." in name):
            layer = name.split(".")[2]
            scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
            ours = scales.get(name.partition(f".{layer}.")[2])
            found[f"blk.{layer}.{ours}" if ours else f"{name}.weight"] = found.pop(name)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_divisors(config, rope)
    if kind == "gemma4_text":
        own = next(iter((config["per_layer_config"] or {}).values()), {})
        pairs = own.get("head_dim", config["head_dim"]) // 2
        turned = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        found["rope_freqs.weight"] = np.array([1] * turned + [1e30] * (pairs - turned), np.float32)
    if rope.get("rope_type") == "longrope":
        for part in ("long", "short"):
            found[f"rope_factors_{part}.weight"] = np.array(rope[f"{part}_factor"], np.float32)
    return stacked(found)


def gemma4_metadata(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without a window have heads of their own."""
    layers, types, shared = config["num_hidden_layers"], config["layer_types"], config["num_kv_shared_layers"]
    own = next(iter((config["per_layer_config"] or {}).values()), {})
    full = {"head_dim": config["head_dim"], "num_key_value_heads": config["num_key_value_heads"], **own}
    heads = [(full if each == "full_attention" else config)["num_key_value_heads"] for each in types]
    widths = [config["intermediate_size"]] * (layers - shared)
    widths += [config["intermediate_size"] * (2 if config["use_double_wide_mlp"] else 1)] * shared
    keys = {
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [each == "sliding_attention" for each in types],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }
    return {key: value for key, value in keys.items() if value is not None}


def gpt_oss_experts(name: str, values: Array) -> dict[str, Array]:
    """A tensor of all experts, with a row for each output channel, gates apart from what they multiply."""
    stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    rows = values if kind == "bias" else values.swapaxes(1, 2)
    parts = {"gate_up": {"gate": rows[:, 0::2], "up": rows[:, 1::2]}, "down": {"down": rows}}
    experts, _, module = stem.rpartition(".")
    found = parts[module.removesuffix("_proj")]
    return {f"{experts}.{part}_proj.{kind}": np.ascontiguousarray(array) for part, array in found.items()}


def stacked(tensors: dict[str, Array]) -> dict[str, Array]:
    """Experts of a layer as one tensor [experts, rows, columns]."""
    found, experts = dict[str, Array](), dict[str, list[Array]]()
    for name, values in tensors.items():
        before, middle, rest = name.partition(".experts.")
        number, _, module = rest.partition(".")
        if middle and number.isdecimal():
            experts.setdefault(f"{before}.experts.{module}", []).append(values)
        elif middle and "." in rest:
            found[name] = values
        elif middle:
            parts = {"gate_proj": values[:, : values.shape[1] // 2], "up_proj": values[:, values.shape[1] // 2 :]}
            fused = parts if rest.startswith("gate_up") else {"down_proj": values}
            found |= {f"{before}.experts.{part}.weight": np.ascontiguousarray(array) for part, array in fused.items()}
        else:
            found[name] = values
    return found | {name: np.stack(values) for name, values in experts.items()}


def llama3_divisors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Array:
    """By llama.cpp's converter, a frequency at a time."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    divisors = []
    for i in range(0, size, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / size)
        if wave < original / high:
            divisors.append(1.0)
        elif wave > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def tiny_texts(metadata: Mapping[str, Any], folder: Path, given: Path | None = None, picture: str = "") -> None:
    """Writes the tokenizer of the demo model, which these checkpoints have."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parents[3] / "models" / "tiny-llama" / name, folder / name)
