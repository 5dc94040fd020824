"""How a model sees: it reads pictures within its limits, and its vision tower makes features of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Union

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.network.config import ModelConfig
from edgeq.pictures.image import Picture, read_picture
from edgeq.pictures.prompt import PicturePlace, Prompt, tokens_of
from edgeq.runtime.arguments import integer, wrong
from edgeq.runtime.network.vision import Tower
from edgeq.targets.target import OnProgress, no_progress

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = Union[str, "os.PathLike[str]", bytes, "Image", Picture]
"""A path, the bytes of a file, a PIL.Image.Image, or what Model.read_image gave."""
MAX_TOKENS = 1280
"""The most of a picture unless more are asked for: files allow up to 16,384, which takes a processor minutes."""
MAX_IMAGES = 64


def check_image_tokens(config: ModelConfig, image_tokens: int | None) -> None:
    """InputError: `image_tokens` is out of range, or the model reads text alone."""
    if image_tokens is None:
        return
    if config.vision is None:
        raise InputError(f"`image_tokens` is given, and this model ({config.model_type}) reads text alone; leave it out")
    limit, varies = config.vision.most_tokens, config.vision.tokens_vary
    least = config.vision.piece_tokens(1) if varies else limit
    which = "the most that this model takes" if varies else "those of every picture of this model"
    integer("image_tokens", image_tokens, least, limit, f"{f'{least} to ' * (least < limit)}{limit}, {which}")


class Pictures:
    """most_tokens   of one picture;  axes: rotary positions of a token
    ranges        sliding windows that layers have, 0 for none, where tokens of a picture see all of it; else empty
    """

    def __init__(
        self, config: ModelConfig, context: int, image_tokens: int | None, compile_tower: Callable[[int, OnProgress], Tower]
    ) -> None:
        """config          of a model with a tower
        image_tokens    the most of one picture, which `check_image_tokens` has seen; None: as many as the file allows, at most
                        1,280 and half the context
        compile_tower   the vision tower for so many patches of a frame
        """
        assert config.vision is not None
        self.vision, self.axes, self.ranges = config.vision, config.rope.axes, config.picture_ranges
        limit = self.vision.most_tokens
        # Where all pictures have one size there is nothing to choose.
        self.most_tokens = image_tokens or max(1, min(limit, MAX_TOKENS, context // 2) if self.vision.tokens_vary else limit)
        self._compile: Callable[[int, OnProgress], Tower] | None = compile_tower
        self._tower: Tower | None = None
        self._lock = Lock()

    def read(self, source: ImageSource) -> Picture:
        """InputError: not a picture that can be read, or one read for another model.

        UnsupportedError: Pillow is not installed.
        """
        if not isinstance(source, Picture):
            return read_picture(source, self.vision, self.most_tokens)
        vision = self.vision
        for piece in source.pieces:
            _, rows, columns = piece.grid
            unfit = rows % vision.merge or columns % vision.merge or not vision.fits(rows * columns)
            if piece.patch_width != vision.patch_width or unfit:
                raise InputError("the picture was read for another model; read it with Model.read_image of this one")
        if (tokens := tokens_of(source, vision)) > self.most_tokens:
            raise InputError(
                f"the picture has {tokens} tokens, and this model is loaded for {self.most_tokens}; "
                "load it with a larger `image_tokens`, or read the picture again"
            )
        return source

    def read_all(self, sources: Sequence[ImageSource]) -> tuple[Picture, ...]:
        if not isinstance(sources, (list, tuple)) or len(sources) > MAX_IMAGES:
            raise wrong("images", sources, f"a list of at most {MAX_IMAGES} paths, bytes or PIL images")
        return tuple(map(self.read, sources))

    def prepare(self, on_progress: OnProgress = no_progress) -> Tower:
        """The tower, compiled when the first picture comes: a file is often used for text alone.

        ResourceError: it does not fit in memory.  InputError: the model is closed.
        """
        with self._lock:
            if self._compile is None:
                raise InputError("the model is closed; load it again")
            if self._tower is None:
                self._tower = self._compile(self.vision.piece_tokens(self.most_tokens) * self.vision.merge**2, on_progress)
            return self._tower

    def close(self) -> None:
        """End the threads of the tower, and drop its memory and the target: a GPU that failed works again after that."""
        with self._lock:
            self._compile = self._tower = None


class PictureFeatures:
    """The features of a prompt's pictures, made when the run comes to them and dropped after it.

    seconds   that the tower took so far
    """

    def __init__(self, pictures: Pictures, prompt: Prompt, places: tuple[PicturePlace, ...], lock: Lock) -> None:
        """`places`: of the session's pictures and the prompt's, whose own come last."""
        self.places, self.seconds = places, 0.0
        self._pictures, self._lock = pictures, lock
        new = places[len(places) - len(prompt.places) :]
        self._new = list(zip(new, prompt.pictures, strict=True))
        self._features: dict[int, NDArray[np.float32]] = {}

    def between(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Vectors float32 [V, width] that the tokens from `start` to `end` bring, and which each brings, int32; -1: none."""
        vectors = [np.zeros((0, self._pictures.vision.feature_size), np.float32)]
        which, count = np.full(end - start, -1, np.int32), 0
        for place, picture in self._new:
            low, high = max(place.start, start), min(place.end, end)
            if low >= high:
                continue
            vectors.append(self._made(place, picture)[low - place.start : high - place.start])
            which[low - start : high - start] = np.arange(count, count + high - low)
            count += high - low
            if high == place.end:
                del self._features[place.start]
        return np.concatenate(vectors), which

    def _made(self, place: PicturePlace, picture: Picture) -> NDArray[np.float32]:
        if place.start not in self._features:
            started = perf_counter()
            tower = self._pictures.prepare()
            with self._lock:
                self._features[place.start] = tower.encode(picture.patches, [picture.grid])
            self.seconds += perf_counter() - started
        return self._features[place.start]
