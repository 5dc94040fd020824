"""The decoder as a list of operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.manifest import fused_shapes
from edgeq.format.metadata import Metadata
from edgeq.format.records import ArrayRef, KvCodec, LinearSpec, Weight
from edgeq.runtime.network.decoder import decoder
from edgeq.targets.graph import Embed, Graph, Linear


@pytest.fixture(scope="module")
def metadata(tiny_path: Path) -> Metadata:
    return ModelFile.open(tiny_path).metadata


def layer_of(graph: Graph, layer: int) -> list[str]:
    return [type(op).__name__ for op in graph.operations if op.layer == layer]


def test_a_layer_is_attention_and_mlp_in_order(metadata: Metadata) -> None:
    graph = decoder(metadata)
    cached, behind = ["RmsNorm", "Linear", "RopeRotate", "RopeRotate", "CacheWrite"], ["Attention", "Linear"]
    behind += ["RmsNorm", "Linear", "Activate", "Linear"]
    last = metadata.config.num_hidden_layers - 1
    for layer in range(last):
        assert layer_of(graph, layer) == [*cached, *behind]
    # Other rows than the wanted ones end where their keys and values are in the cache.
    assert layer_of(graph, last) == [*cached, "Select", *behind]
    assert layer_of(graph, -1) == ["Embed", "RmsNorm", "Linear"]


def test_with_masters_all_rows_pass_all_layers(metadata: Metadata) -> None:
    linears = {name: replace(linear, master=linear.weights[0]) for name, linear in metadata.linears.items() if name != "head"}
    graph = decoder(replace(metadata, linears=linears | {"head": metadata.linears["head"]}))
    assert layer_of(graph, -1) == ["Embed", "Select", "RmsNorm", "Linear"]
    assert "Select" not in layer_of(graph, metadata.config.num_hidden_layers - 1)


def test_a_tied_embedding_reads_the_head(metadata: Metadata) -> None:
    first = decoder(metadata).operations[0]
    assert isinstance(first, Embed) and first.table is metadata.linears["head"]


def test_projections_stored_apart_lie_side_by_side(metadata: Metadata) -> None:
    config, linears = metadata.config, dict[str, LinearSpec]()
    for name, linear in metadata.linears.items():
        parts = next((p for layer in range(6) for fused, p in fused_shapes(config, layer) if fused == name), {name: (0, 0)})
        for part, (rows, columns) in parts.items():
            weight = Weight(Codec("f32"), rows, columns, {"q": ArrayRef("f32", (1,), 0)})
            linears[part] = LinearSpec(part, (weight,)) if len(parts) > 1 else linear
    graph = decoder(replace(metadata, linears=linears))
    written = [(op.linear.name, op.out, op.offset) for op in graph.operations if isinstance(op, Linear) and op.layer == 2]
    q, kv = config.query_size, config.kv_size
    assert written == [
        ("layers.2.q", "qkv", 0),
        ("layers.2.k", "qkv", q),
        ("layers.2.v", "qkv", q + kv),
        ("layers.2.o", "x", 0),
        ("layers.2.gate", "gate_up", 0),
        ("layers.2.up", "gate_up", config.intermediate_size),
        ("layers.2.down", "x", 0),
    ]
    assert graph.buffers["qkv"] == q + 2 * kv and graph.buffers["gate_up"] == 2 * config.intermediate_size


def test_a_page_holds_64_positions_of_keys_and_values(metadata: Metadata) -> None:
    assert decoder(metadata).page_bytes(KvCodec()) == 64 * metadata.bytes_per_token()["kv_per_position"]
