"""How a model that embeds makes one vector of a text, and the instructions that it was trained to read before one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeq.errors import FormatError, UnsupportedError
from edgeq.json_records import check_flag, known

POOLINGS = ("last", "mean")
MOST_PROMPTS, LONGEST_PROMPT = 512, 1 << 14
"""Instructions of a file, and characters of one."""


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
        if not isinstance(texts, dict) or len(texts) > MOST_PROMPTS:
            raise FormatError(f"prompts of a model that embeds are not an object of at most {MOST_PROMPTS}")
        for name, text in texts.items():
            if not isinstance(text, str) or max(len(name), len(text)) > LONGEST_PROMPT:
                raise FormatError(f"prompt {name[:40]!r} is not text of at most {LONGEST_PROMPT} characters")
        if default is not None and (not isinstance(default, str) or default not in texts):
            raise FormatError(f"the default prompt is {str(default)[:40]!r}; there are {', '.join(texts)[:200] or 'none'}")
        return cls(texts, default)
