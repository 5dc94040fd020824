"""What a configuration says of how weights are quantized, checked as it is read: it is a stranger's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeq.errors import CheckpointError

MAX_SHOWN = 80


@dataclass(frozen=True)
class QuantizationSettings:
    """A JSON object.  `place`: where it stands, for messages."""

    values: Mapping[str, Any]
    place: str

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is there.  CheckpointError: none is and there is no default, or it is no integer."""
        return int(self._checked(keys, int, "an integer", default))

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        return bool(self._checked(keys, bool, "true or false", default))

    def text(self, *keys: str, default: str | None = None) -> str:
        """In lower case."""
        return str(self._checked(keys, str, "a text", default)).lower()

    def object(self, *keys: str) -> Mapping[str, Any]:
        """Empty where it is absent or null."""
        found: Mapping[str, Any] = self._checked(keys, dict, "an object", {})
        return found

    def _checked(self, keys: tuple[str, ...], kind: type, expected: str, default: Any) -> Any:
        key = next((each for each in keys if self.values.get(each) is not None), None)
        if key is None:
            if default is None:
                raise CheckpointError(f"{self.place}: has no {keys[0]}; download it again")
            return default
        found = self.values[key]
        if type(found) is not kind:
            raise CheckpointError(f"{self.place}: {key} is {str(found)[:MAX_SHOWN]!r}; expected {expected}")
        return found
