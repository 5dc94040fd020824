"""Texts that a prompt has beside the tokens of a picture and of its tiles: a checked record of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from edgeq.errors import FormatError
from edgeq.network.json_records import known

MAX_TEXT = 256
"""Characters of each."""


@dataclass(frozen=True, kw_only=True)
class PictureTexts:
    """A picture is cut into tiles, which come row by row, and the whole one after them; a small one has no tiles.

    place        a text of the prompt in whose place a picture comes;  shown: what is read there, the image token in it.  Where
                 it is empty the image token itself is the place
    begin, end   before and after all of it
    tile         before each tile; {row} and {column} in it are those of the tile, from 1
    row          after each row of tiles
    whole        before the whole one, after its tiles;  alone: where it has none

    FormatError: a value that is no text, or a long one.
    """

    begin: str = ""
    tile: str = ""
    row: str = ""
    whole: str = ""
    alone: str = ""
    end: str = ""
    place: str = ""
    shown: str = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is not str or len(value) > MAX_TEXT:
                raise FormatError(f"config vision texts: {each.name} is {value!r:.80}; expected at most {MAX_TEXT} characters")
        if bool(self.place) != bool(self.shown):
            raise FormatError(
                f"config vision texts: place {self.place!r:.80} with shown {self.shown!r:.80}; expected both or none"
            )

    def placed(self, text: str) -> str:
        """A part of a prompt with the image token and what is around it for every place of a picture."""
        return text.replace(self.place, self.shown) if self.place else text

    def before(self, rows: int, columns: int) -> Iterator[str]:
        """What comes before each tile of so many rows and columns, and before the whole picture; then what ends it."""
        pending = self.begin
        for row in range(rows):
            for column in range(columns):
                yield pending + self.tile.replace("{row}", str(row + 1)).replace("{column}", str(column + 1))
                pending = ""
            pending = self.row
        yield pending + (self.whole if rows else self.alone)
        yield self.end

    def record(self) -> dict[str, Any]:
        newer = ("place", "shown")
        return {key: value for key, value in asdict(self).items() if value or key not in newer}

    @classmethod
    def read(cls, data: Any, where: str) -> PictureTexts:
        """FormatError, UnsupportedError: a key or a value that cannot be one."""
        return cls(**known(cls, data, where))
