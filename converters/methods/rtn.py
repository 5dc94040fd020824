"""Round to nearest: every group by itself, without calibration text."""

from __future__ import annotations

from edgeq.converters.method import Method


class RoundToNearest(Method):
    """A `Method` as its base class is."""

    name = "rtn"
