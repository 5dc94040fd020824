"""How a picture becomes the pixels that a vision tower was trained on: a checked record of the configuration.

The rules are those of transformers' image processors (Qwen2-VL, CLIP, SigLIP, Gemma 3 and 4, Idefics3, GOT-OCR2, LFM2-VL),
whose settings are in a checkpoint's preprocessor_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.pictures.preprocessor import RESAMPLINGS, fields_of
from edgeq.pictures.tiling import MAX_TILED_EDGE, Tiling, tile_pairs, tile_pairs_of_set

TILED = ("tiles", "aspect", "large")
"""Sizings with tiles."""
VARYING = ("factor", "large", "budget")
"""Sizings by which pictures, or the whole ones after their tiles, differ in size."""
SIZINGS = ("factor", "crop", "fixed", *TILED, "budget")
MAX_PIXELS = 1 << 26
"""The most of a picture as the tower reads it: Qwen3-VL's limit is 2^24."""
MAX_EDGE = 1 << 13
MAX_ASPECT = 200
MAX_TILES_A_SIDE = 32
MAX_TILES = 64
"""Tiles of a picture that is cut by its aspect: a search goes through their pairs of rows and columns."""
NEWER_FIELDS = ("tile", "longest_edge", "min_tiles", "max_tiles", "tolerance", "least_edge")


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """pixel = (byte * rescale - mean) / std, of a picture that was resized before.

    sizing      "factor": height and width become multiples of a factor (of `size_of`), their product from min_pixels to
                max_pixels, in about the same proportion (Qwen2-VL); "crop": the shorter edge becomes `shortest_edge`, then
                height x width are cut out of the middle; "fixed": height x width, whatever the proportion; "tiles": the longer
                edge becomes `longest_edge`, then both become multiples of `tile`, and what is larger than one tile is cut into
                tiles, after which the whole picture comes as one (Idefics3); "aspect": it is resized to the rows and columns of
                tiles, from min_tiles to max_tiles together, whose proportion is nearest to its own, and cut into them, after
                which the whole picture comes as one where they are several (InternVL); "large": as "factor", and what would
                have more than `tolerance` times max_pixels comes in tiles as of "aspect" before it (LFM2-VL); "budget": it is
                made as large as max_pixels allow, then height and width are rounded down to multiples of the factor (Gemma 4)
    resampling  the filter, by Pillow's name
    mean, std   of red, green and blue
    least_edge  pixels that a shorter edge counts as where it is decided whether a picture is cut

    FormatError: a value of the wrong type or out of range.  UnsupportedError: an unknown kind.
    """

    sizing: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resampling: str = "bicubic"
    rescale: float = 1 / 255
    min_pixels: int = 0
    max_pixels: int = 0
    shortest_edge: int = 0
    height: int = 0
    width: int = 0
    tile: int = 0
    longest_edge: int = 0
    min_tiles: int = 0
    max_tiles: int = 0
    tolerance: float = 0.0
    least_edge: int = 0

    def __post_init__(self) -> None:
        for name, kinds in (("sizing", SIZINGS), ("resampling", RESAMPLINGS)):
            if (value := getattr(self, name)) not in kinds:
                raise UnsupportedError(f"image {name} {value!r:.80} is not supported; supported: {', '.join(kinds)}")
        pixels, edge, tiles = ("min_pixels", "max_pixels"), ("height", "width"), ("tile", "longest_edge")
        aspect = ("tile", "min_tiles", "max_tiles")
        used = {
            "factor": pixels,
            "crop": (*edge, "shortest_edge"),
            "fixed": edge,
            "tiles": tiles,
            "aspect": aspect,
            "large": (*pixels, *aspect, "least_edge"),
            "budget": ("max_pixels",),
        }[self.sizing]
        _number("tolerance", self.tolerance, *((1e-3, 1e3) if self.sizing == "large" else (0.0, 0.0)))
        for name in (*pixels, *edge, "shortest_edge", *tiles, *aspect[1:], "least_edge"):
            most = (MAX_PIXELS if name in pixels else MAX_TILES if name in aspect[1:] else MAX_EDGE) if name in used else 0
            value = getattr(self, name)
            if type(value) is not int or not min(1, most) <= value <= most:
                raise FormatError(f"image {name} is {value!r}; expected an integer from {min(1, most)} to {most}")
        for what in ("pixels", "tiles"):
            least, most = (getattr(self, f"{end}_{what}") for end in ("min", "max"))
            if least > most:
                raise FormatError(f"image min_{what} is {least}, above max_{what}, {most}")
        if self.sizing == "crop" and self.shortest_edge < max(self.height, self.width):
            raise UnsupportedError(
                f"images cropped to {self.height} x {self.width} after their shorter edge became {self.shortest_edge}, with a "
                "border around them, are not supported"
            )
        if self.tile**2 * self.max_tiles > MAX_PIXELS:
            raise FormatError(
                f"image has {self.max_tiles} tiles of {self.tile} x {self.tile} pixels; expected at most {MAX_PIXELS} pixels"
            )
        if self.sizing == "tiles" and self.longest_edge > MAX_TILES_A_SIDE * self.tile:
            raise FormatError(
                f"image longest_edge is {self.longest_edge}; expected at most {MAX_TILES_A_SIDE} times tile, {self.tile}"
            )
        _number("rescale", self.rescale, 1e-6, 1e3)
        for name, least in (("mean", -1e3), ("std", 1e-6)):
            numbers = getattr(self, name)
            if type(numbers) is not tuple or len(numbers) != 3:
                raise FormatError(f"image {name} is {numbers!r:.80}; expected three numbers")
            for number in numbers:
                _number(name, number, least, 1e3)

    def most_tokens(self, factor: int) -> int:
        """Tokens of `factor` x `factor` pixels that the largest picture has, by the file's own limits."""
        tiles = math.prod(self.most_tiles)
        if self.sizing in VARYING:
            return tiles * self._tile_tokens(factor) + self._whole_tokens(factor)
        return (tiles + (tiles > 1)) * self.piece_tokens(factor) if tiles else self.piece_tokens(factor)

    def largest_piece(self, factor: int) -> int:
        """Tokens of the largest picture that is not cut, or of a tile, if that has more."""
        if self.sizing not in VARYING:
            return self.piece_tokens(factor)
        return max(self._whole_tokens(factor), self._tile_tokens(factor) if any(self.most_tiles) else 0)

    def _whole_tokens(self, factor: int) -> int:
        most = max(1, self.max_pixels // factor**2)
        if self.sizing == "budget":
            return most
        # Of a long narrow one the shorter edge is not rounded to zero.
        return max(most, math.isqrt(MAX_ASPECT * most))

    def _tile_tokens(self, factor: int) -> int:
        return (self.tile // factor) ** 2

    def check_token(self, factor: int) -> None:
        """FormatError: no picture has a token of `factor` x `factor` pixels."""
        if not self.most_tokens(factor) or (any(self.most_tiles) and not self._tile_tokens(factor)):
            height, width = self.height or self.tile, self.width or self.tile
            raise FormatError(f"config vision: an image of {height} x {width} pixels has no token of {factor} x {factor}")

    @property
    def most_tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles of the picture that has the most of both; 0, 0: none is cut."""
        if self.sizing in ("aspect", "large"):
            return (self.max_tiles, 1) if self.sizing == "aspect" or self.max_tiles > 1 else (0, 0)
        edge = min(self.longest_edge, MAX_TILED_EDGE)
        # The other edge is rounded up to an even number.
        side = -(-(edge + edge % 2) // self.tile) if self.sizing == "tiles" else 0
        return side, side

    def piece_tokens(self, factor: int) -> int:
        """Tokens of a picture, or of a tile, where all have one size; 0: they have not."""
        if self.sizing in VARYING:
            return 0
        return self._tile_tokens(factor) if self.tile else (self.height // factor) * (self.width // factor)

    def tiling(self, height: int, width: int, factor: int, most_tokens: int) -> Tiling:
        """How a picture is cut into tiles; `factor`, `most_tokens`: as of `size_of`.

        InputError: as `size_of`, or one tile has more tokens than may be.
        """
        _check_shape(height, width)
        if self.sizing == "large":
            return self._tiling_of_large(height, width, factor, most_tokens)
        each = self.piece_tokens(factor)
        for found in self._tilings(height, width):
            if found.pieces * each <= most_tokens:
                return found
        raise InputError(f"every picture has at least {each} tokens for this model, and {most_tokens} are allowed")

    def _tilings(self, height: int, width: int) -> Iterator[Tiling]:
        """The processor's, and then those that fewer tiles would give."""
        if self.sizing == "aspect":
            for most in range(self.max_tiles, 0, -1):
                pairs = tile_pairs(min(self.min_tiles, most), most)
                yield Tiling.nearest(height, width, self.tile, pairs, (self.tile, self.tile))
        else:
            for side in range(-(-self.longest_edge // self.tile), 0, -1):
                yield Tiling.of(height, width, min(self.longest_edge, side * self.tile), self.tile)

    def _tiling_of_large(self, height: int, width: int, factor: int, most_tokens: int) -> Tiling:
        """LFM2-VL's, or with fewer tiles, or none."""
        rows, columns = (max(self.least_edge, round(edge / factor) * factor) for edge in (height, width))
        whole = _multiple(height, width, factor, self.min_pixels, self.max_pixels, most_tokens, first=1)
        if rows * columns > self.max_pixels * self.tolerance and self.max_tiles > 1:
            for most in range(self.max_tiles, self.min_tiles - 1, -1):
                found = Tiling.nearest(height, width, self.tile, tile_pairs_of_set(self.min_tiles, most), whole)
                tokens = found.rows * found.columns * self._tile_tokens(factor) + whole[0] * whole[1] // factor**2
                if found.pieces > 1 and tokens <= most_tokens:
                    return found
        return Tiling(whole, whole, 0, 0)

    def size_of(self, height: int, width: int, factor: int, most_tokens: int) -> tuple[int, int]:
        """Height and width to which a picture is resized, before it is cropped.

        factor       pixels of a token's edge;  most_tokens: of the picture, where `sizing` leaves a choice

        InputError: it is more than 200 times as long as it is wide, or has more tokens than may be.
        """
        _check_shape(height, width)
        if self.sizing == "factor":
            return _multiple(height, width, factor, self.min_pixels, self.max_pixels, most_tokens, first=0)
        if self.sizing == "budget":
            return _rounded_down(height, width, factor, min(self.max_pixels // factor**2, most_tokens))
        tokens = self.most_tokens(factor)
        if tokens > most_tokens:
            raise InputError(f"every picture has {tokens} tokens for this model, and {most_tokens} are allowed")
        if self.sizing == "fixed":
            return self.height, self.width
        short, long = self.shortest_edge, self.shortest_edge * max(height, width) // min(height, width)
        return (long, short) if width <= height else (short, long)

    def record(self) -> dict[str, Any]:
        """What JSON holds of it; fields that came after the first files only where they are set."""
        return {key: value for key, value in asdict(self).items() if key not in NEWER_FIELDS or value}

    @classmethod
    def from_json(cls, data: Any, where: str) -> ImageConfig:
        """FormatError, UnsupportedError: a key or a value that cannot be one."""
        if not isinstance(data, dict):
            raise FormatError(f"{where} is not a JSON object")
        if unknown := sorted(set(data) - {f.name for f in fields(cls)}):
            raise UnsupportedError(f"{where} has unknown keys {', '.join(unknown)}; this file needs a newer edgeq")
        if missing := sorted({"sizing", "mean", "std"} - set(data)):
            raise FormatError(f"{where} lacks {', '.join(missing)}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**values)

    @classmethod
    def from_preprocessor(cls, data: Any, sizes: Mapping[str, int]) -> ImageConfig:
        """The settings of a preprocessor_config.json; `sizes` and errors: as of `fields_of`."""
        return cls(**fields_of(data, sizes))


def _check_shape(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InputError(f"{width} x {height} pixels: more than {MAX_ASPECT} times as long as wide; crop it")


def _multiple(height: int, width: int, factor: int, least: int, most: int, most_tokens: int, *, first: int) -> tuple[int, int]:
    """The rule of Qwen2-VL's processor, but never more than `most_tokens`.

    first   the least rows and columns of tokens of a picture before it is enlarged: 0, or 1 as of LFM2-VL's
    """
    most = min(most, most_tokens * factor**2)
    least = min(least, most)
    # Python's `round`, to even, is that of the processor.
    rows, columns = max(first, round(height / factor)), max(first, round(width / factor))
    if rows * columns * factor**2 > most:
        beta = math.sqrt((height * width) / most)
        rows = max(1, math.floor(height / beta / factor))
        columns = max(1, math.floor(width / beta / factor))
    elif rows * columns * factor**2 < least:
        beta = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * beta / factor), math.ceil(width * beta / factor)
    rows, columns = max(1, rows), max(1, columns)
    if rows * columns > most_tokens:
        # A picture so long and narrow that one row of tokens has too many, or one enlarged to the least size.
        if rows > columns:
            rows = max(1, most_tokens // columns)
        else:
            columns = max(1, most_tokens // rows)
    return rows * factor, columns * factor


def _rounded_down(height: int, width: int, factor: int, tokens: int) -> tuple[int, int]:
    """The rule of Gemma 4's processor for at most so many tokens: a small picture is enlarged too."""
    scale = math.sqrt(tokens * factor**2 / (height * width))
    rows, columns = math.floor(scale * height / factor), math.floor(scale * width / factor)
    if rows == 0:
        rows, columns = 1, max(1, min(width // height, tokens))
    elif columns == 0:
        rows, columns = min(height // width, tokens), 1
    return rows * factor, columns * factor


def _number(name: str, value: object, least: float, most: float) -> None:
    """FormatError: not a number from `least` to `most`.  NaN is none."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise FormatError(f"image {name} is {value!r:.80}; expected a number from {least:g} to {most:g}")
