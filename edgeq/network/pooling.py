"""How a model that embeds makes one vector of a text, and the instructions that it was trained to read before one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.json_records import check_flag, known

POOLINGS = ("last", "mean")
MAX_CHARACTERS = 1 << 17
"""Characters of all instructions of a file and of their names: as JSON they are then within what metadata may have."""


@dataclass(frozen=True)
class Pooling:
    """The vector of a text, from the states after the last norm: that of its last token, or the mean of all.

    normalize   divided by its Euclidean norm
    """

    kind: str
    normalize: bool

    def __post_init__(self) -> None:
        if self.kind not in POOLINGS:
            raise UnsupportedError(f"pooling {str(self.kind)[:40]!r} is not supported; supported: {', '.join(POOLINGS)}")
        check_flag("pooling normalize", self.normalize)

    @classmethod
    def read(cls, data: Any, where: str) -> Pooling:
        """FormatError, UnsupportedError: a key or a value that cannot be one."""
        return cls(**known(cls, data, where))


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
