"""What sentence-transformers writes beside an embedding model: how a text's vector is made of its states, and instructions.

`modules.json` lists what runs after one another; the pooling has a folder of its own, instructions are in
`config_sentence_transformers.json`.  A checkpoint without them is an embedding model if the user says how it pools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.converters.checkpoint.source import CheckpointSource
from edgeq.errors import CheckpointError, FormatError, InputError, UnsupportedError
from edgeq.format.safetensors import read_file, read_json
from edgeq.network.pooling import EmbeddingPrompts, Pooling

MODULES = "modules.json"
SUPPORTED = ("Transformer", "Pooling", "Normalize")
KINDS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""What sentence-transformers calls a pooling -> what a file does."""
SETTINGS_FILES = "config_sentence_transformers.json", "sentence_bert_config.json"
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a checkpoint pools, and `generation` entries of its instructions."""

    pooling: Pooling
    prompts: dict[str, object]


def embedding_settings(source: CheckpointSource, asked: str | None) -> EmbeddingSettings | None:
    """None: it continues texts.  `asked`: how to pool, where the checkpoint does not say so.

    CheckpointError: a file that cannot be read.  UnsupportedError: a module or a pooling that edgeq does not run, by name.
    InputError: `asked` is not what the checkpoint says.
    """
    folder = source.texts
    if (folder / MODULES).exists():
        pooling = _pooling(folder, source.config)
        if asked is not None and asked != pooling.kind:
            raise InputError(f"--pooling {asked}: {folder / MODULES} says {pooling.kind}; leave it out")
    elif asked is not None:
        pooling = Pooling(asked, normalize=True)
    else:
        return None
    return EmbeddingSettings(pooling, _prompts(folder))


def _pooling(folder: Path, config: Mapping[str, Any]) -> Pooling:
    path = folder / MODULES
    try:
        modules = json.loads(read_file(path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}; download it again") from None
    if not isinstance(modules, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules):
        raise CheckpointError(f"{path}: not a list of modules with a type; download it again")
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    for module, kind in zip(modules, kinds, strict=True):
        if kind not in SUPPORTED or not module["type"].startswith("sentence_transformers."):
            raise UnsupportedError(
                f"{path}: module {module['type'][:100]} is not supported; supported: {', '.join(SUPPORTED)} of "
                "sentence_transformers"
            )
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedError(
            f"{path}: {', '.join(kinds)[:200]} are not supported; supported: Transformer, Pooling, Normalize"
        )
    if modules[0].get("path"):
        raise UnsupportedError(f"{path}: the transformer is in a folder {str(modules[0]['path'])[:40]!r}; supported: beside it")
    inside = modules[1].get("path")
    # A path here could name any file of this machine.
    if not isinstance(inside, str) or not inside or Path(inside).name != inside:
        raise CheckpointError(f"{path}: the pooling has the path {str(inside)[:40]!r}, which is not a folder beside it")
    settings = read_json(folder / inside / "config.json")
    width = settings.get("word_embedding_dimension", settings.get("embedding_dimension"))
    if width is not None and width != config.get("hidden_size"):
        raise CheckpointError(
            f"{folder / inside}: pools {width} channels; hidden_size in config.json is {config.get('hidden_size')}"
        )
    kind = _kind(folder / inside, settings)
    if kind == "mean" and settings.get("include_prompt") is False:
        raise UnsupportedError(f"{folder / inside}: include_prompt is False; a mean without the instruction is not supported")
    return Pooling(kind, "Normalize" in kinds)


def _kind(folder: Path, settings: dict[str, Any]) -> str:
    """The one pooling that is switched on."""
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        chosen = [named]
    elif isinstance(named, list):
        chosen = [str(each) for each in named]
    else:
        prefix = "pooling_mode_"
        chosen = [key.removeprefix(prefix) for key, value in settings.items() if key.startswith(prefix) and value is True]
    if len(chosen) != 1 or chosen[0] not in KINDS:
        raise UnsupportedError(
            f"{folder}: pooling {' and '.join(chosen)[:100] or 'of no kind'} is not supported; supported: lasttoken, or mean"
        )
    return KINDS[chosen[0]]


def _prompts(folder: Path) -> dict[str, object]:
    settings, tokens = (read_json(folder / name) if (folder / name).exists() else {} for name in SETTINGS_FILES)
    if settings.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise UnsupportedError(
            f"{folder / SETTINGS_FILES[0]}: model_type is {settings['model_type']!r:.60}; supported: SentenceTransformer, one "
            "dense vector for a text"
        )
    if tokens.get("do_lower_case"):
        raise UnsupportedError(
            f"{folder / SETTINGS_FILES[1]}: do_lower_case is {tokens['do_lower_case']!r:.40}; supported: False"
        )
    found: dict[str, object] = {"prompts": settings.get("prompts") or {}}
    if settings.get("default_prompt_name") is not None:
        found["default_prompt"] = settings["default_prompt_name"]
    try:
        EmbeddingPrompts.of(found)
    except FormatError as error:
        raise CheckpointError(f"{folder / SETTINGS_FILES[0]}: {error}") from None
    return found
