"""The metadata of a model file to FlatBuffer bytes and back.

The Python reader of FlatBuffers has no verifier and trusts every count and offset.  So every count is capped before a loop over
it, and whatever the reader raises on nonsense becomes one FormatError.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import flatbuffers  # type: ignore[import-untyped]

import edgeq.format.schema.model_generated as fb
from edgeq.errors import FormatError, UnsupportedError
from edgeq.format.codec import FLOAT_KINDS, Codec, Kind, ZeroKind
from edgeq.format.metadata import ALIGNMENT, DIGEST_BYTES, Metadata, Segment
from edgeq.format.records import (
    KV_KINDS,
    MODES,
    Activation,
    ArrayRef,
    KvCodec,
    LinearSpec,
    LowRank,
    Mode,
    SplitRow,
    Transform,
    Weight,
)
from edgeq.network.config import ModelConfig

T = TypeVar("T")
WEIGHT_ARRAYS = {
    "q": "q", "scale": "scale", "zero": "zero", "offset": "offset", "super_scale": "superScale", "super_offset": "superOffset",
    "table": "table",
}  # fmt: skip
"""Arrays of a codec by name -> the attribute of the generated Python."""

MAX_SEGMENTS = 1 << 18
MAX_LAYERS = 1 << 16
MAX_ARRAYS = 1 << 14
"""1024 decoder layers of at most 12 arrays each, and a few of the whole model."""
MAX_BLOBS = 64
MAX_KERNELS = 64
MAX_WEIGHTS = 2
MAX_JSON = 1 << 20
MAX_RANK = 4
MAX_DIMENSION = 1 << 40
MAX_NAME = 256
MAX_MODE = 16
DTYPE_NAMES = ("f32", "f16", "bf16", "u8", "i8", "i32")
CODEC_KINDS: tuple[Kind, ...] = ("f32", "f16", "bf16", "int", "two-level", "s4", "table", "trellis")
"""By `CodecKind`.  Those of `ZERO_FORMS` are `integer` too, of another `ZeroKind`."""
ZERO_KINDS: tuple[ZeroKind, ...] = ("symmetric", "integer", "offset", "half")
ZERO_FORMS: dict[ZeroKind, Kind] = {"offset": "offset", "half": "half"}


def encode(metadata: Metadata, segments: list[Segment]) -> bytes:
    """Metadata as a FlatBuffer; equal metadata gives equal bytes."""
    model = fb.ModelT()
    model.config = metadata.config.to_json()
    model.generation = _dump(metadata.generation)
    model.provenance = _dump(metadata.provenance)
    model.defaultMode = metadata.default_mode
    model.segments = [_segment(s) for s in segments]
    model.linears = [_linear(x) for x in metadata.linears.values()]
    model.arrays = [_named_array(name, a) for name, a in metadata.arrays.items()]
    model.blobs = [_blob(name, segment) for name, segment in metadata.blobs.items()]
    # Absent, not empty, where there are none: files without kernels keep their bytes.
    model.kernels = [_kernels(target, segment) for target, segment in metadata.kernels.items()] or None
    model.kv = _kv(metadata.kv)
    model.visionMode = metadata.vision_mode
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


def _kv(kv: KvCodec) -> Any:
    t = fb.KvCacheT()
    t.kind, t.high, t.bits = KV_KINDS.index(kv.kind), kv.high, kv.bits
    return t


def _weight(weight: Weight | None) -> Any:
    if weight is None:
        return None
    codec = fb.CodecT()
    codec.kind = CODEC_KINDS.index("int" if weight.codec.kind in ZERO_FORMS.values() else weight.codec.kind)
    codec.bits, codec.groupSize = weight.codec.bits, weight.codec.group_size
    codec.zero, codec.wide = ZERO_KINDS.index(weight.codec.zero_kind), weight.codec.wide
    t = fb.WeightT()
    t.codec, t.rows, t.columns = codec, weight.rows, weight.columns
    for name, array in weight.arrays.items():
        setattr(t, WEIGHT_ARRAYS[name], _array(array))
    return t


def _linear(linear: LinearSpec) -> Any:
    t = fb.LinearT()
    t.name, t.weights, t.bias = linear.name, [_weight(w) for w in linear.weights], _array(linear.bias)
    t.inputOrder, t.inputScale = _array(linear.input_order), _array(linear.input_scale)
    if linear.transform:
        t.transform = fb.TransformT()
        t.transform.size, t.transform.stride = linear.transform.size, linear.transform.stride
        t.transform.base = _array(linear.transform.base)
    if linear.activation:
        t.activation = fb.ActivationT()
        t.activation.bits, t.activation.highBits = linear.activation.bits, linear.activation.high_bits
        t.activation.symmetric = linear.activation.symmetric
        t.activation.scales = _array(linear.activation.scales)
    if linear.split_row:
        t.splitRow = fb.SplitRowT()
        t.splitRow.index, t.splitRow.row = linear.split_row.index, _array(linear.split_row.row)
    if linear.low_rank:
        t.lowRankB, t.lowRankA = _weight(linear.low_rank.b), _weight(linear.low_rank.a)
    t.master = _weight(linear.master)
    return t


def _named_array(name: str, array: ArrayRef) -> Any:
    t = fb.NamedArrayT()
    t.name, t.array = name, _array(array)
    return t


def _blob(name: str, segment: int) -> Any:
    t = fb.BlobT()
    t.name, t.segment = name, segment
    return t


def _kernels(target: str, segment: int) -> Any:
    record = fb.KernelsT()
    record.target, record.segment = target, segment
    return record


def decode(data: bytes, data_length: int = MAX_SEGMENTS * ALIGNMENT) -> tuple[Metadata, list[Segment]]:
    """FlatBuffer bytes -> metadata and segments.  Checks the structure only; the container checks that arrays lie in the file.

    data_length   bytes of the data area: it bounds the number of segments, which bounds the number of everything else
    FormatError: not a sound FlatBuffer of this schema.  UnsupportedError: a codec or part this version cannot run.
    """
    try:
        return _decode(data, data_length)
    except (struct.error, IndexError, TypeError, ValueError, AttributeError, OverflowError, UnicodeError) as error:
        raise FormatError(f"metadata is damaged ({type(error).__name__}: {error}); copy or convert the file again") from None


def _decode(data: bytes, data_length: int) -> tuple[Metadata, list[Segment]]:
    if len(data) < 8 or data[4:8] != b"EDGQ":
        raise FormatError("metadata is not an edgeq FlatBuffer; copy or convert the file again")
    model = fb.Model.GetRootAs(data, 0)
    counts = (
        model.SegmentsLength(), model.LinearsLength(), model.ArraysLength(), model.BlobsLength(), model.KernelsLength()
    )  # fmt: skip
    segments = _items("segments", counts[0], min(MAX_SEGMENTS, data_length // ALIGNMENT), model.Segments, _read_segment)
    # Tables can be shared in a FlatBuffer: a few bytes could stand for a million layers.  Each has a segment of its own.
    if sum(counts[1:]) > counts[0]:
        raise FormatError(
            f"metadata claims {sum(counts[1:])} layers, arrays, blobs and kernels; its {counts[0]} segments cannot hold them"
        )
    left = counts[0]

    def read_linear(x: Any) -> tuple[str, LinearSpec]:
        nonlocal left
        linear = _read_linear(x)
        left -= sum(1 for _ in linear.arrays())
        if left < 0:
            raise FormatError(f"{linear.name}: the linear layers up to this one have more arrays than the file has segments")
        return linear.name, linear

    linears = _named("linear layer", counts[1], MAX_LAYERS, model.Linears, read_linear)
    arrays = _named("array", counts[2], MAX_ARRAYS, model.Arrays, _read_named_array)
    blobs = _named("blob", counts[3], MAX_BLOBS, model.Blobs, _read_blob)
    kernels = _named("kernel architecture", counts[4], MAX_KERNELS, model.Kernels, _read_kernels)
    mode, vision_mode = _read_mode(model.DefaultMode(), "default_mode"), model.VisionMode()
    metadata = Metadata(
        config=ModelConfig.from_json(_text(model.Config(), "config", MAX_JSON)),
        generation=_load(model.Generation(), "generation"),
        provenance=_load(model.Provenance(), "provenance"),
        default_mode=mode,
        linears=linears,
        arrays=arrays,
        blobs=blobs,
        kernels=kernels,
        kv=_read_kv(model.Kv()),
        vision_mode=None if vision_mode is None else _read_mode(vision_mode, "vision_mode"),
    )
    return metadata, segments


def _items(what: str, count: int, cap: int, get: Callable[[int], Any], read: Callable[[Any], T]) -> list[T]:
    """`read` of each entry of a vector; FormatError if the file claims more than `cap` entries."""
    if count > cap:
        raise FormatError(f"metadata claims {count} {what}; at most {cap} are possible")
    return [read(get(i)) for i in range(count)]


def _named(what: str, count: int, cap: int, get: Callable[[int], Any], read: Callable[[Any], tuple[str, T]]) -> dict[str, T]:
    """`read` of each entry of a vector, by name; a name that comes twice ends it: a shared table is read twice at most."""
    if count > cap:
        raise FormatError(f"metadata claims {count} {what}s; at most {cap} are possible")
    result: dict[str, T] = {}
    for i in range(count):
        name, value = read(get(i))
        if name in result:
            raise FormatError(f"metadata has {what} {name!r} twice")
        result[name] = value
    return result


def _text(value: bytes | None, what: str, cap: int) -> str:
    if value is None:
        raise FormatError(f"metadata lacks {what}")
    if len(value) > cap:
        raise FormatError(f"metadata {what} has {len(value)} bytes; at most {cap} are possible")
    return bytes(value).decode("utf-8")


def _read_mode(value: bytes | None, what: str) -> Mode:
    named = _text(value, what, MAX_MODE)
    mode = next((m for m in MODES if m == named), None)
    if mode is None:
        raise UnsupportedError(f"{what} {named!r} is not supported; supported: {', '.join(MODES)}")
    return mode


def _load(value: bytes | None, what: str) -> dict[str, object]:
    try:
        loaded = json.loads(_text(value, what, MAX_JSON), parse_constant=_not_a_number, parse_float=_finite)
    except RecursionError:
        raise FormatError(f"metadata {what} is nested too deeply") from None
    if not isinstance(loaded, dict):
        raise FormatError(f"metadata {what} is not a JSON object")
    return loaded


def _not_a_number(name: str) -> None:
    raise FormatError(f"metadata holds the number {name}, which JSON does not allow")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise FormatError(f"metadata holds the number {digits[:40]}, which is too large")
    return value


def _read_segment(s: Any) -> Segment:
    if s.DigestLength() != DIGEST_BYTES:
        raise FormatError(f"a segment digest has {s.DigestLength()} bytes; expected {DIGEST_BYTES}")
    return Segment(int(s.Offset()), int(s.Length()), s.DigestAsNumpy().tobytes())


def _read_array(a: Any) -> ArrayRef | None:
    if a is None:
        return None
    if a.Dtype() >= len(DTYPE_NAMES):
        raise UnsupportedError(f"array type {a.Dtype()} is not supported; this file needs a newer edgeq")
    shape = _items("dimensions of an array", a.ShapeLength(), MAX_RANK, a.Shape, int)
    if any(n > MAX_DIMENSION for n in shape):
        raise FormatError(f"array shape {shape} is out of range")
    return ArrayRef(DTYPE_NAMES[a.Dtype()], tuple(shape), int(a.Segment()))


def _read_named_array(a: Any) -> tuple[str, ArrayRef]:
    name, array = _text(a.Name(), "array name", MAX_NAME), _read_array(a.Array())
    if array is None:
        raise FormatError(f"array {name!r} has no data")
    return name, array


def _read_blob(b: Any) -> tuple[str, int]:
    return _text(b.Name(), "blob name", MAX_NAME), int(b.Segment())


def _read_kernels(k: Any) -> tuple[str, int]:
    return _text(k.Target(), "kernel architecture", MAX_NAME), int(k.Segment())


def _read_kv(kv: Any) -> KvCodec:
    if kv is None:
        return KvCodec()
    if kv.Kind() >= len(KV_KINDS):
        raise UnsupportedError(f"cache kind {kv.Kind()} is not supported; this file needs a newer edgeq")
    return KvCodec(KV_KINDS[kv.Kind()], int(kv.High()), int(kv.Bits()))


def _read_weight(name: str, w: Any) -> Weight:
    codec = w.Codec()
    if codec.Kind() >= len(CODEC_KINDS):
        raise UnsupportedError(f"{name}: codec kind {codec.Kind()} is not supported; this file needs a newer edgeq")
    if codec.Zero() >= len(ZERO_KINDS):
        raise UnsupportedError(f"{name}: zero kind {codec.Zero()} is not supported; this file needs a newer edgeq")
    read = {part: _read_array(getattr(w, field[0].upper() + field[1:])()) for part, field in WEIGHT_ARRAYS.items()}
    arrays = {part: array for part, array in read.items() if array is not None}
    if "q" not in arrays:
        raise FormatError(f"{name}: a weight without data")
    kind = CODEC_KINDS[codec.Kind()]
    if kind in FLOAT_KINDS and (codec.Bits() or codec.GroupSize() or codec.Zero()):
        raise FormatError(f"{name}: codec {kind} has bits, a group size or a zero point; only integer codecs do")
    zero = ZERO_KINDS[codec.Zero()]
    if kind == "two-level" and zero not in ("symmetric", "offset"):
        beside = "zero points" if zero == "integer" else "a half grid"
        raise FormatError(f"{name}: scales of two levels beside {beside}; they go with offsets or alone")
    if kind == "s4" and zero != "half":
        raise FormatError(f"{name}: scales of four bits without a half grid; they go with one alone")
    if kind in ("table", "trellis") and zero != "symmetric":
        raise FormatError(f"{name}: a table beside zero points, offsets or a half grid; its entries say where zero is")
    form = kind if kind in ("two-level", "s4") else ZERO_FORMS.get(zero, kind)
    symmetric = zero == "symmetric" or zero == "half" or form in ZERO_FORMS.values()
    stored = Codec(form, int(codec.Bits()), int(codec.GroupSize()), symmetric, bool(codec.Wide()))
    return Weight(stored, int(w.Rows()), int(w.Columns()), arrays)


def _read_linear(x: Any) -> LinearSpec:
    name = _text(x.Name(), "layer name", MAX_NAME)
    weights = _items("weight blocks", x.WeightsLength(), MAX_WEIGHTS, x.Weights, lambda w: _read_weight(name, w))
    if not weights:
        raise FormatError(f"{name}: a linear layer without a weight")
    a, b = x.LowRankA(), x.LowRankB()
    if (a is None) != (b is None):
        raise FormatError(f"{name}: a low-rank part with one factor")
    return LinearSpec(
        name,
        tuple(weights),
        bias=_read_array(x.Bias()),
        input_order=_read_array(x.InputOrder()),
        transform=_read_transform(x.Transform()),
        input_scale=_read_array(x.InputScale()),
        activation=_read_activation(name, x.Activation()),
        split_row=_read_split_row(name, x.SplitRow()),
        low_rank=None if a is None else LowRank(_read_weight(name, b), _read_weight(name, a)),
        master=None if x.Master() is None else _read_weight(name, x.Master()),
    )


def _read_split_row(name: str, s: Any) -> SplitRow | None:
    if s is None:
        return None
    row = _read_array(s.Row())
    if row is None:
        raise FormatError(f"{name}: a split row without data")
    return SplitRow(int(s.Index()), row)


def _read_transform(t: Any) -> Transform | None:
    return None if t is None else Transform(int(t.Size()), int(t.Stride()), _read_array(t.Base()))


def _read_activation(name: str, a: Any) -> Activation | None:
    if a is None:
        return None
    if a.Granularity() != fb.Granularity.token or a.StaticScalesLength():
        raise UnsupportedError(f"{name}: activations of granularity group or tensor are not supported by this version")
    return Activation(int(a.Bits()), int(a.HighBits()), bool(a.Symmetric()), _read_array(a.Scales()))
