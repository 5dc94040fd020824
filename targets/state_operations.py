"""Operations of layers with a state (states.py): a row depends on the rows of its session before it."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.format.records import ArrayRef
from edgeq.targets.graph import Operation


@dataclass(frozen=True)
class ShortConv(Operation):
    """A gated convolution over the last rows of a session, channel by channel (LFM2).

    With b, c, u = x[:, :width], x[:, width : 2 width], x[:, 2 width : 3 width] and k taps, of a row at slot t
    out = c * sum over j < k of weight[:, j] * (b * u of slot t - k + 1 + j); what is before slot 0 counts as 0.

    weight   array [width, k];  state: a "tail" of the last k - 1 products b * u, by its index in `Graph.states`
    """

    x: str
    width: int
    weight: ArrayRef
    out: str
    state: int
