"""The expert of a policy, which makes actions of what a decoder has read, as a stack of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.json_records import check_integer, check_positive
from edgeq.network.stack import Stack
from edgeq.network.stack_json import read_stack

MAX_ACTIONS = 4096
MAX_STEPS = 1024


@dataclass(frozen=True, kw_only=True)
class PolicyStack(Stack):
    """Layers whose rows see, in each layer, keys and values of the decoder's layer of the same index beside their own (π0:
    Black et al. 2024, arXiv 2410.24164).

    state_size    numbers of a robot's state;  action_size: of an action
    actions       that are made together
    steps         of Euler's method, from noise to actions, unless others are asked for
    min_period, max_period   of the sines and cosines of the time, geometric between
    """

    state_size: int
    action_size: int
    actions: int
    steps: int
    min_period: float
    max_period: float

    prefix: ClassVar[str] = "expert."

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in {"state_size": 1 << 16, "action_size": 1 << 16, "actions": MAX_ACTIONS, "steps": MAX_STEPS}.items():
            check_integer(name, getattr(self, name), 1, most)
        for name in ("min_period", "max_period"):
            check_positive(name, getattr(self, name))
        if self.hidden_size % 2:
            raise FormatError(
                f"config policy: hidden_size is {self.hidden_size}; expected an even number, for sines and cosines"
            )

    def check_beside(self, decoder: Stack) -> None:
        """UnsupportedError: it cannot read the keys and values of the decoder."""
        for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
            if getattr(self, name) != getattr(decoder, name):
                raise UnsupportedError(
                    f"policy: {name} is {getattr(self, name)}, the decoder's {getattr(decoder, name)}; they must be the same"
                )
        plain = self.alike and self.pre_norms and self.rope.kind != "learned" and not self.state_layers
        other = (*self.sliding_windows, *decoder.sliding_windows, self.num_experts, self.hidden_size_per_layer_input)
        if not plain or any(other) or self.layer_norm or self.post_norms or self.parallel or self.normed_residual != "none":
            raise UnsupportedError("a policy is supported with layers of attention and an MLP, without sliding windows")

    @classmethod
    def read(cls, data: Any, where: str) -> PolicyStack:
        """FormatError, UnsupportedError: a key or a value that cannot be one."""
        if not isinstance(data, dict):
            raise FormatError(f"{where} is not a JSON object")
        return read_stack(cls, data, where)
