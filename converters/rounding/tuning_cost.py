"""How much `--tune` (tuning.py) does, and the memory that it takes."""

STEPS = 100
ROWS = 4
"""Calibration rows of a step."""
FORWARDS = 4
"""Passes of the whole text beside the steps: the target, the loss before and after, the next layer's inputs."""
MATRICES = 5
"""Arrays as large as a matrix, in float32, while its product is computed or gone back through."""
BATCHES = 4
"""What a batch of rows takes while gradients go back through a layer, over what it takes without gradients."""


def tuning_bytes(layer: int, largest: int, batch: int) -> int:
    """Memory beside a layer in float32, of `layer` bytes, its `largest` matrix and a `batch`: integers, entries of tables that
    they stand for, matrices, gradients."""
    return layer // 2 + MATRICES * largest + BATCHES * batch
