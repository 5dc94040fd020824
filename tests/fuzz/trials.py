"""What is tried: each trial makes one hostile input, gives it to edgeq and says how that went.

A trial returns a short outcome, such as "opened" or "refused".  It raises what edgeq should not have raised.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
from mutation import EDGES, VALUES, changed_bytes, changed_json

from edgeq.container import ModelFile
from edgeq.converters.checkpoint import read_header
from edgeq.converters.families import FAMILIES, recognise
from edgeq.errors import MAX_MESSAGE, EdgeqError
from edgeq.runtime.chat_template import ChatTemplate
from edgeq.runtime.tokenizer import Text, TextStream
from edgeq.schema import model_generated as fb
from edgeq.tools.inspect import collect
from edgeq.writer import Writer

TESTS = Path(__file__).parent.parent
sys.path.append(str(TESTS / "edgeq"))
from sample_file import seal, split, write_body  # noqa: E402

Trial = Callable[[random.Random], str]
TOKENIZER: dict[str, Any] = json.loads((TESTS.parent / "models" / "tiny-llama" / "tokenizer.json").read_text(encoding="utf-8"))


def trials(folder: Path) -> dict[str, Trial]:
    """Name -> trial; `folder` takes the files that they write."""
    sample = folder / "sample.edgeq"
    writer = Writer(sample)
    writer.finish(write_body(writer))
    whole = sample.read_bytes()
    text = Text(json.dumps(TOKENIZER), {"special_tokens": {"bos_token": "<|begin|>"}})
    return {
        "bytes": lambda rng: _bytes(rng, whole, folder / "bytes.edgeq"),
        "metadata": lambda rng: _metadata(rng, whole, folder / "metadata.edgeq"),
        "template": lambda rng: _template(rng, text),
        "tokenizer": _tokenizer,
        "config": _config,
        "header": lambda rng: _header(rng, folder / "header.safetensors"),
    }


def refused(error: EdgeqError) -> str:
    """The outcome of a refusal, whose message must be one printable line of bounded length."""
    message = str(error)
    assert message.isprintable() and 0 < len(message) <= MAX_MESSAGE + 300, f"message {message[:200]!r}"
    return "refused"


def _opened(path: Path) -> str:
    try:
        file = ModelFile.open(path)
        json.dumps(collect(file, False), allow_nan=False)
    except EdgeqError as error:
        return refused(error)
    return "opened"


def _bytes(rng: random.Random, whole: bytes, path: Path) -> str:
    """A file whose bytes are changed or cut; of one in four the metadata alone, with a right digest."""
    match rng.randrange(8):
        case 0:
            path.write_bytes(whole[: rng.randrange(len(whole))])
        case 1 | 2:
            data, metadata = split(whole)
            path.write_bytes(seal(data, changed_bytes(rng, metadata)))
        case _:
            path.write_bytes(changed_bytes(rng, whole))
    return _opened(path)


def _metadata(rng: random.Random, whole: bytes, path: Path) -> str:
    """A file whose metadata is well formed but for up to four fields, with a right digest."""
    data, metadata = split(whole)
    model = fb.ModelT.InitFromObj(fb.Model.GetRootAs(metadata, 0))
    for _ in range(rng.choice((1, 1, 2, 4))):
        _change_record(rng, model)
    builder = flatbuffers.Builder(1 << 14)
    try:
        builder.Finish(model.Pack(builder), file_identifier=b"EDGQ")
    except Exception:
        # flatbuffers' writer does not take what does not fit its field.
        return "not packable"
    path.write_bytes(seal(data, bytes(builder.Output())))
    return _opened(path)


def _change_record(rng: random.Random, record: Any) -> None:
    """Descend from `record` to a field and change it."""
    while True:
        name = rng.choice(list(vars(record)))
        value = getattr(record, name)
        if isinstance(value, (list, tuple)) and value and hasattr(value[0], "__dict__"):
            if rng.random() < 0.2:
                items = list(value)
                match rng.randrange(3):
                    case 0:
                        items.pop(rng.randrange(len(items)))
                    case 1:
                        items.append(rng.choice(items))
                    case 2:
                        rng.shuffle(items)
                setattr(record, name, items)
                return
            record = rng.choice(value)
        elif hasattr(value, "__dict__"):
            if rng.random() < 0.1:
                setattr(record, name, None)
                return
            record = value
        else:
            setattr(record, name, _other_field(rng, value))
            return


def _other_field(rng: random.Random, value: Any) -> Any:
    if isinstance(value, (bytes, str)):
        text = value if isinstance(value, str) else value.decode("utf-8", "replace")
        if text[:2] == '{"':
            return json.dumps(changed_json(rng, json.loads(text)))
        return rng.choice((text[:-1], f"{text}x", "", "head", "layers.0.q", "x" * rng.choice((256, 257)), "\x1b\n"))
    if isinstance(value, int):
        return rng.choice((*EDGES, 2**63, 2**64 - 64, value + 1, value - 1, value + 64, 2 * value, value // 2)) % 2**64
    if value is None or not hasattr(value, "__len__"):
        return rng.choice((None, 0, 1, [], ""))
    items = [int(item) for item in value]
    return [*items, 1] if rng.random() < 0.5 else [rng.choice(EDGES) for _ in items]


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


def _template(rng: random.Random, text: Text) -> str:
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


def _tokenizer(rng: random.Random) -> str:
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
        text = Text(source, {})
        text.encode("a" * 40 + " naïve 日本 <|end|>" + "x" * 40)
        text.encode_plain("<|end|>")
        stream = TextStream(text)
        for _ in range(40):
            stream.push(rng.randrange(3000))
    except EdgeqError as error:
        return refused(error)
    return "encoded"


COMMON: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 16},
    **{"rope_theta": 1e4, "tie_word_embeddings": True, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    **{
        "layer_types": ["full_attention", "sliding_attention"],
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}


def _config(rng: random.Random) -> str:
    """config.json of a random family with some keys removed and others changed, through everything that reads no file."""
    name = rng.choice(list(FAMILIES))
    # Keys of another kind of model are refused before anything else is looked at.
    other = ("expert", "moe") if "Mo" not in name and "Mix" not in name else ("use_sliding_window", "layer_types")
    config = {key: value for key, value in COMMON.items() if rng.random() < 0.97 and not any(part in key for part in other)}
    config["architectures"] = [name]
    try:
        family, found = recognise(changed_json(rng, config) if rng.random() < 0.95 else config)
        if found.num_hidden_layers * max(1, found.num_experts) < 4096:
            family.sources()
            family.tensor_shapes()
        json.dumps(json.loads(found.to_json()), allow_nan=False)
    except EdgeqError as error:
        return refused(error)
    except AttributeError as error:
        # The JSON value as a whole was replaced; read_json gives objects alone.
        if "has no attribute 'get'" not in str(error):
            raise
        return "no object"
    return "recognised"


def _header(rng: random.Random, path: Path) -> str:
    """A safetensors file of three tensors whose header, or any byte, is changed."""
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for i, (dtype, shape, begin, end) in enumerate((("BF16", [4, 3], 0, 24), ("F32", [2], 24, 32), ("I64", [1, 1], 32, 40))):
        tensors[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(changed_json(rng, tensors, (*VALUES, "F16", "F64", [40, 48]))).encode("utf-8", "surrogatepass")
    length = rng.choice((0, 1, 2, 2**32, 2**63, 2**64 - 1, len(text) + 1)) if rng.random() < 0.1 else len(text)
    data = struct.pack("<Q", length) + text + bytes(40)
    path.write_bytes(changed_bytes(rng, data) if rng.random() < 0.4 else data)
    try:
        for tensor in read_header(path).values():
            assert 8 <= tensor.offset <= path.stat().st_size, tensor
    except EdgeqError as error:
        return refused(error)
    return "read"
