"""The linear layers that a graph reads, the codecs of their weights, and the mode in which an operation runs."""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.format.codec import Codec
from edgeq.format.records import LinearSpec, Mode
from edgeq.targets.graph import Experts, Graph, Linear, Operation


def integer_codecs(graph: Graph) -> list[Codec]:
    """Those of the integer weights, and of their masters, that the graph's operations may read."""
    every = [layer for operation in graph.operations for layer in linears(operation)]
    weights = [weight for layer in every for weight in (*layer.weights, layer.master) if weight]
    return list(dict.fromkeys(weight.codec for weight in weights if weight.codec.integer))


def linears(operation: Operation) -> Iterator[LinearSpec]:
    """The linear layers that an operation may read."""
    if isinstance(operation, Linear):
        yield operation.linear
    elif isinstance(operation, Experts):
        for projection, down in zip(operation.projections, operation.downs, strict=True):
            yield from projection
            yield down


def mode_of(operation: Operation, mode: Mode) -> Mode:
    """The mode in which an operation runs in a run of `mode`.

    After the last layer, right before the softmax, 4 bits would cost more than in all layers together.
    """
    return "a8" if mode == "a4" and operation.layer < 0 else mode
