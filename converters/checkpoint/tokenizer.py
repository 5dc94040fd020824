"""The tokenizer, chat template and generation defaults of a checkpoint, checked before any weight is read.

The runtime has only the `tokenizers` library; transformers may add to what is in tokenizer.json.  Both encode a sample here: a
beginning-of-sequence token that only transformers adds is recorded, any other difference is refused.  A source that wrote the
tokenizer itself has nothing to be compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from edgeq.converters.checkpoint.source import CheckpointSource
from edgeq.errors import CheckpointError, FormatError, UnsupportedError
from edgeq.format.safetensors import read_file, read_json
from edgeq.network.generation import SAMPLING, check_generation
from edgeq.text import foreign_tokenizer
from edgeq.text.foreign_tokenizer import MAX_TOKENIZER, SAMPLE, SafeTokenizer
from edgeq.text.template_tags import TAGS

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
NAMES = ("model_type", "model_name", "tokenizer_class")
"""Keys of config.json by which transformers finds a tokenizer's class."""
MAX_TEMPLATE = 1 << 20


@dataclass(frozen=True)
class TextAssets:
    """What the file holds of the tokenizer: blobs by name, and `generation` of the metadata."""

    blobs: dict[str, bytes]
    generation: dict[str, object]


def read_text(
    source: CheckpointSource,
    vocab_size: int,
    prompts: dict[str, object] | None = None,
    *,
    pairs: bool = False,
    template: str = "",
) -> TextAssets:
    """The tokenizer, the chat template and the defaults of generation in the checkpoint.

    prompts   entries of `generation` of a model that embeds texts, which transformers may also end with a token; None: of one
              that continues them
    pairs     the model reads pairs of texts
    template  the chat template where the checkpoint has none; empty: there is none

    UnsupportedError: a tokenizer that `tokenizers` cannot load or that transformers runs differently; its class is named.
    CheckpointError: more tokens than the embedding has rows; token ids, defaults of sampling or a template that cannot be used.
    """
    folder = source.texts
    settings = _optional_json(folder / "tokenizer_config.json")
    kind = str(settings.get("tokenizer_class", "unknown"))
    own, data = _load(folder, kind)
    if own.tokenizer.get_vocab_size() > vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {own.tokenizer.get_vocab_size()} tokens, the model {vocab_size}: "
            "they do not belong together; take both from the same checkpoint"
        )
    if source.texts_complete:
        special, add_bos, end = {name: settings.get(name) for name in SPECIAL}, False, None
    else:
        theirs, add_bos, end = _compare(
            folder, own, kind, prompts is not None, source.config if "tokenizer_class" in settings else None
        )
        if pairs:
            _compare_pairs(folder, own, theirs)
        special = {name: getattr(theirs, name, None) for name in SPECIAL}
    defaults = _optional_json(folder / "generation_config.json")
    generation: dict[str, object] = {
        "bos_token_id": _single_id(_first("bos_token_id", defaults, source.config)),
        "eos_token_ids": _ids(_first("eos_token_id", defaults, source.config)),
        "add_bos": add_bos,
        "special_tokens": special,
    }
    generation |= (prompts or {}) | ({} if end is None else {"end_token_id": end})
    generation.update({key: defaults[key] for key in SAMPLING if type(defaults.get(key)) in (int, float)})
    try:
        check_generation(generation)
    except FormatError as error:
        raise CheckpointError(f"{folder}: generation_config.json or config.json: {error}; correct it there") from None
    found = _chat_template(folder, settings) or template.encode()
    _check_template(folder, found)
    blobs = {"tokenizer.json": data}
    if found:
        blobs["chat_template"] = found
    return TextAssets(blobs, generation)


def _load(folder: Path, kind: str) -> tuple[SafeTokenizer, bytes]:
    """The fast tokenizer and its bytes."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UnsupportedError(
            f"{folder}: no tokenizer.json (tokenizer class {kind}); supported: tokenizers in the format of the tokenizers "
            "library.  Load it with transformers.AutoTokenizer and save_pretrained it into the folder"
        )
    data = read_file(path, MAX_TOKENIZER)
    try:
        return foreign_tokenizer.load(data), data
    except FormatError as error:
        raise UnsupportedError(f"{path}: the tokenizers library cannot load it (tokenizer class {kind}): {error}") from None


def _compare(
    folder: Path, own: SafeTokenizer, kind: str, embeds: bool, names: Mapping[str, Any] | None
) -> tuple[Any, bool, int | None]:
    """transformers' tokenizer of the folder, and what it adds that tokenizer.json does not: whether a beginning-of-sequence
    token, and, where a text is embedded and not continued, which token at its end.

    names     config.json, where its names are enough to find the tokenizer's class
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    # Where tokenizer_config.json names a class, of config.json no more than names are asked for; the configuration's own class
    # would import what a whole model needs (torch._dynamo, sympy): a third of the processor time of a conversion that rounds.
    settings: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        if names is not None:
            known = {key: names[key] for key in NAMES if key in names}
            settings["config"] = PreTrainedConfig(**known, name_or_path=str(folder))
        theirs = AutoTokenizer.from_pretrained(folder, **settings)
        wanted = list(theirs(SAMPLE)["input_ids"])
    # Whatever a foreign tokenizer class raises, the answer is the same.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"{folder}: transformers cannot load tokenizer class {kind}: {reason}") from None
    ours = own.encode(SAMPLE, add_special_tokens=True)
    for add_bos in (False, True):
        begun = [theirs.bos_token_id, *ours] if add_bos else ours
        if wanted == begun and None not in begun:
            return theirs, add_bos, None
        if embeds and theirs.eos_token_id is not None and wanted == [*begun, theirs.eos_token_id]:
            return theirs, add_bos, int(theirs.eos_token_id)
    raise UnsupportedError(
        f"{folder}: tokenizer class {type(theirs).__name__} gives {wanted[:8]}..., tokenizer.json alone gives {ours[:8]}...; "
        "supported: tokenizers whose tokenizer.json is complete, a beginning-of-sequence token apart"
    )


def _compare_pairs(folder: Path, own: SafeTokenizer, theirs: Any) -> None:
    """UnsupportedError: transformers puts other tokens around and between two texts, or counts them to other segments."""
    wanted = theirs(SAMPLE, "def g(): pass")
    ((ids, segments),) = own.encode_pairs([(SAMPLE, "def g(): pass")])
    if list(wanted["input_ids"]) != ids or list(wanted.get("token_type_ids", segments)) != segments:
        raise UnsupportedError(
            f"{folder}: of a pair of texts tokenizer class {type(theirs).__name__} gives {list(wanted['input_ids'])[:8]}..., "
            f"tokenizer.json alone {ids[:8]}...; supported: tokenizers whose tokenizer.json is complete"
        )


def _chat_template(folder: Path, settings: dict[str, Any]) -> bytes | None:
    """chat_template.jinja, or the template of tokenizer_config.json, of several the one named default, or chat_template.json,
    where processors kept it before transformers 5."""
    path = folder / "chat_template.jinja"
    if path.exists():
        # A link could put any text file of this user into the .edgeq.  The hub's cache links to blobs of the repository.
        blobs = folder.parent.parent / "blobs"
        if not any(path.resolve().is_relative_to(allowed.resolve()) for allowed in (folder, blobs)):
            raise CheckpointError(f"{path}: a link out of the checkpoint's folder; replace it by the file that is meant")
        # Line ends as transformers reads them.
        data = read_file(path, 4 * MAX_TEMPLATE).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    else:
        template = settings.get("chat_template")
        if isinstance(template, list):
            named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if template is None and (beside := folder / "chat_template.json").exists():
            template = read_json(beside).get("chat_template")
        if template is None:
            return None
        data = template.encode("utf-8", "surrogatepass") if isinstance(template, str) else b"\xff"
    try:
        if len(data.decode("utf-8")) <= MAX_TEMPLATE:
            return data
    except UnicodeDecodeError:
        pass
    raise CheckpointError(f"{folder}: the chat template is not text of at most {MAX_TEMPLATE} characters")


def _check_template(folder: Path, template: bytes | None) -> None:
    """CheckpointError: jinja2 cannot parse the template.  Nothing of it is run, nor compiled."""
    try:
        jinja2.Environment(extensions=TAGS).parse((template or b"").decode("utf-8"))
    except (jinja2.TemplateError, RecursionError) as error:
        raise CheckpointError(f"{folder}: the chat template cannot be read: {error}; correct or remove it") from None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _first(key: str, *sources: Mapping[str, Any]) -> Any:
    return next((source[key] for source in sources if source.get(key) is not None), None)


def _ids(value: Any) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise CheckpointError(f"token ids {str(value)[:80]} in generation_config.json or config.json are not integers")
    return ids


def _single_id(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None
