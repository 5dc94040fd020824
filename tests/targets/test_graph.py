"""What a graph says of its buffers: who reads what is there, and until when."""

from __future__ import annotations

from edgeq.format.codec import Codec
from edgeq.format.records import ArrayRef, LinearSpec, Weight
from edgeq.targets.graph import Graph, Linear, Operation


def linear(x: str, out: str, rows: int, offset: int = 0, add: bool = False) -> Linear:
    return Linear(0, x, LinearSpec("l", (Weight(Codec("f16"), rows, 32, {"q": ArrayRef("f16", (), 0)}),)), out, offset, add)


def graph(*operations: Operation, result: str = "r") -> Graph:
    return Graph({"x": 32, "n": 32, "r": 32}, operations, result, ())


def test_readers_end_where_all_is_overwritten() -> None:
    read, overwrite = linear("x", "n", 32), linear("n", "x", 32)
    assert graph(read, overwrite, read).readers(0, "x") == [0]
    assert graph(read, overwrite, read).readers(2, "x") == [2]


def test_columns_that_are_left_are_read() -> None:
    half = linear("n", "x", 16)
    rest = linear("n", "x", 16, offset=16)
    read = linear("x", "n", 32)
    assert graph(half, read, rest, read).readers(0, "x") == [1]
    assert graph(half, rest, read).readers(0, "x") == []
    assert rest.columns(32) == (16, 32) and read.columns(32) == (0, 32)


def test_what_is_added_to_is_read() -> None:
    assert graph(linear("n", "x", 32, add=True), linear("x", "n", 32)).readers(0, "x") == [0]


def test_the_result_is_read_after_the_last_operation() -> None:
    assert graph(linear("x", "r", 32), linear("x", "n", 32)).readers(1, "r") == [2]
    assert graph(linear("x", "r", 32), linear("x", "r", 32)).readers(1, "r") == []


def test_changes_say_whether_a_buffer_is_written_between() -> None:
    g = graph(linear("x", "n", 32), linear("n", "x", 16, offset=16), linear("x", "r", 32))
    assert g.changes(0, 2, "x") and not g.changes(0, 1, "x") and not g.changes(2, 3, "x")
