"""How a model that embeds makes one vector of a text, and the instructions that it was trained to read before one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.json_records import check_flag, check_integer, known, list_of

POOLINGS = ("last", "mean", "cls")
DENSE_ACTIVATIONS = ("none", "tanh", "sigmoid", "gelu")
MAX_DENSE, MAX_WIDTH = 8, 131_072
"""Dense layers of a file, and channels of one: published models have two, of 3072."""
MAX_CHARACTERS = 1 << 17
"""Characters of all instructions of a file and of their names: as JSON they are then within what metadata may have."""


@dataclass(frozen=True)
class DenseLayer:
    """activation(W x + bias) of a vector.

    width   channels of the result
    norm    that goes through a LayerNorm without bias, with the epsilon of the model's norms
    """

    width: int
    bias: bool = False
    activation: str = "none"
    norm: bool = False

    def __post_init__(self) -> None:
        check_integer("dense width", self.width, 1, MAX_WIDTH)
        check_flag("dense bias", self.bias)
        check_flag("dense norm", self.norm)
        if self.activation not in DENSE_ACTIVATIONS:
            found, able = str(self.activation)[:40], ", ".join(DENSE_ACTIVATIONS)
            raise UnsupportedError(f"activation {found!r} of a dense layer is not supported; supported: {able}")

    def record(self) -> dict[str, Any]:
        """What JSON holds of it: a norm only where it has one."""
        return {key: value for key, value in asdict(self).items() if value or key != "norm"}


@dataclass(frozen=True)
class Pooling:
    """The vector of a text, from the states after the last norm: that of its last token, the mean of all, or that of the first
    token ("cls").

    normalize   divided by its Euclidean norm
    dense       layers that it goes through before
    ranks       the text is a pair, and its vector one number: how well the second answers the first
    """

    kind: str
    normalize: bool
    dense: tuple[DenseLayer, ...] = ()
    ranks: bool = False

    def __post_init__(self) -> None:
        if self.kind not in POOLINGS:
            raise UnsupportedError(f"pooling {str(self.kind)[:40]!r} is not supported; supported: {', '.join(POOLINGS)}")
        check_flag("pooling normalize", self.normalize)
        if len(self.dense) > MAX_DENSE:
            raise FormatError(f"config pooling has {len(self.dense)} dense layers; at most {MAX_DENSE} are possible")
        check_flag("pooling ranks", self.ranks)
        if self.ranks and (self.normalize or not self.dense or self.dense[-1].width != 1):
            raise FormatError("config pooling ranks, and its vector is not one number as the last dense layer gives it")

    def shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """(rows, columns) of the dense layers of a model whose states have `hidden_size` channels."""
        widths = [hidden_size, *(layer.width for layer in self.dense)]
        return list(zip(widths[1:], widths[:-1], strict=True))

    def arrays(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the dense layers, of their biases and norms."""
        found: dict[str, tuple[int, ...]] = {}
        for index, (layer, shape) in enumerate(zip(self.dense, self.shapes(hidden_size), strict=True)):
            found[f"dense.{index}"] = shape
            found |= {f"dense.{index}_{name}": shape[:1] for name in ("bias", "norm") if getattr(layer, name)}
        return found

    def vector_size(self, hidden_size: int) -> int:
        """Channels of a vector."""
        return self.dense[-1].width if self.dense else hidden_size

    def record(self) -> dict[str, Any]:
        """What JSON holds of it: dense layers, and that it ranks, only where that is so."""
        found = asdict(self) | {"dense": [layer.record() for layer in self.dense]}
        return {key: value for key, value in found.items() if value or key not in ("dense", "ranks")}

    @classmethod
    def read(cls, data: Any, where: str) -> Pooling:
        """FormatError, UnsupportedError: a key or a value that cannot be one."""
        values = dict(known(cls, data, where))
        layers = list_of(values, "dense", MAX_DENSE, where)
        return cls(**values, dense=tuple(DenseLayer(**known(DenseLayer, each, f"{where} dense layer")) for each in layers))


@dataclass(frozen=True)
class EmbeddingPrompts:
    """Texts that come before what is embedded, by name, such as "query"; `default`: the name of that without a choice."""

    texts: Mapping[str, str]
    default: str | None = None

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> EmbeddingPrompts:
        """Those of a file.  FormatError: they are not what a converter writes."""
        texts, default = generation.get("prompts", {}), generation.get("default_prompt")
        if not isinstance(texts, dict):
            raise FormatError("prompts of a model that embeds are not an object")
        for name, text in texts.items():
            if not isinstance(text, str):
                raise FormatError(f"prompt {name[:40]!r} of a model that embeds is not text")
        if (found := sum(len(name) + len(text) for name, text in texts.items())) > MAX_CHARACTERS:
            raise FormatError(f"prompts of a model that embeds have {found} characters; at most {MAX_CHARACTERS} are possible")
        if default is not None and (not isinstance(default, str) or default not in texts):
            raise FormatError(f"the default prompt is {str(default)[:40]!r}; there are {', '.join(texts)[:200] or 'none'}")
        return cls(texts, default)


PLACES = ("instruction", "query", "document")
"""What a prompt of a model that ranks has a place for, each once."""


@dataclass(frozen=True)
class RankingPrompt:
    """What a decoder that ranks reads: `before`, then `pair`, then `after`.

    before, after   control tokens that they spell are control tokens
    pair            has {instruction}, {query} and {document}, each once; what it spells is text
    instruction     where none is given
    """

    before: str
    pair: str
    after: str
    instruction: str

    def __post_init__(self) -> None:
        texts = asdict(self)
        if any(not isinstance(text, str) for text in texts.values()):
            raise FormatError("the prompt of a model that ranks has something that is not text")
        if (found := sum(map(len, texts.values()))) > MAX_CHARACTERS:
            raise FormatError(f"the prompt of a model that ranks has {found} characters; at most {MAX_CHARACTERS} are possible")
        for place in PLACES:
            if self.pair.count(f"{{{place}}}") != 1:
                raise FormatError(f"the prompt of a model that ranks has not one {{{place}}}")

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> RankingPrompt | None:
        """That of a file; None: pairs of texts are joined by the tokenizer.  FormatError: it is not what a converter writes."""
        found = generation.get("ranking_prompt")
        return None if found is None else cls(**known(cls, found, "the prompt of a model that ranks"))

    def filled(self, query: str, document: str, instruction: str | None = None) -> str:
        """`pair` with what it has places for, which is not looked at for places again."""
        texts = dict(zip(PLACES, (self.instruction if instruction is None else instruction, query, document), strict=True))
        return re.sub("{(" + "|".join(PLACES) + ")}", lambda place: texts[place[1]], self.pair)
