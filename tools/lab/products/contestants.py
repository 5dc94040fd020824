"""Products of others, by PyTorch: bf16 by cuBLAS, torch's own int4, and humming-kernels.

None of them is a dependency.  Weights are random: a product takes the same time for any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

GROUP = 128
DEVICE = "cuda"
WARM_UP = 3
"""Runs that compile, choose and allocate."""


class Prepared(Protocol):
    """Matrices of one shape on the GPU.

    nbytes   of one, with its scales
    """

    nbytes: int

    def seconds(self, tokens: int, calls: int, repetitions: int) -> list[float]:
        """Seconds of a product with `tokens` rows, each a mean over `calls` products that go through the matrices in turn."""
        ...


class Contestant(Protocol):
    name: str

    def refusal(self) -> str | None:
        """Why it cannot take part here; None: it can."""
        ...

    def prepare(self, rows: int, columns: int, copies: int, most_tokens: int) -> Prepared:
        """`copies` matrices of `rows` output and `columns` input channels."""
        ...


class _Torch:
    """Products as functions of x, one for each matrix; started together as a CUDA graph, so that none waits for the host."""

    def __init__(self, products: Sequence[Callable[[Any], Any]], columns: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._products, self._columns = products, columns

    def seconds(self, tokens: int, calls: int, repetitions: int) -> list[float]:
        torch = import_module("torch")
        with torch.no_grad():
            x = torch.randn(tokens, self._columns, dtype=torch.bfloat16, device=DEVICE)

            def run() -> None:
                for i in range(calls):
                    self._products[i % len(self._products)](x)

            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    run()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            found = list[float]()
            for _ in range(repetitions):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # While the GPU is at this one the host starts the one that is timed: the first start of a graph copies it too.
                graph.replay()
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                found.append(start.elapsed_time(stop) / 1000 / calls)
        return found


def without_torch() -> str | None:
    try:
        torch = import_module("torch")
    except ImportError as error:
        return str(error)
    return None if torch.cuda.is_available() else f"torch {torch.__version__} has no GPU here"


class Bf16:
    name = "cuBLAS bf16, torch"

    def refusal(self) -> str | None:
        return without_torch()

    def prepare(self, rows: int, columns: int, copies: int, most_tokens: int) -> Prepared:
        torch = import_module("torch")
        made = [torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE) for _ in range(copies)]

        def product(weights: Any) -> Callable[[Any], Any]:
            return lambda x: torch.nn.functional.linear(x, weights)

        return _Torch([product(each) for each in made], columns, made[0].nbytes)


class Int4:
    """aten::_weight_int4pack_mm: bf16 activations, a bf16 scale and zero point for each group."""

    name = "int4 g128, torch"
    INNER_TILES = 8

    def refusal(self) -> str | None:
        return without_torch()

    def prepare(self, rows: int, columns: int, copies: int, most_tokens: int) -> Prepared:
        torch = import_module("torch")
        aten, made = torch.ops.aten, list[tuple[Any, Any]]()
        for _ in range(copies):
            pairs = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
            scales = torch.randn(columns // GROUP, rows, 2, dtype=torch.bfloat16, device=DEVICE)
            made.append((aten._convert_weight_to_int4pack(pairs, self.INNER_TILES), scales))

        def product(packed: tuple[Any, Any]) -> Callable[[Any], Any]:
            return lambda x: aten._weight_int4pack_mm(x, packed[0], GROUP, packed[1])

        return _Torch([product(each) for each in made], columns, made[0][0].nbytes + made[0][1].nbytes)


class Humming:
    """The quantized product of vLLM, compiled when it is first used: README of humming-kernels 0.1."""

    name = "int4 g128, humming-kernels"

    def refusal(self) -> str | None:
        if (reason := without_torch()) is not None:
            return reason
        try:
            import_module("humming.layer")
        except ImportError as error:
            return str(error)
        return None

    def prepare(self, rows: int, columns: int, copies: int, most_tokens: int) -> Prepared:
        torch, layer = import_module("torch"), import_module("humming.layer").HummingLayer
        about = {"dtype": "uint4", "group_size": GROUP}
        made = [layer(shape_n=rows, shape_k=columns, weight_config=about, torch_dtype=torch.bfloat16) for _ in range(copies)]
        for i, each in enumerate(made):
            made[i] = each.to(DEVICE)
            made[i].load_from_unquantized(torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE))
            made[i].transform()
        return _Torch(made, columns, sum(each.nbytes for each in made[0].parameters()))


OTHERS: tuple[Contestant, ...] = (Humming(), Int4(), Bf16())
