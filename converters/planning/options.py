"""The options of a conversion and the values that each may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edgeq.converters.budget.budget import Budget
from edgeq.errors import InputError
from edgeq.format.codec import GROUP_SIZES
from edgeq.network.pooling import POOLINGS
from edgeq.network.stack import MAX_SIZES

HeadBits = Literal[4, 6, 8, 16]
HEADS: tuple[HeadBits, ...] = (4, 6, 8, 16)
NOT_RECORDED = ("open_method", "calibration", "merge_lora", "tokenizer", "mmproj", "device", "restart", "force", "token",
                "offline")  # fmt: skip
"""Options that are not written to the file: the provenance has the calibration text's digest instead of its path."""
EVERY_METHOD = ("method", "open_method", "pooling", "rerank", "draft_head", "merge_lora", "tokenizer", "mmproj", "device",
                "revision", "restart", "force", "token", "offline")  # fmt: skip
"""Options that do not depend on the method."""
ONE_CODEC = ("bits", "group_size", "symmetric", "half", "table", "trellis", "scale_bits", "head")
"""Options that give all decoder layers one codec, and the head one: an allocation or a budget takes their place."""
RANKINGS = ("qwen3",)
"""Whose prompt a decoder that ranks reads."""
COMPUTERS = ("auto", "cpu", "cuda", "mps")
"""Where calibration text can run."""
MAX_RANK = 256
BEST = "gptq"
"""No method loses less at its bytes, and those that lose as much take longer (docs/quality.md)."""

# Option -> (how it is called on the command line, the values it may have).
CHOICES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "bits": ("--bits W", tuple(range(2, 9))),
    "activation_bits": ("--bits W/A", (4, 6, 8, 16)),
    "kv_bits": ("--bits W/A/KV", (3, 4, 8, 16)),
    "group_size": ("--group-size", (*GROUP_SIZES, 0)),
    "symmetric": ("--sym/--asym", (True, False)),
    "scale_bits": ("--scale-bits", (4, 16)),
    "act_order": ("--act-order", (True, False)),
    "gptq": ("--gptq", (True, False)),
    "split_row": ("--split-row", (True, False)),
    "master": ("--master", ("i8", "bf16")),
    "dtype": ("--dtype", ("f32", "f16", "bf16")),
    "head": ("--head", HEADS),
    "activations": ("--activations", ("block", "token", "static", "modality")),
    "rotate": ("--rotate/--no-rotate/--auto-rotate", (True, False, "auto")),
    "device": ("--device", COMPUTERS),
    "pooling": ("--pooling", POOLINGS),
    "rerank": ("--rerank", RANKINGS),
    "vision_bits": ("--vision-bits W", (*range(2, 9), 16)),
    "vision_activation_bits": ("--vision-bits W/A", (8, 16)),
}
RANGES: dict[str, tuple[str, float, float]] = {
    "rank": ("--rank", 0, MAX_RANK),
    "alpha": ("--alpha", 0, 1),
    "high_fraction": ("--high-fraction", 0, 0.5),
    "draft_head": ("--draft-head", 0, MAX_SIZES["vocab_size"]),
    "calibration_rows": ("--calibration-rows", 1, 4096),
    "calibration_length": ("--calibration-length", 16, 16384),
}
UNITS = {"bits": "{} bits", "activation_bits": "{} bits of activations", "kv_bits": "a cache of {} bits"}
NAMES = {"budget": "a budget (--bits with a decimal point, --size, --read, --kl or --speed)", "allocation": "--plan"}
UNITS |= {"group_size": "group size {}", "head": "a head of {} bits", "vision_bits": "a vision tower of {} bits"}


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert.  None: not given; the method then takes its own default (`completed`).

    method            not given: with a calibration text, a budget or an allocation the one that loses least at its bytes
                      (BEST), else rounding to nearest
    open_method       the method was not given: another one may take its place where the model asks for it
    bits              of weights, 2 to 8
    activation_bits   4, 6, 8 or 16: the default mode; None: measured where there is calibration text, else 16
    kv_bits           3 (stored in 4), 4, 8 or 16: the cache that the file is made for
    group_size        16, 32, 64, 128, or 0: one group per output channel; None: the method's default, or the next smaller
                      size that divides the columns
    symmetric, half   an integer stands for zero in every group, or the middle between two does; neither: zero points
    table             levels that are nearest to a Gaussian, of a table of signed bytes: 2 to 4 bits
    trellis           twice as many, among which 16 output channels choose together, with scales of 4 bits: 2 or 3 bits
    scale_bits        of half grids: 16, or 4 and an f16 per output channel
    tune              GPTQ: learn the scales of every decoder layer on its output (edgeq.converters.methods.tuning)
    act_order         GPTQ: columns in order of falling activations, over grids fixed before
    gptq              rotated methods: weights by GPTQ instead of rounding
    split_row         rotated methods: the first column behind online transforms apart, unrounded
    rotate            round the weights of a rotated model, which gives the same; "auto": where less is then lost, as tried
                      (edgeq.converters.probing.rotation_choice); MQuant: change the basis at all
    rank, master      TTQ: of the low-rank part; how the weights are kept for requantization
    alpha             SmoothQuant: share of the activations' range that goes to the weights
    activations       a scale for every block of channels of a token, for every token, or constant ones that were measured: one
                      for each layer, or one for its rows of text and one for those of pictures
    high_fraction     ResQ: channels in 8 bits
    dtype             of the weights with method `none`; None: as stored
    head              bits of the head, or of the embedding of a model that embeds texts; 16: as stored; None: measured for a
                      head where there is calibration text, else 8
    vision_bits, vision_activation_bits
                      of a vision tower; 16: weights as stored, activations as they are; None: 8
    calibration       a UTF-8 text file; "built-in": the built-in text; a folder with pictures and samples.jsonl; None: the
                      built-in text where the method needs one, else nothing is measured
    calibration_rows, calibration_length
                      at most so many rows of so many tokens of it; None: 64 of 512, or as many tokens as the model takes; 128
                      samples with pictures, as long as they are
    budget            what the allocation may take; the codec of every part is then chosen by measurement
    allocation        part (edgeq.converters.budget.parts) -> name of its codec, instead of one codec for all
    pooling           "last", "mean" or "cls": the checkpoint embeds texts so, where it does not say that itself
    rerank            "qwen3": the checkpoint is a decoder that ranks documents, which it reads in this model's prompt
    draft_head        tokens that a layer which drafts proposes, those that texts have most, or 0: all; None: 32,768 where the
                      vocabulary has at least twice as many
    merge_lora        folder of a LoRA adapter whose products are added to the weights before anything else
    tokenizer         folder whose tokenizer.json is taken in place of the one that a GGUF file describes
    mmproj            GGUF file of the vision tower of one
    device            where the calibration text runs; None: auto, a GPU where torch finds one
    restart           discard an interrupted conversion instead of resuming it
    force             replace an .edgeq file that was made in another way
    token, revision, offline   for hub ids, as in huggingface_hub

    InputError: a value out of range.  `edgeq.converters.planning.method_options` refuses what the method has no use for.
    """

    method: str = ""
    bits: int | None = None
    activation_bits: int | None = None
    kv_bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    half: bool | None = None
    table: bool | None = None
    trellis: bool | None = None
    scale_bits: Literal[4, 16] | None = None
    act_order: bool | None = None
    tune: bool | None = None
    gptq: bool | None = None
    split_row: bool | None = None
    rotate: bool | Literal["auto"] | None = None
    rank: int | None = None
    master: Literal["i8", "bf16"] | None = None
    alpha: float | None = None
    activations: Literal["block", "token", "static", "modality"] | None = None
    high_fraction: float | None = None
    dtype: Literal["f32", "f16", "bf16"] | None = None
    head: HeadBits | None = None
    vision_bits: int | None = None
    vision_activation_bits: int | None = None
    calibration: Path | Literal["built-in"] | None = None
    calibration_rows: int | None = None
    calibration_length: int | None = None
    budget: Budget | None = None
    allocation: Mapping[str, str] | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    rerank: Literal["qwen3"] | None = None
    draft_head: int | None = None
    merge_lora: Path | None = None
    tokenizer: Path | None = None
    mmproj: Path | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    restart: bool = False
    force: bool = False
    token: str | None = None
    revision: str | None = None
    offline: bool = False
    open_method: bool = False

    def __post_init__(self) -> None:
        if not self.method:
            chosen = self.budget is not None or self.allocation is not None
            object.__setattr__(self, "open_method", True)
            object.__setattr__(self, "method", BEST if chosen or self.calibration else "rtn")
        for name, value in asdict(self).items():
            if value is not None:
                _check(name, value)

    def of_method(self) -> dict[str, object]:
        """The options given that only some methods have a use for."""
        return {key: value for key, value in asdict(self).items() if key not in EVERY_METHOD and value is not None}

    def completed(self, defaults: Mapping[str, Any]) -> ConvertOptions:
        """These options, with the value of `defaults` for each that is not given."""
        missing = {key: value for key, value in defaults.items() if getattr(self, key) is None}
        return replace(self, **missing)

    def recorded(self) -> dict[str, object]:
        """The options that decide what is in the file."""
        alone = ("symmetric",) if self.half or self.table or self.trellis else ()
        chosen = ONE_CODEC if self.allocation is not None or self.budget is not None else alone
        return {key: value for key, value in asdict(self).items() if key not in (*NOT_RECORDED, *chosen) and value is not None}


def spelled(name: str) -> str:
    """An option as it is called on the command line."""
    if name in NAMES:
        return NAMES[name]
    return CHOICES[name][0] if name in CHOICES else RANGES[name][0] if name in RANGES else f"--{name}"


def _check(name: str, value: Any) -> None:
    """InputError: the option cannot have this value with any method."""
    if name in CHOICES and value not in CHOICES[name][1]:
        shown = UNITS.get(name, spelled(name) + " {!r}").format(value)
        known = ["row" if name == "group_size" and x == 0 else str(x) for x in CHOICES[name][1]]
        raise InputError(f"{shown}: not supported; choose {'2 to 8' if name == 'bits' else ', '.join(known)}")
    if name in RANGES and not RANGES[name][1] <= value <= RANGES[name][2]:
        raise InputError(f"{spelled(name)} {value}: choose {RANGES[name][1]} to {RANGES[name][2]}")
