"""What a product by integers of the cpu target is checked by, for the files that share its codecs among them."""

import numpy as np

from edgeq.format.quantization import activation_limit
from edgeq.targets.target import Options
from tests.targets.cases import Arrays, matrix, product, run, weight


def exact_input(rng, rows, columns, block, limit):
    """Activations that integers hold exactly: each block has the value limit/128, all are multiples of 1/128."""
    x = rng.integers(-limit, limit + 1, (rows, columns)).astype(np.float32)
    x[:, ::block] = limit
    return x / 128


def shapes(codec):
    """(rows, columns): odd numbers of rows, of groups, and columns that do not fill the last chunk of 32."""
    group = codec.group_size
    if group == 0:
        return [(17, 20), (5, 300)]
    if codec.kind == "two-level":
        # More than two runs of 256 channels, the last one not whole.
        return [(33, 3 * group), (16, 512 + group if group >= 32 else 528)]
    return [(33, 3 * group), (16, group if group >= 32 else 80)]


def check_product(isa, codec, mode):
    """It equals the exact one, of one row and of many."""
    rng = np.random.default_rng(codec.bits * 1000 + codec.group_size)
    limit = 127 if mode == "a16" else activation_limit(codec, "a8")
    for rows, columns in shapes(codec):
        arrays = Arrays()
        w = weight(arrays, rng, codec, rows, columns)
        bias = rng.standard_normal(rows).astype(np.float32)
        x = exact_input(rng, 18, columns, min(codec.group_size or 128, 128), limit)
        graph = product(arrays, x, w, bias)
        expected = x.astype(np.float64) @ matrix(arrays, w).T.astype(np.float64) + bias
        size = np.abs(x) @ np.abs(matrix(arrays, w)).T + 1
        # 18 rows: tiles of 12 and 4 and 1 (or 4 and 1); 1 row: the matrix-vector kernel
        many = run("cpu", graph, arrays, 18, Options(mode, 2, isa))
        assert np.max(np.abs(many - expected) / size) < (2e-5 if mode == "a16" else 1e-6), (rows, columns)
        one = run("cpu", graph, arrays, 1, Options(mode, 1, isa))
        assert np.array_equal(one[0], many[0]), "a row alone must give the same bits as among others"


def check_extremes(isa, codec, mode):
    """All weights and activations at their limits with equal signs: sums in 16 and 32 bits are as large as they can be."""
    rng = np.random.default_rng(codec.bits)
    made = {128: [(256, 1, "most")], 0: [(1024, -1, "most"), (1024, 1, "least")], 16: [(48, -1, "least")]}
    for columns, sign, values in made[codec.group_size]:
        arrays = Arrays()
        w = weight(arrays, rng, codec, 16, columns, values)
        x = np.full((13, columns), sign, np.float32)
        x[1] *= np.where(np.arange(columns) % 2, 1, -1)
        expected = x.astype(np.float64) @ matrix(arrays, w).T.astype(np.float64)
        size = np.abs(x) @ np.abs(matrix(arrays, w)).T + np.abs(x).sum(1, keepdims=True) * (1 << codec.bits)
        y = run("cpu", product(arrays, x, w), arrays, 13, Options(mode, 1, isa))
        assert np.max(np.abs(y - expected) / size) < 1e-6
