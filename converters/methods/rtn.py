"""Round to nearest: every group by itself, without calibration text."""

from __future__ import annotations

from edgeq.converters.method import Method


class RoundToNearest(Method):
    """A `Method` as its base class is."""

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
