"""`edgeq.convert`: a conversion as one call with the options of the command line as keywords.

torch is imported when it is called, after the options are checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from edgeq.converters.budget.budget import Budget
from edgeq.converters.planning.method_options import check_method_options
from edgeq.converters.planning.options import ConvertOptions, HeadBits
from edgeq.converters.planning.output import check_output
from edgeq.errors import InputError
from edgeq.format.container import ModelFile

if TYPE_CHECKING:
    from edgeq.converters.running.layer_report import LayerReport

EXTRA = ("torch", "transformers", "safetensors", "huggingface_hub")
"""What the extra `convert` installs."""


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    method: str | None = None,
    bits: int | str | None = None,
    vision_bits: int | str | None = None,
    group_size: int | Literal["row"] | None = None,
    symmetric: bool | None = None,
    half: bool | None = None,
    table: bool | None = None,
    trellis: bool | None = None,
    scale_bits: Literal[4, 16] | None = None,
    head: HeadBits | None = None,
    dtype: Literal["f32", "f16", "bf16"] | None = None,
    act_order: bool | None = None,
    tune: bool | None = None,
    gptq: bool | None = None,
    split_row: bool | None = None,
    rank: int | None = None,
    master: Literal["i8", "bf16"] | None = None,
    alpha: float | None = None,
    rotate: bool | Literal["auto"] | None = None,
    activations: Literal["block", "token", "static", "modality"] | None = None,
    high_fraction: float | None = None,
    calibration: str | os.PathLike[str] | None = None,
    calibration_rows: int | None = None,
    calibration_length: int | None = None,
    budget: Budget | None = None,
    allocation: Mapping[str, str] | None = None,
    pooling: Literal["last", "mean", "cls"] | None = None,
    rerank: Literal["qwen3"] | None = None,
    draft_head: int | None = None,
    merge_lora: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None,
    restart: bool = False,
    force: bool = False,
    token: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    on_progress: Callable[[float, float, str], None] | None = None,
    on_layer: Callable[[LayerReport], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> ModelFile:
    """Convert a Hugging Face checkpoint into an .edgeq file; returns the finished file, verified.

    Killed at any moment and called again with the same arguments, and as many threads of torch (OMP_NUM_THREADS), it goes on
    where it stopped and ends in the same bytes.  A finished file of the same conversion is verified and returned.

    method        None: "rtn"; "gptq" with `calibration`, `budget` or `allocation`
    source        a folder, or a hub id such as "Qwen/Qwen3-0.6B"
    output        the file to write; what is no .edgeq file is never replaced, another one only with `force`
    bits          of weights, or "W/A" or "W/A/KV" with those of activations and of cached keys and values, such as "4/8"
    vision_bits   of the weights of a vision tower, or "W/A"
    group_size    input channels that share a scale: 16, 32, 64, 128 or "row" for all of them
    budget        what the file may take at most, such as Budget("read", 2.4e6): the codec of each part follows from it
    allocation    part -> codec, by hand or as another run found it
    calibration   a UTF-8 text file, "built-in", or a folder with pictures and samples.jsonl
    pooling       how a text becomes a vector, where the checkpoint of an embedding model does not say that itself
    rerank        "qwen3": a decoder that ranks documents, which it reads in the prompt of Qwen3-Reranker
    draft_head    tokens that a layer which drafts proposes, or 0: all of the vocabulary
    merge_lora    the folder of a LoRA adapter, which is added to the weights first
    tokenizer     the folder of a tokenizer.json in place of the one that a GGUF file describes
    mmproj        the GGUF file of the vision tower, where `source` is a GGUF file
    device        where the calibration text runs; None: a GPU where torch finds one
    rotate        "auto": measured, whether less is lost
    on_progress   takes (work done, all work, label); the label changes when a stage ends
    on_layer      takes a report when a decoder layer is safe on the disk: its index, bits and error
    warn          takes a line that the user should read

    The other keywords are the options of `edgeq convert` and of edgeq.converters.planning.options.ConvertOptions; None takes
    the default of the method.

    InputError: an option, the place of the output, or the extra `convert` is not installed.  CheckpointError, UnsupportedError:
    the checkpoint.  ResourceError: too little memory or disk; what is written stays for the next call.
    """
    path = Path(output)
    options = ConvertOptions(
        method=method or "",
        **_bits("bits", bits, ("bits", "activation_bits", "kv_bits")),
        **_bits("vision_bits", vision_bits, ("vision_bits", "vision_activation_bits")),
        group_size=0 if group_size == "row" else group_size,
        symmetric=symmetric,
        half=half,
        table=table,
        trellis=trellis,
        scale_bits=scale_bits,
        act_order=act_order,
        tune=tune,
        gptq=gptq,
        split_row=split_row,
        rank=rank,
        master=master,
        alpha=alpha,
        rotate=rotate,
        activations=activations,
        high_fraction=high_fraction,
        dtype=dtype,
        head=head,
        calibration=_text(calibration),
        calibration_rows=calibration_rows,
        calibration_length=calibration_length,
        budget=budget,
        allocation=allocation,
        pooling=pooling,
        rerank=rerank,
        draft_head=draft_head,
        merge_lora=None if merge_lora is None else Path(merge_lora),
        tokenizer=None if tokenizer is None else Path(tokenizer),
        mmproj=None if mmproj is None else Path(mmproj),
        device=device,
        restart=restart,
        force=force,
        token=token,
        revision=revision,
        offline=offline,
    )
    check_method_options(options)
    check_output(os.fspath(source), path)
    try:
        from edgeq.converters.convert import carry_out, preflight

        plan = preflight(os.fspath(source), options, on_progress or _ignore)
        if rotate == "auto":
            from edgeq.converters.probing.rotation_choice import choose_rotation

            plan = choose_rotation(plan, on_progress or _ignore, warn or _ignore)
        if budget is not None:
            from edgeq.converters.probing.allocate import allocate

            plan = allocate(plan, on_progress or _ignore, warn or _ignore).plan
        return carry_out(plan, path, on_progress or _ignore, warn or _ignore, on_layer or _ignore).file
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise InputError(f'edgeq.convert needs {error.name}, which is not installed: pip install "edgeq[convert]"') from None


def _bits(name: str, bits: int | str | None, fields: tuple[str, ...]) -> dict[str, Any]:
    """The fields of ConvertOptions that "W/A/KV" gives.  InputError: it is not of this form."""
    parts = [] if bits is None else str(bits).split("/")
    if isinstance(bits, bool) or len(parts) > len(fields) or not all(part.isdecimal() and len(part) < 3 for part in parts):
        form = "/".join(("W", "A", "KV")[: len(fields)])
        raise InputError(f'`{name}` is {bits!r}; expected a number of bits, or several as "{form}", such as "4/8"')
    return dict(zip(fields, map(int, parts), strict=False))


def _text(calibration: str | os.PathLike[str] | None) -> Path | Literal["built-in"] | None:
    if calibration is None or calibration == "built-in":
        return cast(Literal["built-in"] | None, calibration)
    return Path(calibration)


def _ignore(*values: object) -> None:
    """A callback that does nothing."""
