"""How far the logits of a model may differ between targets: as far as those of the reference move when it is disturbed.

Kernels sum in another order and, in a16, read their inputs as 16-bit fixed point, so results differ by some 1e-6 of what was
summed, or 1e-5.  Where such a difference is rounded (to 8 or 4 bits, to the f16 of the cache, to a choice of experts) it may
become a whole step, which no fixed tolerance describes.  So the reference runs several times with normal noise of the size that
tests/targets allow a kernel: what falls on the border of two steps falls to either side in one of these runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgeq.format.records import LinearSpec, Mode
from edgeq.targets.reference import linear as linear_module
from edgeq.targets.reference import program
from edgeq.targets.reference.matrices import Matrices

FIXED_POINT = 2e-5
"""Share of the largest input of a row: half a step of 16 bits is 1.5e-5 of it at most."""
FLOAT = 1e-6
"""Share of the largest number of a row, and of the number itself: sums and functions in float32."""


@contextmanager
def disturbed(seed: int, factor: float = 1.0) -> Iterator[None]:
    """Noise in everything that the reference computes in the block; a row of zeros stays as it is."""
    rng = np.random.default_rng(seed)
    plain_input, plain_product, plain_operations = linear_module.quantized_input, Matrices.product, dict(program.OPERATIONS)

    def noisy(x: Any, relative: float, own: float = 0.0) -> Any:
        with np.errstate(all="ignore"):
            size = np.abs(x).max(axis=1, keepdims=True, initial=0) * np.float32(relative) + np.abs(x) * np.float32(own)
            return np.asarray(x + rng.standard_normal(x.shape, np.float32) * size * np.float32(factor), np.float32)

    def quantized_input(x: Any, layer: LinearSpec, index: int, mode: Mode, scales: Any = None) -> Any:
        fixed = mode == "a16" and layer.weights[index].codec.kind == "int"
        return plain_input(noisy(x, FIXED_POINT if fixed else FLOAT), layer, index, mode, scales)

    def product(self: Matrices, weight: Any, x: Any) -> Any:
        return plain_product(self, weight, noisy(x, FLOAT / 8, FLOAT / 8))

    def wrapped(kernel: Any) -> Any:
        def run(context: Any, op: Any, rows: Any, state: Any) -> None:
            kernel(context, op, rows, state)
            # The indices of chosen experts lie beside their shares.
            if type(op) not in (program.Select, program.Embed, program.Route, program.CacheWrite):
                for name in op.writes():
                    state[name][...] = noisy(state[name], FLOAT / 8, FLOAT)

        return run

    linear_module.quantized_input = quantized_input
    Matrices.product = product  # type: ignore[method-assign]
    program.OPERATIONS.update({kind: wrapped(kernel) for kind, kernel in plain_operations.items()})
    try:
        yield
    finally:
        linear_module.quantized_input = plain_input
        Matrices.product = plain_product  # type: ignore[method-assign]
        program.OPERATIONS.update(plain_operations)
