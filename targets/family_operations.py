"""Operations that only some families have: layers with a state (states.py), in which a row depends on the rows of its session
before it, gates, norms of values, factors, caps, means, and which experts a row has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgeq.format.records import ArrayRef
from edgeq.targets.graph import Operation
from edgeq.targets.states import StateSpec

HEAD_LANES = 16
"""Numbers that a head in the log of a delta rule is padded to."""


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


@dataclass(frozen=True)
class SiluConv(Operation):
    """A convolution over the last rows of a session, channel by channel, and an activation (Qwen3-Next).

    out = silu(bias + sum over j < k of weight[:, j] * (x[:, :width] of slot t - k + 1 + j)), with k taps, of a row at slot t;
    what is before slot 0 counts as 0.

    weight   array [width, k];  bias: array [width], or None
    state    a "tail" of the last k - 1 inputs, by its index in `Graph.states`
    """

    x: str
    width: int
    weight: ArrayRef
    out: str
    state: int
    bias: ArrayRef | None = None


@dataclass(frozen=True)
class RowBefore(Operation):
    """out = what x[:, :width] was of the row of the slot before, for drafts of a multi-token prediction layer (Qwen3.5).

    Before slot 0 it is 0.  `keeps`: x of this row is what the next slot reads; without it x is not read, and another one of the
    same state has to keep something before the next row runs.

    state   a "tail" of one input, by its index in `Graph.states`
    """

    x: str
    width: int
    out: str
    state: int
    keeps: bool = True

    def reads(self) -> tuple[str, ...]:
        return (self.x,) if self.keeps else ()


@dataclass(frozen=True)
class DeltaRule(Operation):
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464): each value head has a state S [key_dim, value_dim], first 0.

    x holds queries and keys [key_heads, key_dim] and values [value_heads, value_dim] side by side, rates b and a [value_heads]
    side by side.  For a row and value head h, with the query and the key of head h // (value_heads / key_heads), both divided
    by sqrt(sum of squares + UNIT_EPS), the query by sqrt(key_dim) too, beta = beta_scale sigmoid(b)
    and g = -exp(decay_log) softplus(a + dt_bias):

        S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  out = S^T q

    A row computes that from S as it was before its log and from k, d and g of the rows of the log up to it, j < t (log form):

        w_j = exp(g of rows j + 1 ... t), e = exp(g of rows up to t), both summed from the newest row back
        d_t = beta (v - e S^T k_t - sum over j < t of w_j (k_j . k_t) d_j)
        out = e S^T q_t + sum over j <= t of w_j (k_j . q_t) d_j

    The last row of a log makes e S + sum over j of w_j k_j d_j^T the S of the next.

    decay_log, dt_bias   arrays [value_heads];  state: `delta_state` of its sizes, by its index in `Graph.states`
    """

    x: str
    rates: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decay_log: ArrayRef
    dt_bias: ArrayRef
    beta_scale: float
    out: str
    state: int

    READS = ("x", "rates")

    @property
    def log_places(self) -> tuple[int, int]:
        """Where d and g begin in a row of the log, after k."""
        d = self.key_heads * padded_head(self.key_dim)
        return d, d + self.value_heads * padded_head(self.value_dim)


def padded_head(dim: int) -> int:
    return -(-dim // HEAD_LANES) * HEAD_LANES


def delta_state(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> StateSpec:
    """The state of a delta rule of these sizes: S of each value head, and a log of keys, d, both padded by heads, and g."""
    log = key_heads * padded_head(key_dim) + value_heads * padded_head(value_dim) + value_heads
    return StateSpec("sum", (value_heads, key_dim, value_dim), log)


HEADS_TOGETHER = 4
"""Heads, at most, that share what the log of a state space has of B."""


@dataclass(frozen=True)
class SsdScan(Operation):
    """The scan of a state space of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): each head has a state S [state_dim, head_dim],
    first 0.

    x holds the inputs u [heads, head_dim], B and C, both [groups, state_dim], side by side.  For a row and head h, with B and C
    of group h // (heads / groups), step = softplus(dt + dt_bias) within `limits` and g = -exp(decay_log) step:

        S <- exp(g) S + B (step u)^T;  out = S^T C + skip u

    A row computes that from S as it was before its log and from B, step u and g of the rows of the log up to it, as of
    DeltaRule:

        out = e S^T C_t + sum over j <= t of w_j (B_j . C_t) step_j u_j + skip u_t

    The last row of a log makes e S + sum over j of w_j B_j (step_j u_j)^T the S of the next.

    dt   a buffer [heads];  decay_log, dt_bias, skip: arrays [heads];  state: `ssd_state` of its sizes, by its index in
         `Graph.states`
    """

    x: str
    dt: str
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    decay_log: ArrayRef
    dt_bias: ArrayRef
    skip: ArrayRef
    limits: tuple[float, float]
    out: str
    state: int

    READS = ("x", "dt")

    @property
    def shared(self) -> int:
        return heads_together(self.heads, self.groups)

    @property
    def log_places(self) -> tuple[int, int]:
        """Where step u and g begin in a row of the log, after B, once for each `shared` heads."""
        u = self.heads // self.shared * padded_head(self.state_dim)
        return u, u + self.heads * padded_head(self.head_dim)


def heads_together(heads: int, groups: int) -> int:
    """Heads that share B in the log: so few that threads find work, so many that it is small beside what they have apart."""
    return next(count for count in range(HEADS_TOGETHER, 0, -1) if heads // groups % count == 0)


def ssd_state(heads: int, head_dim: int, groups: int, state_dim: int) -> StateSpec:
    """The state of a state space of these sizes: S of each head, and a log of B, step u, both padded, and g."""
    log = heads // heads_together(heads, groups) * padded_head(state_dim) + heads * padded_head(head_dim) + heads
    return StateSpec("sum", (heads, state_dim, head_dim), log)


@dataclass(frozen=True)
class GatedNorm(Operation):
    """RmsNorm over each head of x, then times silu(gate) (Qwen3-Next); `gate_first`: before it in place of after (Mamba-2).

    gate   a buffer, whose columns from `offset` on are as wide as x;  gain [head_dim], or of every head [heads * head_dim]
    """

    x: str
    gate: str
    offset: int
    heads: int
    head_dim: int
    gain: ArrayRef
    eps: float
    out: str
    gate_first: bool = False

    READS = ("x", "gate")


@dataclass(frozen=True)
class Gate(Operation):
    """x[:, :width] *= f(gate[:, offset : offset + width]), in place: f is the sigmoid (Qwen3-Next), silu (Falcon-H1), or None,
    the gate itself."""

    x: str
    gate: str
    offset: int
    width: int
    function: Literal["sigmoid", "silu"] | None = "sigmoid"

    READS = ("x", "gate")
    WRITES = ("x",)


@dataclass(frozen=True)
class ValueNorm(Operation):
    """x[:, out : out + heads * head_dim] = x[:, offset : ...] / sqrt(mean(x^2) + eps), head by head; `out` may be `offset`
    (Gemma 4: values, which may be made of keys)."""

    x: str
    offset: int
    out: int
    heads: int
    head_dim: int
    eps: float

    WRITES = ("x",)

    def columns(self, width: int) -> tuple[int, int]:
        return self.out, self.out + self.heads * self.head_dim


@dataclass(frozen=True)
class ArrayScale(Operation):
    """x *= the number in `factor`, an array [1], in place (Gemma 4: the residual stream after each layer)."""

    x: str
    factor: ArrayRef

    WRITES = ("x",)


@dataclass(frozen=True)
class ScaleAdd(Operation):
    """out += x times a constant."""

    x: str
    factor: float
    out: str

    READS = ("x", "out")


@dataclass(frozen=True)
class Route(Operation):
    """out[:, :chosen] = the largest of softmax(x[:, :experts]), falling, with `normalized` divided by their sum; and
    out[:, chosen : 2 chosen] = the experts' indices, as numbers; ties go to the lower index.

    bias   f32 [experts]: the numbers are factor / (1 + exp(-x)) in place of a softmax, those with the largest sum with it are
           chosen, in that order, and what they are divided by is 1e-20 more (DeepSeek-V3, arXiv 2412.19437)
    """

    x: str
    experts: int
    chosen: int
    normalized: bool
    out: str
    bias: ArrayRef | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class ShareScale(Operation):
    """routing[:, i] *= scales[expert i of the row], i < chosen, in place: shares and experts as of Route (Gemma 4).

    scales   array [experts]
    """

    routing: str
    chosen: int
    scales: ArrayRef

    READS = ("routing",)
    WRITES = ("routing",)


@dataclass(frozen=True)
class SoftCap(Operation):
    """x = cap * tanh(x / cap), in place (Gemma 2: logits)."""

    x: str
    cap: float

    WRITES = ("x",)


@dataclass(frozen=True)
class Limit(Operation):
    """out[:, offset : offset + width] = the nearest numbers from least to most to those of x; out may be x.

    MPT: queries, keys and values; Gemma 4: what linear layers of its vision tower read and give.  NaN stays.

    least, most   perhaps infinite, least <= most
    """

    x: str
    offset: int
    width: int
    least: float
    most: float
    out: str

    def columns(self, width: int) -> tuple[int, int]:
        return self.offset, self.offset + self.width


@dataclass(frozen=True)
class RowMean(Operation):
    """out = the mean of `count` parts of x, side by side, each as wide as out (Gemma 3: neighbouring patches)."""

    x: str
    count: int
    out: str


@dataclass(frozen=True)
class ScaleShift(Operation):
    """x = x * scale + shift, channel by channel, in place (Gemma 4: means of patches).

    scale, shift   arrays as wide as x
    """

    x: str
    scale: ArrayRef
    shift: ArrayRef

    WRITES = ("x",)


@dataclass(frozen=True)
class GatedAdd(Operation):
    """out += sigmoid(gate[:, 0]) * x."""

    x: str
    gate: str
    out: str

    READS = ("x", "gate", "out")
