"""What a model reads: tokens, and pictures whose features stand in for some of them.

A picture takes as many tokens as it has features.  All of them are the model's image token, so that two pictures of one size
look the same in the tokens: their digests tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.network.config import VisionConfig
from edgeq.network.picture_texts import PictureTexts
from edgeq.network.rope import picture_positions
from edgeq.pictures.image import Picture

ArrayI32 = NDArray[np.int32]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class PicturePlace:
    """Where a picture is among tokens.

    start    the first of its tokens; of a prompt whose beginning is in a cache already it can be below 0
    grid     frames, rows and columns of its tokens
    digest   of the picture
    kept     how many of its tokens there are: all, unless a session forgot the rest
    """

    start: int
    grid: tuple[int, int, int]
    digest: bytes
    kept: int

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def end(self) -> int:
        return self.start + self.kept

    @property
    def span(self) -> int:
        """1 + the largest of `picture_positions` from 0 that its kept tokens have."""
        _, rows, columns = self.grid
        last = self.kept - 1
        return 1 + max(last // (rows * columns), min(last, rows * columns - 1) // columns, min(last, columns - 1))


@dataclass(frozen=True)
class Prompt:
    """tokens     those of pictures are in it
    pictures   in their order, of those that are cut their tiles;  places: theirs, ascending
    second     index of the token with which the second text of a pair begins; 0: there is none, or no token says so
    drawn      tokens at the end that are an answer's, which is read again
    """

    tokens: list[int]
    pictures: tuple[Picture, ...] = ()
    places: tuple[PicturePlace, ...] = ()
    second: int = 0
    drawn: int = 0

    def after(self, count: int) -> Prompt:
        """What is left to run where the first `count` tokens are in a cache."""
        left = [i for i, place in enumerate(self.places) if place.end > count]
        places = tuple(replace(self.places[i], start=self.places[i].start - count) for i in left)
        pictures, drawn = tuple(self.pictures[i] for i in left), min(self.drawn, len(self.tokens) - count)
        return Prompt(self.tokens[count:], pictures, places, drawn=drawn)

    @property
    def nbytes(self) -> int:
        """Bytes of the pictures."""
        return sum(picture.nbytes for picture in self.pictures)

    @property
    def visual_tokens(self) -> int:
        return sum(place.tokens for place in self.places)


def with_pictures(tokens: Sequence[int], pictures: Sequence[Picture], vision: VisionConfig, encode: Encode) -> Prompt:
    """`tokens` with as many image tokens as each picture needs, in place of one each.

    encode   a part of a text; for what a prompt has beside the tokens of pictures

    InputError: there are more image tokens than pictures, or fewer.
    """
    expanded, places = placed(tokens, pictures, vision, encode)
    return Prompt(expanded, tuple(piece for picture in pictures for piece in picture.pieces), places)


class Gridded(Protocol):
    """A picture that was read, or a tile of it, or a record of one."""

    @property
    def grid(self) -> tuple[int, int, int]: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def tiling(self) -> tuple[int, int]: ...

    @property
    def pieces(self) -> Sequence[Gridded]: ...


def tokens_of(picture: Gridded, vision: VisionConfig) -> int:
    """Tokens of a picture, those of its tiles."""
    return sum(math.prod(vision.token_grid(piece.grid)) for piece in picture.pieces)


def placed(
    tokens: Sequence[int], pictures: Sequence[Gridded], vision: VisionConfig, encode: Encode
) -> tuple[list[int], tuple[PicturePlace, ...]]:
    """The tokens of `with_pictures`, and the places of the pictures, or of their tiles."""
    image_token = vision.image_token_id
    slots = [i for i, token in enumerate(tokens) if token == image_token]
    if len(slots) != len(pictures):
        raise InputError(
            f"the prompt has {len(slots)} place{'s' * (len(slots) != 1)} for an image (token {image_token}), and "
            f"{len(pictures)} image{'s are' if len(pictures) != 1 else ' is'} given; give one for each"
        )
    expanded: list[int] = []
    places, done = [], 0
    for slot, picture in zip(slots, pictures, strict=True):
        expanded += tokens[done:slot]
        texts = (vision.texts or PictureTexts()).before(*picture.tiling)
        for piece, text in zip(picture.pieces, texts, strict=False):
            expanded += encode(text) if text else []
            grid = vision.token_grid(piece.grid)
            places.append(PicturePlace(len(expanded), grid, piece.digest, math.prod(grid)))
            expanded += [image_token] * math.prod(grid)
        expanded += encode(end) if (end := next(texts)) else []
        done = slot + 1
    return [*expanded, *tokens[done:]], tuple(places)


def positions(places: Sequence[PicturePlace], start: int, end: int, axes: int) -> ArrayI32:
    """Rotary positions int32 [axes, end - start] of the tokens from `start` to `end`.

    With one axis they are their indices.  With several (M-RoPE) those of a picture are its frames, rows and columns, and what
    comes after it goes on after the largest of them (Wang et al. 2024, arXiv 2409.12191, section 2.1).
    """
    if axes == 1:
        return np.arange(start, end, dtype=np.int32)[None]
    found = [np.zeros((axes, 0), np.int32)]
    for first, last, begin, place in _stretches(places, end):
        low, high = max(first, start), min(last, end)
        if low >= high:
            continue
        if place is None:
            found.append(np.tile(np.arange(begin + low - first, begin + high - first, dtype=np.int32), (axes, 1)))
        else:
            found.append(picture_positions(begin, place.grid)[:, low - first : high - first])
    return np.concatenate(found, axis=1)


def _stretches(places: Sequence[PicturePlace], end: int) -> Iterator[tuple[int, int, int, PicturePlace | None]]:
    """First token, the one after the last, and first position, of every text and every picture up to `end`."""
    token = position = 0
    for place in places:
        if place.start >= end:
            break
        yield token, place.start, position, None
        position += place.start - token
        yield place.start, place.end, position, place
        position, token = position + place.span, place.end
    yield token, end, position, None


def joined(before: Sequence[PicturePlace], places: Sequence[PicturePlace], length: int) -> tuple[PicturePlace, ...]:
    """The places of a session of `length` tokens, `before`, and those of a prompt that goes on from there.

    A picture that the session holds a part of goes on in the prompt.
    """
    moved = [replace(place, start=place.start + length) for place in places]
    return (*(place for place in before if not moved or place.start < moved[0].start), *moved)


def cut(places: Sequence[PicturePlace], length: int) -> tuple[PicturePlace, ...]:
    """The places within the first `length` tokens, the last perhaps with a part of its tokens."""
    return tuple(replace(p, kept=min(p.tokens, length - p.start)) for p in places if p.start < length)


def common(tokens: Sequence[int], places: Sequence[PicturePlace], prompt: Prompt) -> int:
    """How many tokens a session and a prompt share at the beginning; all but the last of the prompt at most."""
    shared = 0
    for ours, theirs in zip(tokens, prompt.tokens[:-1], strict=False):
        if ours != theirs:
            break
        shared += 1
    ours_at, theirs_at = ({place.start: (place.grid, place.digest) for place in found} for found in (places, prompt.places))
    different = [start for start in {**ours_at, **theirs_at} if ours_at.get(start) != theirs_at.get(start)]
    # What follows a part of a picture has other positions than the rest of it.
    cuts = [place.end for place in places if place.kept < place.tokens]
    return min([shared, *different, *cuts])
