"""The expert of a policy, which makes actions of what a decoder has read, as a stack of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.json_records import check_integer, check_positive, list_of
from edgeq.network.rope import UNROTATED
from edgeq.network.stack import Stack
from edgeq.network.stack_json import read_stack

MAX_ACTIONS = 4096
MAX_STEPS = 1024
MAX_NUMBERS = 1 << 16
MAX_STATISTIC = 1e12
SMALL = 1e-8
"""What divides a number that never changed."""
STATISTICS = ("state_mean", "state_std", "action_mean", "action_std")


@dataclass(frozen=True, kw_only=True)
class PolicyStack(Stack):
    """Layers whose rows see, in each layer, keys and values of the decoder's layer of the same index beside their own (π0:
    Black et al. 2024, arXiv 2410.24164).

    state_size    numbers of a robot's state;  action_size: of an action
    actions       that are made together
    steps         of Euler's method, from noise to actions, unless others are asked for
    min_period, max_period   of the sines and cosines of the time, geometric between
    state_mean, state_std, action_mean, action_std
                  of the data that the policy was trained with, number by number, in a robot's own units: it reads and makes
                  x = (own - mean) / (std + 1e-8); empty: what it is given and gives is x itself
    """

    state_size: int
    action_size: int
    actions: int
    steps: int
    min_period: float
    max_period: float
    state_mean: tuple[float, ...] = ()
    state_std: tuple[float, ...] = ()
    action_mean: tuple[float, ...] = ()
    action_std: tuple[float, ...] = ()

    prefix: ClassVar[str] = "expert."

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in {
            "state_size": MAX_NUMBERS,
            "action_size": MAX_NUMBERS,
            "actions": MAX_ACTIONS,
            "steps": MAX_STEPS,
        }.items():
            check_integer(name, getattr(self, name), 1, most)
        for name in ("min_period", "max_period"):
            check_positive(name, getattr(self, name))
        for what, most in (("state", self.state_size), ("action", self.action_size)):
            means, stds = (self._statistics(f"{what}_{kind}") for kind in ("mean", "std"))
            if len(means) != len(stds) or len(means) > most or min(stds, default=0) < 0 or bool(means) != bool(self.state_mean):
                raise FormatError(
                    f"config policy: {what}_mean has {len(means)} numbers, {what}_std {len(stds)}; expected as many, at most "
                    f"{most}, of both state and action or of neither, and no std below 0"
                )
        if self.hidden_size % 2:
            raise FormatError(
                f"config policy: hidden_size is {self.hidden_size}; expected an even number, for sines and cosines"
            )

    def _statistics(self, name: str) -> tuple[float, ...]:
        """FormatError: a mean or a standard deviation is no finite number."""
        found: tuple[float, ...] = getattr(self, name)
        if not all(type(x) in (int, float) and abs(x) <= MAX_STATISTIC for x in found):
            raise FormatError(f"config policy: {name} has something that is no number from -1e12 to 1e12")
        return found

    def read_state(self, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the policy reads of a state in a robot's own units, float32 [numbers]."""
        if not self.state_mean:
            return own
        mean, std = (np.array(each, np.float32) for each in (self.state_mean, self.state_std))
        return np.asarray((own - mean) / (std + np.float32(SMALL)), np.float32)

    def own_actions(self, made: NDArray[np.float32]) -> NDArray[np.float32]:
        """Actions in a robot's own units, float32 [actions, numbers that have statistics], of what the policy made."""
        if not self.action_mean:
            return made
        mean, std = (np.array(each, np.float32) for each in (self.action_mean, self.action_std))
        return np.asarray(made[:, : len(mean)] * std + mean, np.float32)

    def check_beside(self, decoder: Stack) -> None:
        """UnsupportedError: it cannot read the keys and values of the decoder."""
        for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
            if getattr(self, name) != getattr(decoder, name):
                raise UnsupportedError(
                    f"policy: {name} is {getattr(self, name)}, the decoder's {getattr(decoder, name)}; they must be the same"
                )
        plain = self.alike and self.pre_norms and self.rope.kind not in UNROTATED and not self.state_layers
        other = (*self.sliding_windows, *decoder.sliding_windows, self.num_experts, self.hidden_size_per_layer_input)
        if not plain or any(other) or self.layer_norm or self.post_norms or self.parallel or self.normed_residual != "none":
            raise UnsupportedError("a policy is supported with layers of attention and an MLP, without sliding windows")

    def angles(self, time: float) -> NDArray[np.float32]:
        """Sines and cosines of a time in float32, each step rounded as where the policy was trained: a fast one turns 1,571
        times a unit of time."""
        share = np.linspace(0, 1, self.hidden_size // 2, dtype=np.float32)
        least, ratio = np.float32(self.min_period), np.float32(self.max_period / self.min_period)
        turns = np.float32(1) / (least * ratio**share) * np.float32(2) * np.float32(np.pi) * np.float32(time)
        return np.concatenate([np.sin(turns), np.cos(turns)]).astype(np.float32)

    @classmethod
    def read(cls, data: Any, where: str) -> PolicyStack:
        """FormatError, UnsupportedError: a key or a value that cannot be one."""
        if not isinstance(data, dict):
            raise FormatError(f"{where} is not a JSON object")
        lists = {key: list_of(data, key, MAX_NUMBERS, where) for key in STATISTICS}
        return read_stack(cls, data, where, **lists)
