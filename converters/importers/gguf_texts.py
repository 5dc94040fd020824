"""The text files of a checkpoint from the metadata of a GGUF file: tokenizer, chat template, defaults of generation.

Nothing but the metadata is needed: a device that has neither torch nor transformers converts such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.converters.checkpoint.sentence_transformers import MODULES
from edgeq.converters.checkpoint.tokenizer import MAX_TEMPLATE
from edgeq.converters.importers.gguf_tokenizers import post_processor, tokenizer_json
from edgeq.converters.importers.gguf_vocabulary import (
    CONTROL,
    PREFIX,
    UNUSED,
    USER_DEFINED,
    GgufVocabulary,
    read_vocabulary,
)
from edgeq.errors import CheckpointError, FormatError
from edgeq.format.safetensors import read_file
from edgeq.text import foreign_tokenizer
from edgeq.text.foreign_tokenizer import MAX_TOKENIZER

TOKENIZER = "tokenizer.json"
POOLING_FOLDER = "1_Pooling"
ENDS_OF_TURN = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>", "<|end|>"),
    *("<end_of_turn>", "<eos>"),
)
"""Control tokens that end an answer in published models: many files name but one of theirs."""
SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Key of generation_config.json -> key of a GGUF file, after `general.sampling.`."""


PLACING = """\
{%- set seen = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is sequence and message['content'] is not string -%}
{%- set read = namespace(text='') -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{%- set read.text = read.text + PICTURE -%}
{%- elif part['type'] == 'text' -%}
{%- set read.text = read.text + part['text'] -%}
{%- endif -%}
{%- endfor -%}
{%- set message = dict(message, content=read.text) -%}
{%- endif -%}
{%- set seen.messages = seen.messages + [message] -%}
{%- endfor -%}
{%- set messages = seen.messages %}"""
"""What comes before a template of texts: the parts of a message become one text, with PICTURE for each picture."""


def write_texts(metadata: Mapping[str, Any], folder: Path, given: Path | None = None, picture: str = "") -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and, where there is one, chat_template.jinja.

    metadata   keys as in the file; strings as str, arrays as lists or numpy arrays
    given      a folder whose tokenizer.json is taken in place of one made of the metadata
    picture    what a prompt has for a picture: a template that does not have it is given it as a part of the text.
               Empty: every template is as it is

    CheckpointError: a tokenizer that is not supported, or metadata that do not fit together; the key is named.  No tokenizer in
    `given`, or one of another vocabulary.
    """
    vocabulary = read_vocabulary(metadata)
    tokenizer = tokenizer_json(metadata, vocabulary) if given is None else _given(given, metadata, vocabulary)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    names |= {"cls": "cls_token", "seperator": "sep_token", "mask": "mask_token"}
    settings = {name: literal for key, name in names.items() if (literal := vocabulary.literal(key)) is not None}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        written = _template(template)
        if picture and picture.strip().encode() not in written:
            written = PLACING.replace("PICTURE", json.dumps(picture)).encode() + written
        (folder / "chat_template.jinja").write_bytes(written)
    _write(folder / TOKENIZER, tokenizer)
    _write(folder / "tokenizer_config.json", {**kind, **settings})
    _write(folder / "generation_config.json", _generation(metadata, vocabulary))


def write_pooling(kind: str, folder: Path) -> None:
    """Write what sentence-transformers has beside a checkpoint that embeds texts.

    kind   "last", "mean" or "cls"; vectors are divided by their length, as llama.cpp gives them
    """
    modules = [("Transformer", ""), ("Pooling", POOLING_FOLDER), ("Normalize", "2_Normalize")]
    listed = [{"type": f"sentence_transformers.models.{module}", "path": path} for module, path in modules]
    (folder / MODULES).write_text(json.dumps(listed), encoding="utf-8")
    (folder / POOLING_FOLDER).mkdir()
    _write(folder / POOLING_FOLDER / "config.json", {"pooling_mode": "lasttoken" if kind == "last" else kind})


def _given(folder: Path, metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The tokenizer of `folder`, which begins and ends a text as the metadata say, where they say it.

    CheckpointError: there is none, it cannot be loaded, or it has another token than the file.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no {TOKENIZER}; --tokenizer takes the folder of the checkpoint that the file was made of"
        )
    data = read_file(path, MAX_TOKENIZER)
    try:
        own = foreign_tokenizer.load(data).tokenizer
    except FormatError as error:
        raise CheckpointError(f"{path}: the tokenizers library cannot load it: {error}") from None
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        # llama.cpp's converter spells the others in its own way, and fills gaps with some.
        if kind not in (USER_DEFINED, UNUSED) and (found := own.id_to_token(i)) != token:
            raise CheckpointError(
                f"{path}: token {i} is {found!r:.80}, in the GGUF file {token!r:.80}: they do not belong together; give the "
                "folder of the checkpoint that the file was made of"
            )
    tokenizer: dict[str, Any] = json.loads(data)
    if any(f"{PREFIX}add_{end}_token" in metadata for end in ("bos", "eos")):
        tokenizer["post_processor"] = post_processor(metadata, vocabulary, add_bos=False)
    return tokenizer


def _template(template: Any) -> bytes:
    if isinstance(template, str) and len(template) <= MAX_TEMPLATE:
        try:
            return template.encode()
        except UnicodeEncodeError:
            pass
    raise CheckpointError(f"tokenizer.chat_template is not text of at most {MAX_TEMPLATE} characters")


def _generation(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Token ids that begin, pad and end a text, and what the file recommends for sampling."""
    ids = vocabulary.ids
    known = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    by_name = [i for i, (token, kind) in enumerate(known) if token in ENDS_OF_TURN and kind in (CONTROL, USER_DEFINED)]
    ends = dict.fromkeys([*(ids[name] for name in ("eos", "eot", "eom") if name in ids), *by_name])
    generation: dict[str, Any] = {"eos_token_id": list(ends)}
    generation |= {f"{key}_token_id": ids[name] for key, name in (("bos", "bos"), ("pad", "padding")) if name in ids}
    for key, name in SAMPLING_KEYS.items():
        value = metadata.get(f"general.sampling.{name}")
        if value is None:
            continue
        if type(value) not in (int, float):
            raise CheckpointError(f"general.sampling.{name} is {value!r:.80}; expected a number")
        generation[key] = value
    return generation


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
