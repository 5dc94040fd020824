"""Round to nearest: no data, every group for itself."""

from __future__ import annotations

from edgeq.converters.method import Method


class RoundToNearest(Method):
    """The defaults of a method."""

    name = "rtn"
    defaults = {
        "bits": 4,
        "activation_bits": None,
        "kv_bits": None,
        "group_size": 128,
        "symmetric": False,
        "head": None,
        "calibration": None,
    }
