"""Reads sliding windows and rotary embeddings from config.json."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgeq.converters.families.family import Values
from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.rope import Rope

ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
YARN_OPTIONS = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")
"""Further keys of a yarn rope, which may be absent or null."""
# Old Phi-3 configurations say "su"; transformers also reads their "yarn" as longrope, no checkpoint has it.
ROPE_NAMES = {"su": "longrope"}


def window(values: Values) -> int:
    """`sliding_window`; 0 for null, which means none."""
    found = values["sliding_window"]
    if found is not None and (type(found) is not int or found < 1):
        raise FormatError(f"sliding_window is {found!r}; expected a positive integer or null")
    return found or 0


def one_window(values: Values, layers: int) -> tuple[int, ...]:
    """Mistral, Phi-3: every layer sees `sliding_window` positions; null: all."""
    found = window(values)
    return (found,) * layers if found else ()


def qwen_windows(values: Values, layers: int) -> tuple[int, ...]:
    """Qwen2, Qwen3: windows where `layer_types` says so; without it, from layer `max_window_layers` on."""
    found, types = window(values) if values["use_sliding_window"] else 0, values["layer_types"]
    if types is None:
        first = values["max_window_layers"]
        if type(first) is not int:
            raise FormatError(f"max_window_layers is {first!r}; expected an integer")
        types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return typed_windows(found, types, layers)


def typed_windows(window: int, types: Any, layers: int) -> tuple[int, ...]:
    """`window` in the layers whose type is sliding_attention, 0 in others."""
    if not isinstance(types, list) or len(types) != layers:
        raise FormatError(f"layer_types is not a list of {layers} entries, one per layer")
    unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(f"layer_types {unknown[0]!r} is not supported; supported: full_attention, sliding_attention")
    windows = tuple(window if t == "sliding_attention" else 0 for t in types)
    return windows if any(windows) else ()


def rope(values: Values) -> Rope:
    """Both spellings: `rope_theta` beside `rope_scaling`, and all of it in `rope_parameters` (transformers 5)."""
    where = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    return rope_of(values, where, values[where] or {}, values["rope_theta"])


def partial_rope(values: Values) -> Rope:
    """The same where only `partial_rotary_factor` of a head may be rotated."""
    where = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    settings = values[where] or {}
    if not isinstance(settings, dict):
        raise FormatError(f"{where} is {settings!r}; expected an object")
    partial = settings.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    found = rope({**values, where: {key: value for key, value in settings.items() if key != "partial_rotary_factor"}})
    return found if partial is None else replace(found, partial_rotary_factor=partial)


def mrope(values: Values, interleaved: bool = False, partial: bool = False) -> Rope:
    """M-RoPE: beside what `rope` reads, `mrope_section`, the pairs of time, height and width.

    partial   only `partial_rotary_factor` of a head may be rotated
    """
    where = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    settings = values[where]
    if not isinstance(settings, dict) or not isinstance(settings.get("mrope_section"), list):
        raise FormatError(f"{where} is {str(settings)[:80]}; expected an object with mrope_section")
    for kind in (settings.get(key, "default") for key in ("rope_type", "type")):
        if kind not in ("mrope", "default"):
            raise UnsupportedError(f"{where}: rope kind {str(kind)[:80]!r} is not supported with mrope_section")
    if settings.get("mrope_interleaved", interleaved) is not interleaved:
        raise UnsupportedError(f"{where}: mrope_interleaved is {settings['mrope_interleaved']!r:.80}; supported: {interleaved}")
    read = ("mrope_section", "mrope_interleaved", "rope_type", "type")
    plain = {key: value for key, value in settings.items() if key not in read}
    found = partial_rope({**values, where: plain}) if partial else rope_of(values, where, plain, values["rope_theta"])
    return replace(found, sections=tuple(settings["mrope_section"]), interleaved=interleaved)


def rope_of(values: Values, where: str, settings: Any, theta: Any) -> Rope:
    """The object `settings`, found under key `where`; `theta`: its default base."""
    if not isinstance(settings, dict):
        raise FormatError(f"{where} is {settings!r}; expected an object")
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = ROPE_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise UnsupportedError(f"{where}: rope kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if settings.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedError(f"{where}: partial_rotary_factor is {settings['partial_rotary_factor']!r}; supported: 1.0")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known.update(*ROPE_KINDS.values()) if kind == "longrope" else known.update(ROPE_KINDS["llama3"])
    known.update(YARN_OPTIONS if kind == "yarn" else ())
    unknown = sorted(set(settings) - known)
    if unknown:
        raise UnsupportedError(f"{where}: {unknown[0]} is not supported with rope kind {kind!r}")
    numbers = {key: settings[key] for key in ROPE_KINDS[kind] if settings.get(key) is not None}
    if kind in ("llama3", "yarn"):
        numbers.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    if kind == "longrope":
        numbers = _longrope(values, where, numbers)
    if kind == "yarn":
        numbers |= _yarn(where, settings)
    missing = sorted(set(ROPE_KINDS[kind]) - set(numbers))
    if missing:
        raise FormatError(f"{where} of kind {kind!r} lacks {missing[0]}")
    found: Any = settings.get("rope_theta", theta)
    return Rope(theta=found, kind=kind, **numbers)


def _yarn(where: str, settings: Values) -> dict[str, Any]:
    """YaRN's options; without an attention factor it is 0.1 ln(factor) + 1, or the ratio of two such numbers."""
    given = {key: settings[key] for key in YARN_OPTIONS if settings.get(key) is not None}
    for key in ("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        found = settings.get(key)
        if found is not None and (type(found) not in (int, float) or not 0 <= found <= 1e12):
            raise FormatError(f"{where}: {key} is {found!r:.80}; expected a positive number")
    growth = math.log(max(settings.get("factor") or 1, 1))
    first, second = given.pop("mscale", 0), given.pop("mscale_all_dim", 0)
    ratio = (0.1 * first * growth + 1) / (0.1 * second * growth + 1) if first and second else 0.1 * growth + 1
    return {"attention_factor": ratio} | given


def _longrope(values: Values, where: str, numbers: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE's default factor is the ratio of the two context lengths; its attention factor follows from it."""
    longest = values["max_position_embeddings"]
    original: Any = values.get("original_max_position_embeddings") or numbers.get("original_max_position_embeddings", longest)
    for key in ("short_factor", "long_factor"):
        if key in numbers and not isinstance(numbers[key], list):
            raise FormatError(f"{where}: {key} is {numbers[key]!r}; expected a list of numbers")
    for key, value in {"max_position_embeddings": longest, "original_max_position_embeddings": original}.items():
        if type(value) is not int or value < 2:
            raise FormatError(f"{key} is {value!r}; expected an integer above 1")
    factor = numbers.get("factor", longest / original)
    if type(factor) not in (int, float) or not 0 < factor < 1e12:
        raise FormatError(f"{where}: factor is {factor!r}; expected a positive number")
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = {key: tuple(numbers[key]) for key in ("short_factor", "long_factor") if key in numbers}
    return (
        numbers
        | factors
        | {
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": numbers.get("attention_factor", stretched),
        }
    )
