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
from edgeq.network.pooling import MAX_DENSE, DenseLayer, EmbeddingPrompts, Pooling

MODULES = "modules.json"
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
KINDS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
"""What sentence-transformers calls a pooling -> what a file does."""
SETTINGS_FILES = "config_sentence_transformers.json", "sentence_bert_config.json"
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh"}
"""torch's classes of what a Dense module does after its product."""
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


def dense_folders(folder: Path) -> list[Path]:
    """The folders of the Dense modules of a checkpoint, in their order.  Errors as `embedding_settings`."""
    if not (folder / MODULES).exists():
        return []
    return [_inside(folder, module) for kind, module in _modules(folder) if kind == "Dense"]


def _modules(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The kinds of the modules, and what is said of each."""
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
    after = kinds[2:-1] if kinds[-1:] == ["Normalize"] else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind != "Dense" for kind in after) or len(after) > MAX_DENSE:
        raise UnsupportedError(
            f"{path}: {', '.join(kinds)[:200]} are not supported; supported: Transformer, Pooling, at most {MAX_DENSE} Dense, "
            "Normalize"
        )
    if modules[0].get("path"):
        raise UnsupportedError(f"{path}: the transformer is in a folder {str(modules[0]['path'])[:40]!r}; supported: beside it")
    return list(zip(kinds, modules, strict=True))


def _inside(folder: Path, module: Mapping[str, Any]) -> Path:
    """The folder of a module.  CheckpointError: it is not one beside modules.json."""
    inside = module.get("path")
    # A path here could name any file of this machine.
    if not isinstance(inside, str) or not inside or Path(inside).name != inside or inside == "..":
        raise CheckpointError(
            f"{folder / MODULES}: a module has the path {str(inside)[:40]!r}, which is not a folder beside it"
        )
    return folder / inside


def _pooling(folder: Path, config: Mapping[str, Any]) -> Pooling:
    modules = _modules(folder)
    inside = _inside(folder, modules[1][1])
    settings = read_json(inside / "config.json")
    width = settings.get("word_embedding_dimension", settings.get("embedding_dimension"))
    if width is not None and width != config.get("hidden_size"):
        raise CheckpointError(f"{inside}: pools {width} channels; hidden_size in config.json is {config.get('hidden_size')}")
    kind = _kind(inside, settings)
    if kind == "mean" and settings.get("include_prompt") is False:
        raise UnsupportedError(f"{inside}: include_prompt is False; a mean without the instruction is not supported")
    dense, channels = list[DenseLayer](), config.get("hidden_size")
    for place in dense_folders(folder):
        dense.append(_dense(place, channels))
        channels = dense[-1].width
    return Pooling(kind, modules[-1][0] == "Normalize", tuple(dense))


def _dense(folder: Path, channels: object) -> DenseLayer:
    """A Dense module that reads so many channels."""
    settings = read_json(folder / "config.json")
    # "torch.nn.modules.activation.Tanh"
    name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    module, _, kind = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module.startswith("torch.nn.modules.") or kind not in ACTIVATIONS:
        raise UnsupportedError(
            f"{folder}: activation_function is {str(name)[:80]!r}; supported: {' and '.join(ACTIVATIONS)} of torch.nn"
        )
    if settings.get("in_features") != channels:
        raise CheckpointError(f"{folder}: in_features is {settings.get('in_features')!r:.40}; what it reads has {channels}")
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key, "sentence_embedding") != "sentence_embedding":
            raise UnsupportedError(f"{folder}: {key} is {settings[key]!r:.40}; supported: sentence_embedding")
    try:
        return DenseLayer(settings.get("out_features"), settings.get("bias", True), ACTIVATIONS[kind])  # type: ignore[arg-type]
    except FormatError as error:
        raise CheckpointError(f"{folder}: out_features, bias: {error}") from None


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
            f"{folder}: pooling {' and '.join(chosen)[:100] or 'of no kind'} is not supported; "
            "supported: lasttoken, mean, or cls"
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
