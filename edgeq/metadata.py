"""Metadata to FlatBuffer bytes and back.

The Python reader of FlatBuffers has no verifier and trusts every count and offset, so reading goes: cap, check, then loop, and
whatever the reader raises on nonsense becomes one FormatError.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import flatbuffers  # type: ignore[import-untyped]

import edgeq.model_generated as fb
from edgeq.codec import Codec, Kind
from edgeq.config import ModelConfig
from edgeq.errors import FormatError, UnsupportedError
from edgeq.linear import ArrayRef, LinearSpec, Metadata, Mode, Weight

T = TypeVar("T")

MAX_SEGMENTS = 1 << 18
MAX_LAYERS = 1 << 16
MAX_BLOBS = 64
MAX_JSON = 1 << 20
MAX_RANK = 4
DTYPE_NAMES = ("f32", "f16", "bf16", "u8", "i8", "i32")
CODEC_KINDS: tuple[Kind, ...] = ("f32", "f16", "bf16", "int")
MODES: tuple[Mode, ...] = ("a16", "a8")
DIGEST_BYTES = 16

# Parts of a linear layer that the schema has and this version cannot run: (name in messages, how to ask the reader).
UNUSED_PARTS: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("input_scale", lambda x: x.InputScale()),
    ("input_order", lambda x: x.InputOrder()),
    ("transform", lambda x: x.Transform()),
    ("activation", lambda x: x.Activation()),
    ("low_rank", lambda x: x.LowRankB() or x.LowRankA()),
    ("split_row", lambda x: x.SplitRow()),
    ("master", lambda x: x.Master()),
)


@dataclass(frozen=True)
class Segment:
    """A run of bytes in the data area; offset from the start of the file, padding excluded from length."""

    offset: int
    length: int
    digest: bytes


def encode(metadata: Metadata, segments: list[Segment]) -> bytes:
    """Metadata as a FlatBuffer; the same metadata gives the same bytes."""
    model = fb.ModelT()
    model.config = metadata.config.to_json()
    model.generation = _dump(metadata.generation)
    model.provenance = _dump(metadata.provenance)
    model.defaultMode = metadata.default_mode
    model.segments = [_segment(s) for s in segments]
    model.linears = [_linear(x) for x in metadata.linears.values()]
    model.arrays = [_named_array(name, a) for name, a in metadata.arrays.items()]
    model.blobs = [_blob(name, segment) for name, segment in metadata.blobs.items()]
    model.bytesPerToken = fb.BytesPerTokenT()
    sizes = metadata.bytes_per_token()
    model.bytesPerToken.weights = sizes["weights"]
    model.bytesPerToken.head = sizes["head"]
    model.bytesPerToken.kvPerPosition = sizes["kv_per_position"]
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), file_identifier=b"EDGQ")
    return bytes(builder.Output())


def _dump(value: dict[str, object]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _segment(segment: Segment) -> Any:
    t = fb.SegmentT()
    t.offset, t.length, t.digest = segment.offset, segment.length, list(segment.digest)
    return t


def _array(array: ArrayRef | None) -> Any:
    if array is None:
        return None
    t = fb.ArrayT()
    t.dtype, t.shape, t.segment = DTYPE_NAMES.index(array.dtype), list(array.shape), array.segment
    return t


def _weight(weight: Weight) -> Any:
    codec = fb.CodecT()
    codec.kind, codec.bits = CODEC_KINDS.index(weight.codec.kind), weight.codec.bits
    codec.groupSize = weight.codec.group_size
    codec.zero = fb.ZeroKind.symmetric if weight.codec.symmetric else fb.ZeroKind.integer
    t = fb.WeightT()
    t.codec, t.rows, t.columns = codec, weight.rows, weight.columns
    t.q, t.scale, t.zero = _array(weight.q), _array(weight.scale), _array(weight.zero)
    return t


def _linear(linear: LinearSpec) -> Any:
    t = fb.LinearT()
    t.name, t.weights, t.bias = linear.name, [_weight(w) for w in linear.weights], _array(linear.bias)
    return t


def _named_array(name: str, array: ArrayRef) -> Any:
    t = fb.NamedArrayT()
    t.name, t.array = name, _array(array)
    return t


def _blob(name: str, segment: int) -> Any:
    t = fb.BlobT()
    t.name, t.segment = name, segment
    return t


def decode(data: bytes) -> tuple[Metadata, list[Segment]]:
    """FlatBuffer bytes -> metadata and segments.  Structure only: that arrays lie inside the file is the container's to check.

    FormatError: not a sound FlatBuffer of this schema.  UnsupportedError: a codec or part this version cannot run.
    """
    try:
        return _decode(data)
    except (struct.error, IndexError, TypeError, ValueError, AttributeError, OverflowError, UnicodeError) as error:
        raise FormatError(f"metadata is damaged ({type(error).__name__}: {error}); copy or convert the file again") from None


def _decode(data: bytes) -> tuple[Metadata, list[Segment]]:
    if len(data) < 8 or data[4:8] != b"EDGQ":
        raise FormatError("metadata is not an edgeq FlatBuffer; copy or convert the file again")
    model = fb.Model.GetRootAs(data, 0)
    segments = _items("segments", model.SegmentsLength(), MAX_SEGMENTS, model.Segments, _read_segment)
    linears = _items("linear layers", model.LinearsLength(), MAX_LAYERS, model.Linears, _read_linear)
    arrays = _items("arrays", model.ArraysLength(), MAX_LAYERS * 8, model.Arrays, _read_named_array)
    blobs = _items("blobs", model.BlobsLength(), MAX_BLOBS, model.Blobs, _read_blob)
    if model.KernelsLength():
        raise UnsupportedError("the file has embedded kernels; this version runs files without them: build it without --embed")
    mode = _text(model.DefaultMode(), "default_mode", 16)
    if mode not in MODES:
        raise UnsupportedError(f"default_mode {mode!r} is not supported; supported: {', '.join(MODES)}")
    metadata = Metadata(
        config=ModelConfig.from_json(_text(model.Config(), "config", MAX_JSON)),
        generation=_load(model.Generation(), "generation"),
        provenance=_load(model.Provenance(), "provenance"),
        default_mode="a16" if mode == "a16" else "a8",
        linears=_unique([(x.name, x) for x in linears], "linear layer"),
        arrays=_unique(arrays, "array"),
        blobs=_unique(blobs, "blob"),
    )
    return metadata, segments


def _items(what: str, count: int, cap: int, get: Callable[[int], Any], read: Callable[[Any], T]) -> list[T]:
    """`read` of each entry of a vector whose length a stranger wrote."""
    if count > cap:
        raise FormatError(f"metadata claims {count} {what}; at most {cap} are possible")
    return [read(get(i)) for i in range(count)]


def _unique(pairs: list[tuple[str, T]], what: str) -> dict[str, T]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"metadata has {what} {twice!r} twice")
    return result


def _text(value: bytes | None, what: str, cap: int) -> str:
    if value is None:
        raise FormatError(f"metadata lacks {what}")
    if len(value) > cap:
        raise FormatError(f"metadata {what} has {len(value)} bytes; at most {cap} are possible")
    return bytes(value).decode("utf-8")


def _load(value: bytes | None, what: str) -> dict[str, object]:
    try:
        loaded = json.loads(_text(value, what, MAX_JSON), parse_constant=_not_a_number)
    except RecursionError:
        raise FormatError(f"metadata {what} is nested too deeply") from None
    if not isinstance(loaded, dict):
        raise FormatError(f"metadata {what} is not a JSON object")
    return loaded


def _not_a_number(name: str) -> None:
    raise FormatError(f"metadata holds the number {name}, which JSON does not have")


def _read_segment(s: Any) -> Segment:
    if s.DigestLength() != DIGEST_BYTES:
        raise FormatError(f"a segment digest has {s.DigestLength()} bytes; expected {DIGEST_BYTES}")
    return Segment(int(s.Offset()), int(s.Length()), bytes(s.Digest(i) for i in range(DIGEST_BYTES)))


def _read_array(a: Any) -> ArrayRef | None:
    if a is None:
        return None
    if a.Dtype() >= len(DTYPE_NAMES):
        raise UnsupportedError(f"array type {a.Dtype()} is not supported; this file needs a newer edgeq")
    shape = _items("dimensions of an array", a.ShapeLength(), MAX_RANK, a.Shape, int)
    if any(n > 1 << 40 for n in shape):
        raise FormatError(f"array shape {shape} is out of range")
    return ArrayRef(DTYPE_NAMES[a.Dtype()], tuple(shape), int(a.Segment()))


def _read_named_array(a: Any) -> tuple[str, ArrayRef]:
    name, array = _text(a.Name(), "array name", 256), _read_array(a.Array())
    if array is None:
        raise FormatError(f"array {name!r} has no data")
    return name, array


def _read_blob(b: Any) -> tuple[str, int]:
    return _text(b.Name(), "blob name", 256), int(b.Segment())


def _read_weight(name: str, w: Any) -> Weight:
    codec = w.Codec()
    if codec.Kind() >= len(CODEC_KINDS):
        raise UnsupportedError(f"{name}: codec kind {codec.Kind()} is not supported; this file needs a newer edgeq")
    if codec.Zero() not in (fb.ZeroKind.symmetric, fb.ZeroKind.integer):
        raise UnsupportedError(f"{name}: zero kind {codec.Zero()} is not supported; supported: symmetric, integer")
    q = _read_array(w.Q())
    if q is None:
        raise FormatError(f"{name}: a weight without data")
    kind = CODEC_KINDS[codec.Kind()]
    if kind != "int" and (codec.Bits() or codec.GroupSize() or codec.Zero()):
        raise FormatError(f"{name}: codec {kind} has bits, a group size or a zero point; only integer codecs do")
    return Weight(
        codec=Codec(kind, int(codec.Bits()), int(codec.GroupSize()), codec.Zero() == fb.ZeroKind.symmetric),
        rows=int(w.Rows()),
        columns=int(w.Columns()),
        q=q,
        scale=_read_array(w.Scale()),
        zero=_read_array(w.Zero()),
    )


def _read_linear(x: Any) -> LinearSpec:
    name = _text(x.Name(), "layer name", 256)
    for part, has in UNUSED_PARTS:
        if has(x) is not None:
            raise UnsupportedError(f"{name}: part {part!r} is not supported by this version; this file needs a newer edgeq")
    if x.WeightsLength() != 1:
        raise UnsupportedError(f"{name}: {x.WeightsLength()} weight blocks; this version runs layers with one")
    return LinearSpec(name, (_read_weight(name, x.Weights(0)),), _read_array(x.Bias()))
