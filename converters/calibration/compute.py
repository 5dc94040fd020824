"""Where the calibration text runs: the processor, or a GPU with one decoder layer at a time.

Hidden states stay in the memory of the host; a GPU has the weights of the layer at hand, what is computed from a few rows of
tokens, and the moments of one linear layer.  What it needs at most is promised before the work (`ConversionPlan.device_bytes`).
When it runs out of memory nevertheless, the work goes on from the last layer that is safe with half the rows, in the end on the
processor.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from edgeq.errors import InputError
from edgeq.network.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
BATCH_ROWS = 2
"""Calibration rows in one forward on the processor: bounds the activations inside a layer."""
MAX_ROWS = 16
"""The same on a GPU, which they keep busy."""
MEASURED_ROWS = 4
"""Calibration rows, or samples, evenly spaced, that are run again when all layers are written: for the head and the mode."""
LOGIT_BYTES = 64 << 20
"""Logits float32 [tokens, part of the vocabulary] of one variant in memory at a time."""
LOGITS = 5
"""Arrays of that size that comparing two variants takes."""
CPU = "cpu"
MESSAGES = ("out of memory", "ALLOC_FAILED")
"""What errors say that torch raises as plain RuntimeError: those of MPS, and of CUDA's libraries, which have workspaces."""


@dataclass(frozen=True)
class Compute:
    """A device as torch spells it, and the calibration rows in one forward there.

    note   a line for the user about the choice
    """

    name: str = CPU
    rows: int = BATCH_ROWS
    note: str | None = None

    @property
    def kind(self) -> str:
        """The device without its number."""
        return self.name.partition(":")[0]

    @property
    def apart(self) -> bool:
        """Whether the device has a memory of its own."""
        return self.kind != CPU

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.name)

    def put(self, x: Tensor) -> Tensor:
        """`x` on the device: itself where it is there."""
        return x.to(self.device)

    def batches(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of rows of tokens in portions."""
        portions: tuple[Tensor, ...] = x.split(self.rows)
        return portions

    def smaller(self) -> Compute:
        """With half the rows; after one row the processor."""
        return replace(self, rows=self.rows // 2) if self.rows > 1 else Compute()


def measurement_bytes(config: ModelConfig, tokens: int) -> tuple[int, int]:
    """Memory that comparing two variants over so many tokens takes: of hidden states and their norms, and of logits."""
    return 6 * 4 * tokens * config.hidden_size, LOGITS * min(LOGIT_BYTES, 4 * tokens * config.vocab_size)


def chosen(name: str, needs: Callable[[int], int], free: Callable[[torch.device], int] | None = None) -> Compute:
    """The device `name` of --device, with as many rows as its free memory allows.

    needs   rows -> bytes of the device's memory
    free    device -> bytes that are free; None: as its driver says

    InputError: it is not there.  A device with too little memory is not used; the note says so.
    """
    if name == CPU or (device := _device(name)).type == CPU:
        return Compute()
    available = (free or free_bytes)(device)
    rows = MAX_ROWS
    while rows >= 1:
        if needs(rows) <= available:
            return Compute(str(device), rows)
        rows //= 2
    short = f"{needs(1) / 1e9:.1f} GB are needed, {available / 1e9:.1f} GB are free"
    return Compute(note=f"{device.type}: {short}; the text runs on the CPU")


def _device(name: str) -> torch.device:
    import torch

    if name in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name in ("auto", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    if name == "auto":
        return torch.device(CPU)
    built = torch.backends.cuda.is_built() if name == "cuda" else torch.backends.mps.is_built()
    reason = "torch finds none" if built else f"this torch, {torch.__version__}, was built without {name}"
    raise InputError(f"--device {name}: no such GPU can be used here: {reason}; leave --device out to use what there is")


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU."""
    import torch

    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return int(torch.cuda.mem_get_info(device)[0])


def within_memory(compute: Compute, attempt: Callable[[Compute], T], warn: Callable[[str], None]) -> T:
    """The result of `attempt`; when the device runs out of memory, that of another one with a smaller `Compute`."""
    while True:
        try:
            return attempt(compute)
        except RuntimeError as error:
            if not compute.apart or not _out_of_memory(error):
                raise
        # Here the error is gone, and with it the frames that hold tensors.
        before, compute = compute, compute.smaller()
        rows = f"{before.rows} row{'s' * (before.rows > 1)} of tokens at a time"
        onward = f"with {compute.rows}" if compute.apart else "on the CPU"
        warn(f"{before.kind}: out of memory with {rows}; going on {onward}")
        _release(before.device)


def _out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error) for part in MESSAGES)


def _release(device: torch.device) -> None:
    """Give back what torch keeps of a GPU's memory for later."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
