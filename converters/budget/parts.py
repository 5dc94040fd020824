"""The parts of a model that get a codec each, and what each costs in every codec.

A part is a fused linear layer under its name in the file (`layers.3.qkv`, `layers.3.down`, `head`); the experts of a layer
share one codec for each projection: `layers.3.experts.gate_up`.  An `embedding` that is not the head is a part that takes
room in the file and, for a token, next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from edgeq.converters.budget.budget import Unit
from edgeq.converters.budget.menu import Menu
from edgeq.converters.budget.part_names import HEAD, TABLE, part_of
from edgeq.converters.rounding.linears import LinearItem
from edgeq.converters.rounding.presets import fitting_group_size
from edgeq.errors import EdgeqError, InputError
from edgeq.format.codec import GROUP_SIZES, ROWS, Codec
from edgeq.format.container import aligned
from edgeq.format.manifest import FLOAT_PARTS
from edgeq.network.config import ModelConfig


@dataclass(frozen=True)
class AllocationPart:
    """Linear layers, all of the same shape, that get one codec.

    layer    the decoder layer; None: the head, or the embedding
    share    of its weights that is read for a token: of experts, those that a token uses; 0 of an embedding
    menu     what candidates are taken from
    """

    name: str
    items: tuple[LinearItem, ...]
    layer: int | None
    share: Fraction
    menu: Menu = Menu()

    @property
    def columns(self) -> int:
        return self.items[0].columns

    @property
    def weights(self) -> int:
        return sum(item.rows * item.columns for item in self.items)

    def candidates(self) -> tuple[Codec, ...]:
        """The codecs to choose from; group sizes that divide the columns, where one does."""
        sizes = sorted({fitting_group_size(self.columns, size) for size in GROUP_SIZES})
        rings = all(rows % ROWS == 0 for item in self.items for _, rows in item.tensors[:-1])
        return self.menu.codecs(sizes, rings)

    @cached_property
    def _segments(self) -> dict[Codec, tuple[int, ...]]:
        """Bytes of the arrays of one of the layers in codecs that were asked for: a search asks thousands of times."""
        return {}

    def cost(self, codec: Codec, unit: Unit) -> int:
        """Bytes in `codec`, as `unit` counts them: read for a token, in the file with its padding, or of the numbers alone,
        those of an embedding left out.
        """
        count = len(self.items)
        if codec not in self._segments:
            first = self.items[0]
            self._segments[codec] = replace(first, recipe=replace(first.recipe, codec=codec)).nbytes
        segments = self._segments[codec]
        if unit == "size":
            return count * sum(map(aligned, segments))
        if unit == "bits" and self.share:
            return count * sum(segments)
        return -int(-count * sum(segments) * self.share // 1)


def parts_of(items: Iterable[object], config: ModelConfig, menu: Menu) -> tuple[AllocationPart, ...]:
    """The parts of a file made of `items`, in execution order; what is no linear layer, and a vision tower, has none.

    menu   what their codecs are chosen from
    """
    found: dict[str, list[LinearItem]] = {}
    for item in items:
        if not isinstance(item, LinearItem):
            continue
        mine = item.name in (HEAD, TABLE) or item.name.startswith("layers.")
        if mine and item.name.split(".")[-1] not in FLOAT_PARTS:
            found.setdefault(part_of(item.name), []).append(item)
    used = Fraction(config.num_experts_per_tok, config.num_experts or 1)
    return tuple(
        AllocationPart(
            name,
            tuple(items),
            int(name.split(".")[1]) if name.startswith("layers.") else None,
            Fraction(0) if name == TABLE else used if ".experts." in name else Fraction(1),
            menu,
        )
        for name, items in found.items()
    )


def checked(allocation: Mapping[str, str], parts: Sequence[AllocationPart]) -> dict[str, str]:
    """`allocation`, part -> name of its codec, in execution order.

    InputError: it names a part that the model does not have, leaves one out, or has a codec that no weight can have.
    """
    names = [part.name for part in parts]
    unknown, missing = [name for name in allocation if name not in names], [name for name in names if name not in allocation]
    if unknown:
        raise InputError(f"the plan has a part {unknown[0]!r}, which the model does not have; its parts are {_listed(names)}")
    if missing:
        raise InputError(f"the plan leaves out {_listed(missing)}; give a codec to every part of the model")
    for name, codec in allocation.items():
        try:
            Codec.named(codec)
        except EdgeqError as error:
            raise InputError(f"the plan's part {name}: {error}") from None
    return {name: allocation[name] for name in names}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} ... {names[-1]}"
