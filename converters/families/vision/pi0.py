"""π0 (Black et al. 2024, arXiv 2410.24164) as transformers has it: PaliGemma reads pictures and a text, and an expert, layers
of Gemma that see its keys and values, makes actions of a robot's state and of noise by flow matching.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.converters.families.decoders.gemma import FIRST_GAINS, GEMMA, first_gemma_settings, first_gemma_sources
from edgeq.converters.families.family import Values, layer_tensors_of
from edgeq.converters.families.vision.paligemma import PALIGEMMA, TOWER
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.policy_stack import PolicyStack

STATISTICS = "stats.json"
"""That of the data set, as LeRobot writes it into `meta`, beside the checkpoint."""
ARCHITECTURE = "PI0ForConditionalGeneration"
MODULES = ("state_proj", "action_in_proj", "action_time_mlp_in", "action_time_mlp_out", "action_out_proj")
VLM, EXPERT_MODEL = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
NAMES = {
    f"{VLM}model.language_model.model.": "model.",
    f"{VLM}model.language_model.": "model.",
    f"{VLM}model.vision_tower.vision_model.": "vision_tower.",
    f"{VLM}model.vision_tower.": "vision_tower.",
    f"{VLM}model.multi_modal_projector.": "multi_modal_projector.",
    f"{EXPERT_MODEL}model.": "dit.",
    f"{EXPERT_MODEL}lm_head.": "dit.lm_head.",
    # On the hub the table is saved under the name of the head that it is tied to.
    f"{VLM}lm_head.": "model.embed_tokens.",
}
RENAMED = NAMES | {f"model.{begin}": ours for begin, ours in NAMES.items()}
RENAMED |= {f"model.{module}.": f"{module}." for module in MODULES}
EXPERT = {"hidden_size": 1024, "num_hidden_layers": 18, "intermediate_size": 4096, "num_attention_heads": 8} | {
    "num_key_value_heads": 1,
    "head_dim": 256,
}
SIZES = {"chunk_size": 50, "max_state_dim": 32, "max_action_dim": 32, "num_inference_steps": 10}
PERIODS = {"min_period": 4e-3, "max_period": 4.0}
UNUSED = ("dit.embed_tokens.weight", "dit.lm_head.weight")
"""Actions are neither looked up in a table nor drawn from one."""
# Linear layer of the expert's ends -> its module.
ENDS = {
    "state_in": "state_proj",
    "action_in": "action_in_proj",
    "time_out": "action_time_mlp_out",
    "action_out": "action_out_proj",
}
TIME = "action_time_mlp_in"
BIASES = (*ENDS, "time_in")


def expert(hf: Values) -> PolicyStack:
    """The expert that `dit_config` and the keys beside it describe."""
    found, text = hf.get("dit_config"), hf.get("text_config")
    for name, each in (("dit_config", found), ("text_config of vlm_config", text)):
        if not isinstance(each, dict):
            raise FormatError(f"{name} is {str(each)[:80]}; expected an object")
        if each.get("model_type", "gemma") != "gemma":
            raise UnsupportedError(f"{name}: model_type {str(each['model_type'])[:80]!r} is not supported; supported: gemma")
    assert isinstance(found, dict)
    values = {**GEMMA.defaults, **EXPERT, **found}
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in keys:
        if type(values[key]) is not int or not 1 <= values[key] <= 1 << 20:
            raise FormatError(f"dit_config: {key} is {str(values[key])[:80]}; expected an integer from 1 to {1 << 20}")
    settings = first_gemma_settings(values)
    del settings["embedding_multiplier"]
    of_policy = {**SIZES, **PERIODS, **{key: hf[key] for key in (*SIZES, *PERIODS) if hf.get(key) is not None}}
    return PolicyStack(
        **{key: values[key] for key in keys},
        **settings,
        state_size=of_policy["max_state_dim"],
        action_size=of_policy["max_action_dim"],
        actions=of_policy["chunk_size"],
        steps=of_policy["num_inference_steps"],
        min_period=of_policy["min_period"],
        max_period=of_policy["max_period"],
    )


def with_statistics(policy: PolicyStack, stats: Values) -> PolicyStack:
    """The policy with the means and deviations of its data: `stats` of a LeRobot data set, of which those of other kinds are
    left out.

    FormatError: one of state and action is missing, or is no list of numbers.
    """
    found: dict[str, Any] = {}
    for what, key in (("state", "observation.state"), ("action", "action")):
        for kind in ("mean", "std"):
            of_key = stats.get(key)
            values = of_key.get(kind) if isinstance(of_key, dict) else None
            if not isinstance(values, list) or not values or not all(type(x) in (int, float) for x in values):
                raise FormatError(f"{STATISTICS}: {kind} of {key} is {str(values)[:80]}; expected a list of numbers")
            found[f"{what}_{kind}"] = tuple(map(float, values))
    return replace(policy, **found)


def sources(config: ModelConfig | PolicyStack) -> dict[str, TensorSource]:
    """Where the decoder's tensors lie, and the expert's."""
    if isinstance(config, ModelConfig):
        return first_gemma_sources(config) | (sources(config.policy) if config.policy else {})
    hidden, found = config.hidden_size, dict[str, TensorSource]()
    for name, shape in layer_tensors_of(config).items():
        above = 1.0 if name.split(".")[-2] in FIRST_GAINS else 0.0
        found[name] = TensorSource(name.replace("expert.", "dit.", 1), shape, shape, added=above)
    found["expert.norm.weight"] = TensorSource("dit.norm.weight", (hidden,), (hidden,), added=1.0)
    shapes = {"state_in": (hidden, config.state_size), "action_in": (hidden, config.action_size)}
    shapes |= {"time_out": (hidden, hidden), "action_out": (config.action_size, hidden)}
    for part, module in ENDS.items():
        matrix = shapes[part]
        found[f"expert.{part}.weight"] = TensorSource(f"{module}.weight", matrix, matrix)
        found[f"expert.{part}.bias"] = TensorSource(f"{module}.bias", matrix[:1], matrix[:1])
    joined, square = (hidden, 2 * hidden), (hidden, hidden)
    # Its first columns read the action, the others the time.
    found["expert.time_action.weight"] = TensorSource(f"{TIME}.weight", joined, square, column=0)
    found["expert.time_in.weight"] = TensorSource(f"{TIME}.weight", joined, square, column=hidden)
    found["expert.time_in.bias"] = TensorSource(f"{TIME}.bias", (hidden,), (hidden,))
    return found


PI0 = replace(
    PALIGEMMA,
    architecture=ARCHITECTURE,
    tower=replace(TOWER, architecture=f"the vision tower of {ARCHITECTURE}"),
    renamed=RENAMED,
    sources=sources,
    biases=BIASES,
    unused=lambda config, tensor: tensor in UNUSED,
    variants=None,
    inside="vlm_config",
    policy=expert,
)
