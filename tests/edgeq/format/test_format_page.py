"""docs/format.md agrees with the schema, the reader and the constants; its example is rebuilt from it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path

import numpy as np
import pytest
from test_config import (
    AXES_TOWER,
    BESIDE,
    BESIDE_ATTENTION,
    CLIP_TOWER,
    DELTA,
    EXPERTS,
    GEMMA,
    GEMMA_4,
    NAFLEX_TOWER,
    OPT,
    PLAIN,
    STATE_SPACE,
    TAPPED_TOWER,
    TOWER,
)

from edgeq.format import codec, container, manifest, metadata, metadata_codec, quantization, records
from edgeq.format.container import ModelFile
from edgeq.format.records import MODES, LinearSpec
from edgeq.network import config, delta_net, mlp, pooling, rope, ssd, stack
from edgeq.pictures import tower_positions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
SCHEMA = (ROOT / "edgeq" / "format" / "schema" / "model.fbs").read_text(encoding="utf-8")
DECLARATIONS = re.sub(r"//.*", "", SCHEMA)
BODIES = {(kind, name): body for kind, name, body in re.findall(r"(table|enum) (\w+)(?: : \w+)? \{(.*?)\}", DECLARATIONS, re.S)}


def section(title: str) -> str:
    """The text from a heading to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.S | re.M)
    assert found, f"docs/format.md has no section {title!r}"
    return found[1]


def rows(text: str, header: str) -> Iterator[list[str]]:
    """The cells of the lines of the first table whose first column is `header`."""
    lines = iter(text.splitlines())
    assert any(line.startswith(f"| {header} |") for line in lines), f"no table of {header}"
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_table_and_enum_of_the_schema_has_a_section_and_no_other_has() -> None:
    titles = re.findall(r"^### (Table|Enum) `(\w+)`$", PAGE, re.M)
    assert sorted((kind.lower(), name) for kind, name in titles) == sorted(BODIES)
    assert len(re.findall(r"\b(?:table|enum|struct|union) \w+", DECLARATIONS)) == len(BODIES)


@pytest.mark.parametrize("name", [name for kind, name in BODIES if kind == "table"])
def test_a_table_has_exactly_the_fields_of_the_schema(name: str) -> None:
    schema = re.findall(r"(\w+):\s*([^;]+);", BODIES["table", name])
    page = [(named(field)[0], named(kind)[0]) for field, kind, _ in rows(section(f"Table `{name}`"), "field")]
    assert page == [(field, kind.strip()) for field, kind in schema]


@pytest.mark.parametrize("name", [name for kind, name in BODIES if kind == "enum"])
def test_an_enum_has_exactly_the_values_of_the_schema(name: str) -> None:
    schema = re.findall(r"(\w+)\s*=\s*(\d+)", BODIES["enum", name])
    page = [(named(value)[0], number) for value, number, _ in rows(section(f"Enum `{name}`"), "name")]
    assert page == schema


def test_every_field_of_the_schema_has_a_comment() -> None:
    """Beside it, or for the tables on one line before the table."""
    for line in SCHEMA.splitlines():
        if re.match(r"  \w+(: | = )", line):
            assert "//" in line, line


def test_every_part_that_the_reader_takes_is_explained() -> None:
    page = [named(part)[0] for part, _ in rows(section("What a linear layer computes"), "part")]
    assert sorted(page) == sorted({f.name for f in fields(LinearSpec)} - {"name"})


def test_what_is_reserved_is_refused_by_the_reader() -> None:
    """Exactly the names that the page marks so; test_container.py has a file with each."""
    reserved = {
        named(cells[0])[0]
        for title in re.findall(r"^### (.*)$", PAGE, re.M)
        for cells in rows(section(title), "field" if title.startswith("Table") else "name")
        if "refused" in cells[2]
    }
    assert reserved == {"static_scales", "group", "tensor"}


@pytest.mark.parametrize(
    ("kind", "header", "above"),
    [
        (config.ModelConfig, "key", None),
        (rope.Rope, "key of a rope", None),
        (pooling.Pooling, "key of `pooling`", None),
        (pooling.DenseLayer, "key of a dense layer", None),
        (delta_net.DeltaNet, "key of `delta_net`", None),
        (ssd.StateSpace, "key of `ssd`", None),
        (config.VisionConfig, "key of a tower", stack.Stack),
    ],
)
def test_the_configuration_has_exactly_these_keys_and_defaults(kind: type, header: str, above: type | None) -> None:
    title = "Vision tower" if above else "Configuration"
    page = {named(key)[0]: default for key, default, _ in rows(section(title), header)}
    own = [f for f in fields(kind) if above is None or f.name not in {x.name for x in fields(above)}]
    assert list(page) == [f.name for f in own]
    for field in own:
        if field.default is MISSING:
            assert page[field.name] == "", field.name
        else:
            value = {(): "[]", None: "null"}.get(field.default, repr(field.default).replace("'", '"'))
            value = value.lower() if type(field.default) is bool else value
            assert page[field.name] == f"`{value}`"


def test_every_kind_of_rope_and_of_mlp_is_named() -> None:
    text = section("Configuration")
    assert set(rope.ROPE_KINDS) | set(mlp.ACTIVATIONS) <= set(named(text))


def test_all_layers_and_arrays_that_a_configuration_implies_are_named_and_no_others() -> None:
    shared = replace(EXPERTS, shared_expert_intermediate_size=48, expert_scores="sigmoid")
    found: set[str] = set()
    convolutions = replace(PLAIN, conv_layers=(0,), conv_taps=3)
    embedded = replace(OPT, embedding_norm=True)
    attention = replace(PLAIN, attention_gate=True, attention_sinks=True)
    untied, normed = replace(PLAIN, tie_word_embeddings=False), replace(GEMMA, layer_norm=True)
    pooled = replace(untied, pooling=pooling.Pooling("mean", True, (pooling.DenseLayer(8, bias=True, norm=True),)))
    for each in (
        PLAIN,
        untied,
        pooled,
        GEMMA,
        normed,
        OPT,
        embedded,
        shared,
        convolutions,
        DELTA,
        attention,
        GEMMA_4,
        BESIDE,
        STATE_SPACE,
        BESIDE_ATTENTION,
    ):
        names = {"head", *manifest.array_shapes(each), *manifest.rotation_shapes(each, 0), *manifest.table_shapes(each)}
        for fused, parts in manifest.fused_shapes(each, 0):
            names |= {fused, *parts}
        names = {re.sub(r"experts\.\d+", "experts.E", re.sub(r"layers\.\d+", "layers.N", name)) for name in names}
        found |= {re.sub(r"dense\.\d+", "dense.I", name) for name in names}
    text = section("Layers and arrays")
    page = [name for header in ("layer", "array") for cells in rows(text, header) for name in named(cells[0])]
    assert len(page) == len(set(page)) and set(page) == found


def test_all_layers_and_arrays_of_a_tower_are_named() -> None:
    text = section("Vision tower")
    page = {
        name for header in ("layer of a tower", "array of a tower") for cells in rows(text, header) for name in named(cells[0])
    }
    found = {
        re.sub(r"taps\.\d+", "taps.N", name)
        for vision in (TOWER, CLIP_TOWER, TAPPED_TOWER, AXES_TOWER, NAFLEX_TOWER)
        for name in (*manifest.patch_contents(vision), *manifest.projector_contents(vision))
    }
    assert found == {name for name in page if ".layers." not in name}
    layer = {re.sub(r"layers\.\d+", "layers.N", name) for name in manifest.layer_contents(TOWER, 0)}
    assert {name for name in page if ".layers." in name} - layer == {"vision.layers.N.q"}


def test_all_layers_and_arrays_of_a_layer_that_drafts_are_named() -> None:
    draft = replace(DELTA, draft_layers=1).draft
    assert draft is not None
    headers = "layer that drafts", "array of it"
    page = {name for header in headers for cells in rows(section("The layer that drafts"), header) for name in named(cells[0])}
    page -= {"key_rotation"}
    ends = {*manifest.draft_input(draft), *manifest.draft_output(draft)}
    assert ends == {name for name in page if ".layers." not in name}
    assert {name for name in page if ".layers." in name} - {*manifest.layer_contents(draft, 0)} == {"draft.layers.0.q"}


def test_modes_are_named_with_their_limits() -> None:
    page = {named(mode)[0]: text for mode, text in rows(section("Modes: how activations are rounded"), "mode")}
    assert tuple(page) == MODES
    a8, small, a4 = quantization.MAX_A8, quantization.MAX_A8_4_BIT_WEIGHTS, quantization.MAX_A4
    assert f"from -{a8} to {a8}; from -{small} to {small} where the weights are integers of 4 bits" in page["a8"]
    assert f"from -{a4} to {a4}." in page["a4"]
    assert f"at most {quantization.MAX_ACTIVATION_BLOCK} channels" in page["a16"]
    assert f"{quantization.MAX_ACTIVATION_BLOCK} where\nthe group size is 0" in PAGE
    assert f"at most {quantization.MIN_SPAN:.0e}" in PAGE
    for bits in codec.BITS:
        coded = codec.Codec("int", bits, 32)
        expected = quantization.MAX_A8_4_BIT_WEIGHTS if bits == 4 else quantization.MAX_A8
        assert quantization.activation_limit(coded, "a8") == expected
        assert quantization.activation_limit(coded, "a4") == quantization.MAX_A4


def test_codecs_are_those_of_the_reader() -> None:
    group_size = next(text for name, _, text in rows(section("Table `Codec`"), "field") if "group_size" in name)
    assert tuple(map(int, re.findall(r"\d+", group_size)))[:4] == codec.GROUP_SIZES
    picture = re.search(r"^1 bit = .*$", PAGE, re.M)
    assert picture
    planes = dict(re.findall(r"(\d)(?: bits?)? = ((?:\[\d\])+)", picture[0]))
    assert {int(bits): tuple(map(int, re.findall(r"\d", p))) for bits, p in planes.items()} == {
        bits: planes for bits, planes in codec.PLANES.items() if bits != 8
    }
    # The picture stands in the module too.
    assert codec.__doc__ and " ".join(picture[0].split()) in " ".join(codec.__doc__.split())


def test_limits_are_the_constants() -> None:
    constants = {
        "bytes of metadata": container.MAX_METADATA,
        "segments": metadata_codec.MAX_SEGMENTS,
        "linear layers": metadata_codec.MAX_LAYERS,
        "arrays": metadata_codec.MAX_ARRAYS,
        "blobs": metadata_codec.MAX_BLOBS,
        "kernels": metadata_codec.MAX_KERNELS,
        "weight blocks of a layer": metadata_codec.MAX_WEIGHTS,
        "dimensions of an array": metadata_codec.MAX_RANK,
        "length of a dimension": metadata_codec.MAX_DIMENSION,
        "bytes of each JSON text": metadata_codec.MAX_JSON,
        "bytes of a name": metadata_codec.MAX_NAME,
        "bytes of `default_mode`": metadata_codec.MAX_MODE,
        "rows of the base of a transform": records.MAX_BASE,
        "experts of all layers together": mlp.MAX_EXPERTS,
        "pixels of a patch, channels of joined patches": config.MAX_CHANNELS,
        "rows of learned positions of a tower": tower_positions.MAX_POSITIONS,
    }
    sizes = dict[str, int]()
    for what, limit in rows(section("Limits"), "what"):
        base, _, power = limit.partition("^")
        value = int(base) ** int(power or 1)
        if what in constants:
            assert constants.pop(what) == value, what
        else:
            sizes |= dict.fromkeys(named(what), value)
    assert not constants
    assert sizes.pop("shared_expert_intermediate_size") == stack.MAX_SIZES["intermediate_size"]
    assert sizes.pop("sliding_windows") == stack.MAX_SIZES["max_position_embeddings"]
    assert sizes == stack.MAX_SIZES | config.MAX_VISION_SIZES


def test_the_header_is_the_readers() -> None:
    sizes = {"8 bytes": "8s", "16 bytes": "16s", "u32": "I", "u64": "Q"}
    offset, layout = 0, "<"
    for at, kind, _ in rows(section("Bytes"), "header offset"):
        assert int(at) == offset
        layout += sizes[kind]
        offset = struct.calcsize(layout)
    text = section("Bytes")
    assert offset == 64 and f"header length, {offset}" in text and f"format version, {container.VERSION}" in text
    encoded = container.FileHeader(64, 5, bytes(range(16))).encode()
    assert struct.unpack(layout, encoded) == (container.MAGIC, 1, 64, 16384, 64, 16448, 5, bytes(range(16)))
    assert f"`{container.MAGIC.hex(' ')}`" in text and f"data offset, {container.DATA_OFFSET}" in text
    assert f"a multiple of {container.ALIGNMENT}" in text and f"{container.MAX_METADATA >> 20} MiB" in text
    assert f"BLAKE2b with a digest of {metadata.DIGEST_BYTES} bytes" in text


def dump(file: bytes, start: int, stop: int) -> str:
    """Offset and 16 bytes a line; lines of zeros are left out."""
    lines = ((at, file[at : min(at + 16, stop)]) for at in range(start, stop, 16))
    return "\n".join(f"{at:5}  {data.hex(' ')}" for at, data in lines if any(data))


def listing(file: ModelFile) -> str:
    """What the page shows of the example."""
    data = file.path.read_bytes()
    end = file.segments[2].offset + file.segments[2].length
    segments = "\n".join(
        f"{i:2}  {s.offset:5}  {s.length:4}  {s.digest.hex()}  {file.owner(i)}" for i, s in enumerate(file.segments)
    )
    return (
        f"header\n{dump(data, 0, 64)}\n\nsegments: index, offset, length, digest, content\n{segments}\n\n"
        f"segments 0 to 2, lines of zeros left out\n{dump(data, container.DATA_OFFSET, end)}\n\n"
        f"metadata: bytes {file.header.metadata_offset} to {file.size - 1}\n"
        f"{dump(data, file.header.metadata_offset, file.header.metadata_offset + 16)}\n..."
    )


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """The file that the code on the page makes."""
    code = re.search(r"```python\n(.*?)```", section("An example, byte for byte"), re.S)
    assert code
    path = tmp_path_factory.mktemp("example") / "example.edgeq"
    exec(code[1], {"path": path})
    return ModelFile.open(path)


def test_the_example_has_the_bytes_of_the_page(example: ModelFile) -> None:
    assert f"```\n{listing(example)}\n```" in PAGE


def test_the_bytes_of_the_example_are_read_by_the_rules_of_the_page() -> None:
    """Without the codec: the integers, scales and zero points of the head, from the hex digits on the page."""
    shown = re.search(r"lines of zeros left out\n(.*?)\n\n", section("An example, byte for byte"), re.S)
    assert shown
    data = {int(line[:5]) + i: b for line in shown[1].splitlines() for i, b in enumerate(bytes.fromhex(line[5:]))}
    q, scale, zero = 16384, 16384 + 2 * 4 * 64, 16384 + 2 * 4 * 64 + 64
    for r, c in np.ndindex(3, 36):
        chunk, quad, channel = c // 32, c % 32 // 4, c % 4
        byte = data.get(q + 256 * chunk + 64 * (quad // 2) + 4 * r + channel, 0)
        group = c // 32
        assert byte >> 4 * (quad % 2) & 15 == (5 * r + c) % 16
        half = bytes(data[scale + 2 * (16 * group + r) + i] for i in (0, 1))
        assert struct.unpack("<e", half) == (2.0 ** -(r + group),)
        assert data[zero + 16 * group + r] == 7 + group
