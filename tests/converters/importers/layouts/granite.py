"""What llama.cpp's converter makes of the MLPs and experts of a Granite: gate and up are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
GRANITES = ("granitemoe", "granitemoeshared", "granitemoehybrid")


def granite_mlp(config: Mapping[str, Any], name: str, values: Array) -> dict[str, Array]:
    """A tensor of these families, by llama.cpp's own converter."""
    shared = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
    module = name.replace("block_sparse_moe", "mlp.experts").replace("shared_mlp", shared).rpartition(".")[0]
    owner, _, fused = module.rpartition(".")
    if fused == "output_linear":
        return {f"{owner}.down_proj.weight": values}
    if fused == "input_linear":
        gate, up = (np.ascontiguousarray(each) for each in np.split(values, 2, -2))
        return {f"{owner}.gate_proj.weight": gate, f"{owner}.up_proj.weight": up}
    return {name: values}
