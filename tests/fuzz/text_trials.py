"""Chat templates and tokenizers that nobody would publish."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from mutation import changed_bytes, changed_json, refused

from edgeq.errors import EdgeqError
from edgeq.runtime.answers.tokenizer import TextStream
from edgeq.text.chat_template import ChatTemplate
from edgeq.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
TOKENIZER: dict[str, Any] = json.loads((ROOT / "models" / "tiny-llama" / "tokenizer.json").read_text(encoding="utf-8"))


def plain_text() -> Tokenizer:
    """The tokenizer that templates are tried with."""
    return Tokenizer(json.dumps(TOKENIZER), {"special_tokens": {"bos_token": "<|begin|>"}})


NAMES = ("messages", "messages[0].content", "n.s", "'ab'", "[1, 'x']", "{'a': 1}", "range(99999)", "7", "2.5", "bos_token")
SIZES = ("0", "3", "1000", "70000", "3000000000", "10**9", "-1")
FILTERS = tuple(
    [
        "length",
        "list",
        "upper",
        "trim",
        "tojson",
        "join",
        "string",
        "title",
        "urlize",
        "striptags",
        "sort",
        "unique",
        "first",
        "reverse",
        "sum",
        "items",
        "pprint",
        "escape",
        "forceescape",
        "wordcount",
        "xmlattr",
        "map('upper')",
        "tojson(indent={n})",
        "center({n})",
        "indent({n})",
        "batch({n})",
        "slice({n})",
        "truncate({n})",
        "wordwrap({n})",
        "replace('a','aa')",
    ]
)
METHODS = tuple(
    [
        "upper()",
        "split()",
        "center({n})",
        "zfill({n})",
        "ljust({n},'x')",
        "expandtabs({n})",
        "replace('','ab')",
        "format(1)",
        "items()",
        "append(1)",
        "__class__",
        "join(messages)",
        "encode()",
        "format_map({{}})",
        "startswith('a')",
    ]
)
OPERATORS = ("+", "~", "*", "%", "**", "-", "//", "and", "in", "==", "<")


def _expression(rng: random.Random, depth: int) -> str:
    if not depth:
        return rng.choice((*NAMES, *SIZES))
    inner = _expression(rng, depth - 1)
    match rng.randrange(5):
        case 0:
            return f"({inner}|{rng.choice(FILTERS).format(n=rng.choice(SIZES))})"
        case 1:
            return f"({inner}).{rng.choice(METHODS).format(n=rng.choice(SIZES))}"
        case 2:
            return f"({inner} {rng.choice(OPERATORS)} {_expression(rng, depth - 1)})"
        case 3:
            return f"[{inner}, {inner}]"
        case _:
            return inner


def _block(rng: random.Random, depth: int) -> str:
    if not depth:
        return f"{{{{ {_expression(rng, rng.randrange(5))} }}}}"
    inner = _block(rng, depth - 1)
    match rng.randrange(6):
        case 0:
            return f"{{% for i in {rng.choice(('messages', 'range(20)', 'range(99999)', 'n.s'))} %}}{inner}{{% endfor %}}"
        case 1:
            return f"{{% set n.s = {_expression(rng, rng.randrange(1, 4))} %}}{inner}"
        case 2:
            return f"{{% if {_expression(rng, 1)} %}}{inner}{{% else %}}{_block(rng, 0)}{{% endif %}}"
        case 3:
            return f"{{% macro f(x) %}}{inner}{{{{ f(x) if x }}}}{{% endmacro %}}{{{{ f({rng.choice(SIZES)}) }}}}"
        case 4:
            return f"{{% for i in range(40) %}}{{% set n.s = n.s {rng.choice('+~*')} n.s %}}{{% endfor %}}{inner}"
        case _:
            return inner + _block(rng, depth - 1)


def template(rng: random.Random, text: Tokenizer) -> str:
    source = f"{{% set n = namespace(s={rng.choice(NAMES)}) %}}{_block(rng, rng.randrange(1, 5))}"
    if rng.random() < 0.1:
        source = changed_bytes(rng, source.encode()).decode("utf-8", "replace")
    try:
        ChatTemplate(source, text).encode([{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}])
    except EdgeqError as error:
        return refused(error)
    return "rendered"


TEXTS = ("a", "aa", " ", "▁", "x" * 20, "a" * 1000, "", "é", "\0")
REGEXES = (r"\s+", " {2,}", "(a*)*b", "(x+x+)+y", "a{1,1000}{1,1000}", "(?<=a)b", "(", r"\p{L}+|\p{N}", "", ".")
TYPES = tuple(
    [
        "Replace",
        "Prepend",
        "Strip",
        "Split",
        "Metaspace",
        "ByteLevel",
        "Precompiled",
        "NFKD",
        "Lowercase",
        "Digits",
        "Fuse",
        "WordPiece",
        "CTC",
        "BPEDecoder",
        "FixedLength",
        "CharDelimiterSplit",
        "Punctuation",
        "TemplateProcessing",
        "Sequence",
    ]
)
CHARSMAPS = ("", "AAAA", "/" * 85 + "w==", "BAAAAP////8=")


def _part(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A normalizer, pre-tokenizer, post-processor or decoder with settings that may not be its own."""
    pattern = {"String": rng.choice(TEXTS)} if rng.random() < 0.5 else {"Regex": rng.choice(REGEXES)}
    items = [_part(rng, depth - 1) for _ in range(rng.choice((1, 2, 8, 70)))] if depth and rng.random() < 0.2 else []
    return {
        **{"type": rng.choice(TYPES), "pattern": pattern, "content": rng.choice(TEXTS), "prepend": rng.choice(TEXTS)},
        **{"behavior": "Isolated", "invert": False, "strip_left": True, "strip_right": True, "replacement": "▁"},
        **{"prepend_scheme": "always", "split": True, "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        **{"individual_digits": True, "length": rng.choice((0, 1, 5)), "delimiter": "a", "prefix": "##", "cleanup": True},
        **{"start": rng.choice((0, 1, 10**9)), "stop": rng.choice((0, 0, 1, 10**9)), "pad_token": "x", "suffix": "y"},
        **{"word_delimiter_token": "|", "precompiled_charsmap": rng.choice(CHARSMAPS), "single": [], "pair": []},
        **{"special_tokens": {}, "normalizers": items, "pretokenizers": items, "processors": items, "decoders": items},
    }


def tokenizer(rng: random.Random) -> str:
    """Parts that are exchanged, or any field of the file changed; then a prompt and random tokens."""
    data = dict(TOKENIZER)
    if rng.random() < 0.6:
        for where in rng.sample(("normalizer", "pre_tokenizer", "post_processor", "decoder"), rng.choice((1, 1, 2))):
            data[where] = _part(rng)
    else:
        data = changed_json(rng, data)
    source = json.dumps(data)
    if rng.random() < 0.1:
        source = changed_bytes(rng, source.encode()).decode("utf-8", "replace")
    try:
        text = Tokenizer(source, {})
        text.encode("a" * 40 + " naïve 日本 <|end|>" + "x" * 40)
        text.encode_plain("<|end|>")
        stream = TextStream(text)
        for _ in range(40):
            stream.push(rng.randrange(3000))
    except EdgeqError as error:
        return refused(error)
    return "encoded"
