"""A stack from the JSON of a file."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from edgeq.network.delta_net import DeltaNet
from edgeq.network.json_records import known, list_of
from edgeq.network.rope import Rope
from edgeq.network.ssd import StateSpace
from edgeq.network.stack import MAX_SIZES, Stack

LISTS = ("sliding_windows", "layers_without_rope", "window_layers", "tap_layers", "conv_layers")
"""Fields with an entry for layers."""
NETS: dict[str, type[DeltaNet] | type[StateSpace]] = {"delta_net": DeltaNet, "ssd": StateSpace}
"""Fields that say which layers have a state, with its sizes."""
Config = TypeVar("Config", bound="Stack")


def read_stack(cls: type[Config], data: dict[str, Any], where: str, **made: Any) -> Config:
    """A Stack of the JSON object `data`; `made`: fields that were read already."""
    ropes: dict[str, Any] = {"rope": Rope.from_json(data.pop("rope", {}), f"{where} rope")}
    if (local := data.pop("local_rope", None)) is not None:
        ropes["local_rope"] = Rope.from_json(local, f"{where} local_rope")
    most = MAX_SIZES["num_hidden_layers"]
    keys = [f.name for f in fields(cls) if f.name in LISTS]
    lists: dict[str, Any] = {key: list_of(data, key, most, where) for key in keys}
    for name, kind in NETS.items():
        if (found := data.pop(name, None)) is not None:
            made[name] = kind.read(found, f"{where} {name}", most)
    apart = frozenset({"rope", "local_rope", *NETS, *lists, *made})
    return cls(**ropes, **lists, **made, **known(cls, data, where, apart))
