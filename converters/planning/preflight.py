"""Everything that can be refused before a weight is read; what passes becomes a plan.

`preflight` reads text files and tensor headers.  `edgeq.converters.convert` carries the plan out.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeq.converters.budget.parts import checked
from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.compute import chosen as chosen_compute
from edgeq.converters.checkpoint.download import HubAccess, OnDownload
from edgeq.converters.checkpoint.sentence_transformers import embedding_settings
from edgeq.converters.checkpoint.source import CheckpointSource
from edgeq.converters.checkpoint.tokenizer import TextAssets, read_text
from edgeq.converters.families import Family
from edgeq.converters.families.network import described, open_tensors
from edgeq.converters.families.ranking import PROMPTS, answering, answering_pooling, check_ranking
from edgeq.converters.importers import open_source
from edgeq.converters.method import Method
from edgeq.converters.methods import METHODS, TOWERS, chosen
from edgeq.converters.methods.as_stored import AsStored
from edgeq.converters.planning.draft_tokens import drafted_tokens
from edgeq.converters.planning.options import ConvertOptions, spelled
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.errors import InputError, ResourceError, UnsupportedError
from edgeq.network.config import ModelConfig
from edgeq.network.rope import frequencies
from edgeq.system.machine import available_bytes

if TYPE_CHECKING:
    from edgeq.converters.calibration.dataset import Calibration
    from edgeq.converters.calibration.samples import PictureSamples

TAKES_OTHERS = ("none", "as-stored", "rtn", "awq", "gptq", "awq+gptq")
"""Methods that convert layers with a state in place of attention, and layers whose heads differ."""
ROTATED = ("quarot", "resq", "mquant")
EXPERTS = ("awq", "gptq", "awq+gptq", "ttq")
"""Methods that take the expert of a policy too; it is rounded to nearest by the others."""
VISION_BITS = 8
"""Bits of weights and activations of a vision tower where no option says otherwise."""


def preflight(
    source: str, options: ConvertOptions, on_download: OnDownload = lambda done, total, label: None
) -> ConversionPlan:
    """Everything that can be refused before a weight is read; `on_download`: as in HubAccess, where the source is a hub id.

    ResourceError: too little memory.  Other errors: as `open_source` and `planned`.
    """
    access = HubAccess(options.token, options.revision, options.offline, on_download)
    plan = planned(open_source(source, access, options.tokenizer, options.mmproj), options)
    available = available_bytes()
    if plan.memory_bytes > available:
        less = "--method rtn without --calibration needs less"
        raise ResourceError(
            f"{source}: converting needs {plan.memory_bytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; "
            + (less if plan.calibration else "close other programs or use a larger machine")
        )
    return plan


def planned(source: CheckpointSource, options: ConvertOptions) -> ConversionPlan:
    """The plan for an opened source.

    UnsupportedError: the model has something this version does not run, by key.  CheckpointError: files missing or damaged.
    InputError: the calibration text.
    """
    family, config, prompts = _described(source, options)
    for rope, size in {(config.layer_rope(i), config.heads_of(i).head_dim) for i in range(config.num_hidden_layers)}:
        if rope is not None:
            # Refuses what could not be run.
            frequencies(rope, size)
    pairs, template = config.pooling is not None and config.pooling.ranks, family.description.template
    text = read_text(source, config.vocab_size, prompts, pairs=pairs and not options.rerank, template=template)
    if options.rerank:
        family = answering(family, text, source.config)
    if options.open_method and source.quantized and not options.of_method():
        options = replace(options, method=AsStored.name)
    # Checked against the parts of the model when they are known.
    allocation, options = options.allocation, replace(options, allocation=None if options.allocation is None else {})
    kind = chosen(options)
    _check_layers(kind.name, options, config)
    _check_policy(kind.name, options, config)
    method = kind(options, family, config)
    _check_pooling(method)
    tower = _tower(options, family)
    _check_pictures(method, tower)
    rows = _calibration(method, text)
    checkpoint = open_tensors(source, family, options.merge_lora)
    plan = ConversionPlan(
        options, checkpoint, method, tower, text, rows, draft=_draft(method), draft_tokens=_draft_tokens(options, config, text)
    )
    if allocation is not None:
        plan = plan.with_options(replace(options, allocation=checked(allocation, plan.parts())))
    return replace(plan, compute=_compute(plan))


def _described(source: CheckpointSource, options: ConvertOptions) -> tuple[Family, ModelConfig, dict[str, object] | None]:
    """The family and the network, and `generation` entries of its prompts; None: it continues texts.

    Errors: as `planned`.
    """
    check_ranking(source.config, options.rerank, str(source.place))
    if options.rerank:
        if options.pooling:
            raise InputError(f"--pooling {options.pooling}: a model that ranks documents gives no vectors; leave it out")
        family, config = described(source, answering_pooling(source.config))
        return family, config, {"ranking_prompt": asdict(PROMPTS[options.rerank])}
    embeds = embedding_settings(source, options.pooling)
    family, config = described(source, embeds.pooling if embeds else None)
    return family, config, embeds.prompts if embeds else {} if config.pooling else None


def _check_layers(method: str, options: ConvertOptions, config: ModelConfig) -> None:
    """UnsupportedError: the method takes every layer to have attention like the others, and some have none, or other heads."""
    others: dict[str, object] = {"convolutions": config.conv_layers, "a gated delta net": config.delta_net}
    others["a state space"] = config.ssd
    others["heads of several kinds"] = not config.alike
    kind = next((name for name, found in others.items() if found), None)
    if kind and method not in TAKES_OTHERS:
        raise UnsupportedError(
            f"--method {method}: this model ({config.model_type}) has layers of {kind}; supported: {', '.join(TAKES_OTHERS)}"
        )
    measured = options.budget is not None or options.allocation is not None
    if measured and (config.num_kv_shared_layers or config.hidden_size_per_layer_input):
        raise UnsupportedError(
            f"{spelled('budget' if options.budget is not None else 'allocation')}: layers of this model ({config.model_type}) "
            "read keys and values of others, or rows of their own, through which nothing is measured yet; give --bits as an "
            "integer"
        )


def _check_policy(method: str, options: ConvertOptions, config: ModelConfig) -> None:
    """UnsupportedError: the method changes the values that the decoder keeps, which an expert reads as they were."""
    rotates = "--rotate" if options.rotate else f"--method {method}" if method in ROTATED else None
    if rotates and config.policy is not None:
        raise UnsupportedError(
            f"{rotates}: the expert of this policy ({config.model_type}) reads the decoder's values, which are rotated; "
            f"supported without --rotate: {', '.join(name for name in METHODS if name not in ROTATED)}"
        )


def _check_pooling(method: Method) -> None:
    """UnsupportedError: the method, or a budget, is for models that continue texts, and this one embeds them."""
    options = method.options
    if method.config.pooling is None:
        return
    if not method.pools:
        able = ", ".join(name for name, each in METHODS.items() if each.pools)
        raise UnsupportedError(
            f"--method {method.name}: this model embeds texts, and the method changes what its last norm gives, or what comes "
            f"after a prompt; supported: {able}"
        )
    if options.budget is not None or options.allocation is not None:
        raise UnsupportedError(
            f"{spelled('budget' if options.budget is not None else 'allocation')} goes by the divergence at the logits, and "
            "this model, which embeds texts, has none; give --bits as an integer"
        )


def _check_pictures(method: Method, tower: Method | None) -> None:
    """InputError, UnsupportedError: something would be measured on pictures, or as constant scales, and cannot be."""
    options, kind = method.options, f"--activations {method.options.activations}"
    if not (method.scales or (tower and tower.calibrates)):
        return
    if method.scales and (method.config.num_experts or options.activation_bits == 16):
        experts = "experts have no constant scales; leave it out"
        bits = "activations of 16 bits have no constant scales; choose 4, 6 or 8 with --bits W/A"
        raise UnsupportedError(f"{kind}: {experts if method.config.num_experts else bits}")
    pictures = isinstance(options.calibration, Path) and options.calibration.is_dir()
    if method.config.vision and not pictures:
        what = kind if method.scales else f"--method {method.name}"
        raise InputError(
            f"{what} needs calibration pictures for a model that reads pictures: give --calibration DIR, a folder with "
            "pictures and samples.jsonl, a line with image, question and answer for each"
        )
    if options.activations == "modality" and not method.config.vision:
        raise InputError(f"{kind}: this model ({method.config.model_type}) reads text alone; choose static")


def _calibration(method: Method, text: TextAssets) -> Calibration | PictureSamples | None:
    """The calibration text or samples, where the method or the options want some."""
    options, longest = method.options, method.config.max_position_embeddings
    if not (method.calibrates or method.studies or options.calibration):
        return None
    from edgeq.converters.calibration.dataset import MAX_ROWS, ROW_TOKENS, calibration
    from edgeq.converters.calibration.samples import read_samples

    if isinstance(options.calibration, Path) and options.calibration.is_dir():
        # The allocation may still be empty here.
        allocates, auto = options.budget is not None or options.allocation is not None, options.rotate == "auto"
        if options.calibration_length or allocates or auto:
            given = "--calibration-length" if options.calibration_length else "--auto-rotate" if auto else "a budget or a plan"
            raise InputError(f"{given} goes with a calibration text, and {options.calibration} is a folder; leave one out")
        if options.tune:
            raise InputError(f"--tune goes with a calibration text, and {options.calibration} is a folder; leave one out")
        if method.studies:
            raise InputError(
                f"--method {method.name} calibrates with a text, and {options.calibration} is a folder; give a file"
            )
        return read_samples(options.calibration, method.config, text, options.calibration_rows)
    if (options.calibration_length or 0) > longest:
        raise InputError(f"--calibration-length {options.calibration_length}: this model takes at most {longest} tokens")
    length = options.calibration_length or min(ROW_TOKENS, longest)
    path = None if options.calibration == "built-in" else options.calibration
    return calibration(path, text, length, options.calibration_rows or MAX_ROWS)


def _compute(plan: ConversionPlan) -> Compute:
    """Where the calibration text runs.  InputError: the device that the options name is not here."""

    if plan.calibration is None:
        # Nothing runs; a device that is not there is refused all the same.
        if plan.options.device not in (None, "auto", "cpu"):
            chosen_compute(plan.options.device, lambda rows: 0)
        return Compute()
    from edgeq.converters.calibration.samples import PictureSamples

    if isinstance(plan.calibration, PictureSamples):
        asked = plan.options.device not in (None, "auto", "cpu")
        return Compute(note="calibration pictures run on the CPU" if asked else None)
    return chosen_compute(plan.options.device or "auto", plan.device_bytes)


def _tower(options: ConvertOptions, family: Family) -> Method | None:
    """What is done to the vision tower: rounding, or nothing where the decoder stays as it is too.

    InputError: options for a tower, but the model has none, or none that could round its inputs.
    """
    if family.tower is None:
        if options.vision_bits is not None or options.vision_activation_bits is not None:
            raise InputError(f"--vision-bits: {family.architecture} reads text alone; leave it out")
        return None
    if options.vision_bits == 16 and options.vision_activation_bits == 8:
        raise InputError(
            "--vision-bits 16/8: weights in 16 bits multiply activations as they are; choose 16, or 2 to 8 bits of weights"
        )
    bits, activation_bits = options.vision_bits or VISION_BITS, options.vision_activation_bits or VISION_BITS
    if options.method in ("none", AsStored.name):
        chosen_for_tower = ConvertOptions(method=options.method, dtype=options.dtype)
    elif bits == 16:
        chosen_for_tower = ConvertOptions(method="none", dtype=options.dtype)
    elif options.method in TOWERS:
        chosen_for_tower = replace(options, bits=bits, activation_bits=activation_bits, head=None, kv_bits=None)
        return TOWERS[options.method](chosen_for_tower, family.tower, family.tower.config)
    else:
        # Ablations of activations are of the whole model: their tower has the groups of the decoder, too.
        kind = options.activations if activation_bits < 16 else None
        chosen_for_tower = ConvertOptions(method="rtn", bits=bits, activation_bits=activation_bits)
        if kind:
            kind = "static" if kind == "modality" else kind
            chosen_for_tower = replace(
                chosen_for_tower, activations=kind, group_size=options.group_size, symmetric=options.symmetric
            )
        elif bits == VISION_BITS and activation_bits == VISION_BITS:
            # Without a scale inside a row products add integers over the whole row; of 8 bits that loses nothing measurable.
            chosen_for_tower = replace(chosen_for_tower, activations="token", group_size=0, symmetric=True)
    return chosen(chosen_for_tower)(chosen_for_tower, family.tower, family.tower.config)


def _draft(method: Method) -> Method | None:
    """What is done to the layer that drafts, or to the expert of a policy, in the codec of the decoder's layers: rounding to
    nearest, as what the first gives is checked, or the decoder's method where that takes experts too; or nothing where the
    decoder stays as it is."""
    family, options = method.family.draft or method.family.policy, method.options
    if family is None:
        return None
    if options.bits is None:
        mine = ConvertOptions(method=method.name, dtype=options.dtype)
    else:
        size = options.group_size if method.group_size_given else None
        grid = {key: getattr(options, key) for key in ("half", "table", "trellis", "scale_bits")}
        symmetric = None if any(grid.values()) else options.symmetric
        allocates, kind = options.budget is not None or options.allocation is not None, "rtn"
        if method.family.draft is None and options.method in EXPERTS and not allocates:
            kind, grid["act_order"] = options.method, options.act_order
            grid |= {"rank": options.rank, "master": options.master}
        mine = ConvertOptions(method=kind, bits=options.bits, group_size=size, symmetric=symmetric, **grid)
    return chosen(mine)(mine, family, family.config)


def _draft_tokens(options: ConvertOptions, config: ModelConfig, text: TextAssets) -> tuple[int, ...]:
    """InputError: --draft-head without a layer that drafts."""
    if config.draft_layers:
        return drafted_tokens(text, config.vocab_size, options.draft_head)
    if options.draft_head is not None:
        raise InputError("--draft-head: the checkpoint has no layer that drafts tokens; leave it out")
    return ()


def check_disk(plan: ConversionPlan, output: Path, written: int) -> None:
    """ResourceError unless the file, of which `written` bytes are there, fits where it will be written."""
    folder = output.parent
    free = shutil.disk_usage(folder).free
    if plan.output_bytes > free + written:
        raise ResourceError(
            f"{output}: needs {plan.output_bytes / 1e6:.0f} MB, {folder} has {(free + written) / 1e6:.0f} MB free; "
            "free some space, choose fewer bits or another disk"
        )
