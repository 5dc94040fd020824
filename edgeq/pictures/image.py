"""Pictures: a file becomes the patches that a vision tower reads.

Decoders of pictures are large C libraries, and a picture may come from anybody: it is decoded, turned, put on white and resized
in a child process with limits on memory and time (confinement.py), and what comes back is the small result.  Up to EXACT_PIXELS
it equals what transformers' processors make of it; larger ones are shrunk while they are read where the format allows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import EdgeqError, InputError, UnsupportedError
from edgeq.network.image_config import TILED, ImageConfig
from edgeq.pictures.tiling import Tiling
from edgeq.system.confinement import ConfinementLimits, LimitError, confined_bytes

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

    from edgeq.network.config import VisionConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
READ = "PNG, JPEG, WebP, GIF, BMP"
MAX_PIXELS = 100_000_000
"""The most of a file."""
EXACT_PIXELS = 1 << 24
"""Above this a JPEG may be decoded at a half, a quarter or an eighth of its size."""
PICTURE_LIMITS = ConfinementLimits(memory=8 * MAX_PIXELS + (64 << 20), seconds=60)
"""Pillow holds a colour picture with 4 bytes per pixel; turning it or taking its alpha away needs two of them."""
STRIP = 32
"""Lines of a picture that are put on white together."""
TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
         8: "ROTATE_90"}  # fmt: skip
"""What undoes an orientation of EXIF, by Pillow's name."""
ORIENTATION = 0x0112
DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as a vision tower reads it, with a byte for each colour of a pixel: a request may wait for long, and patches
    take four or eight times as much.

    stored    uint8 [n, channel, row, column], a patch each, or float32 [n, patch_width], channel, frame, row, column in each;
              those that become one token follow one another
    grid      frames, rows and columns of patches
    digest    of the pixels: pictures with the same one give the same features
    size      width and height of what was read
    notes     what the user should know of it
    read_s    seconds that reading took
    values    of each level, float32 [channel, 256], where bytes are stored;  frames: how often a patch has them
    tiles     pictures that a prompt has in its place, row by row, this one as a whole the last of them; empty: it alone
    tiling    rows and columns of tiles;  whole: it is none of them
    """

    stored: NDArray[np.uint8] | NDArray[np.float32]
    grid: tuple[int, int, int]
    digest: bytes
    size: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()
    read_s: float = 0.0
    values: NDArray[np.float32] | None = None
    frames: int = 1
    tiles: tuple[Picture, ...] = ()
    tiling: tuple[int, int] = (0, 0)
    whole: bool = True

    @property
    def pieces(self) -> tuple[Picture, ...]:
        """The pictures that a tower reads of it."""
        return self.tiles or (self,)

    @property
    def nbytes(self) -> int:
        return sum(tile.nbytes for tile in self.tiles) or self.stored.nbytes

    @property
    def patch_width(self) -> int:
        return math.prod(self.stored.shape[1:]) * self.frames

    @property
    def patches(self) -> NDArray[np.float32]:
        """float32 [n, patch_width]; made at every call where bytes are stored."""
        if self.values is None:
            return self.stored.astype(np.float32, copy=False)
        count, channels, *size = self.stored.shape
        made = np.empty((count, channels, self.frames, *size), np.float32)
        for channel in range(channels):
            made[:, channel] = self.values[channel][self.stored[:, channel, None]]
        return made.reshape(count, -1)

    @property
    def name(self) -> str:
        return f"{self.size[0]} x {self.size[1]}"


def read_picture(source: str | os.PathLike[str] | bytes | Image, vision: VisionConfig, most_tokens: int) -> Picture:
    """The patches of a picture file, of its bytes, or of a PIL.Image.Image.

    most_tokens   of the picture in the decoder; it is shrunk to them

    InputError: no such file, not a picture, damaged, more than 100 million pixels, more than 200 times as long as wide, or
    more tokens than may be.  UnsupportedError: Pillow is not installed.
    """
    started = perf_counter()
    image = _pillow()
    settings, edge, most_tokens = vision.image, vision.token_edge, most_tokens - vision.class_feature
    if isinstance(source, image.Image):
        name, answer = "picture", _of_open(source, settings, edge, most_tokens)
    elif isinstance(source, (str, os.PathLike, bytes)):
        name, file = ("picture", BytesIO(source)) if isinstance(source, bytes) else (os.fspath(source), _opened(source))
        with closing(file):
            answer = _in_child(name, file, settings, edge, most_tokens)
    else:
        raise InputError(f"a picture is {type(source).__name__}; expected a path, bytes or a PIL.Image.Image")
    head, _, data = answer.partition(b"\n")
    facts = json.loads(head)
    values, pixels, pieces, done = _values(vision), np.frombuffer(data, np.uint8), list[Picture](), 0
    for height, width in facts["sizes"]:
        grid = (1, height // edge * vision.merge, width // edge * vision.merge)
        each = pixels[done : done + 3 * height * width].reshape(height, width, 3)
        done += each.size
        frames = vision.temporal_patch_size
        pieces.append(Picture(_levels(each, vision), grid, _digest(grid, each), values=values, frames=frames, whole=False))
    notes, size = tuple(f"{name}: {note}" for note in facts["notes"]), tuple(facts["size"])
    read_s = perf_counter() - started
    found = replace(pieces[-1], size=size, notes=notes, read_s=read_s, whole=True)
    if settings.sizing not in TILED:
        return found
    tiling = tuple(facts["tiling"])
    return replace(found, digest=_digest(tiling, data), tiles=(*pieces[:-1], found), tiling=tiling)


def _digest(shape: tuple[int, ...], data: bytes | NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(json.dumps(shape).encode() + bytes(data), digest_size=DIGEST_BYTES).digest()


def _pillow() -> Any:
    try:
        from PIL import Image, WebPImagePlugin  # noqa: F401
    except ImportError:
        raise UnsupportedError("pictures are read by Pillow, which is not installed; run `pip install edgeq[vision]`") from None
    # Before a fork: else every child would import the readers again.
    Image.preinit()
    return Image


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    """InputError: it cannot be read, or is empty."""
    try:
        if os.path.isdir(path):
            raise InputError(f"{os.fspath(path)}: a folder; give the path of a picture")
        file = open(path, "rb")  # noqa: SIM115
        if os.fstat(file.fileno()).st_size == 0:
            file.close()
            raise InputError(f"{os.fspath(path)}: the file is empty")
        return file
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: cannot read it: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{os.fspath(path)!r}: no file can have this name") from None


def _descriptors(file: IO[bytes]) -> tuple[int, ...]:
    """The descriptor of a file; bytes in memory have none."""
    try:
        return (file.fileno(),)
    except OSError:
        return ()


def _in_child(name: str, file: IO[bytes], settings: ImageConfig, edge: int, most_tokens: int) -> bytes:
    try:
        return confined_bytes(lambda: _decoded(file, settings, edge, most_tokens), PICTURE_LIMITS, _descriptors(file))
    except LimitError as error:
        raise InputError(f"{name}: the picture cannot be read: {error}") from None
    except EdgeqError as error:
        raise type(error)(f"{name}: {error}") from None


def _decoded(file: IO[bytes], settings: ImageConfig, edge: int, most_tokens: int) -> bytes:
    """`_prepared` of a file."""
    from PIL import Image, UnidentifiedImageError

    # The size is checked below, before anything is decoded, and by another limit.
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with _one_error(), Image.open(file, formats=FORMATS) as image:
            return _prepared(image, settings, edge, most_tokens, ours=True)
    except UnidentifiedImageError:
        raise InputError(f"not a picture that can be read; supported: {READ}") from None
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _of_open(image: Image, settings: ImageConfig, edge: int, most_tokens: int) -> bytes:
    """`_prepared` of a picture that the caller opened, which Pillow may not have decoded yet."""
    try:
        with _one_error():
            return _prepared(image, settings, edge, most_tokens)
    except EdgeqError as error:
        raise type(error)(f"picture: {error}") from None


@contextmanager
def _one_error() -> Iterator[None]:
    """Readers of damaged files raise anything: an InputError of it."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except (EdgeqError, UnidentifiedImageError, MemoryError, RecursionError):
        raise
    except Exception as error:
        raise InputError(f"the picture is truncated or damaged: {error or type(error).__name__}") from None


def _prepared(image: Image, settings: ImageConfig, edge: int, most_tokens: int, ours: bool = False) -> bytes:
    """A line of JSON, then the pixels uint8 [height, width, 3] of the resized picture, or of each of its tiles.

    ours   `image` may be decoded at a part of its size, and its memory freed once it is not needed
    """
    from PIL import Image as pillow

    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{image.width} x {image.height} pixels; at most {MAX_PIXELS:,} are read: make it smaller")
    if not image.width or not image.height:
        raise InputError("the picture has no pixels")
    notes = []
    frames = getattr(image, "n_frames", 1) if image.format in ("GIF", "WEBP", "PNG") else 1
    if frames > 1:
        notes.append(f"{frames} frames; only the first is read")
    turn = TURNS.get(_orientation(image))
    swaps = turn in ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
    width, height = (image.height, image.width) if swaps else image.size
    tiling = settings.tiling(height, width, edge, most_tokens) if settings.sizing in TILED else None
    size = tiling.first if tiling else settings.size_of(height, width, edge, most_tokens)
    large = width * height > EXACT_PIXELS
    if large and ours:
        # Twice as large as it gets, so that the filter still decides how it looks.
        image.draft(image.mode, (2 * size[0], 2 * size[1]) if swaps else (2 * size[1], 2 * size[0]))
    if turn:
        turned = image.transpose(pillow.Transpose[turn])
        if ours:
            image.close()
        image = turned
    sizes = (size, tiling.whole) if tiling and any(tiling.whole) else (size,)
    image, *whole = _resized(image, sizes, pillow.Resampling[settings.resampling.upper()], 3.0 if large else None, ours)
    if settings.sizing == "factor" and size != settings.size_of(height, width, edge, settings.most_tokens(edge)):
        notes.append(f"shrunk to {size[1]} x {size[0]}, for at most {most_tokens} tokens")
    if settings.sizing == "crop":
        top, left = (size[0] - settings.height) // 2, (size[1] - settings.width) // 2
        image = image.crop((left, top, left + settings.width, top + settings.height))
    pieces, facts = [image], dict[str, Any](size=(width, height), notes=notes)
    if tiling:
        pieces, facts["tiling"] = _tiles(image, tiling, settings, *whole), (tiling.rows, tiling.columns)
        if tiling != settings.tiling(height, width, edge, settings.most_tokens(edge)):
            notes.append(f"cut into {len(pieces)} tiles, the whole among them, for at most {most_tokens} tokens")
    facts["sizes"] = [(each.height, each.width) for each in pieces]
    return json.dumps(facts).encode() + b"\n" + b"".join(each.tobytes() for each in pieces)


def _tiles(image: Image, tiling: Tiling, settings: ImageConfig, apart: Image | None = None) -> list[Image]:
    """The tiles of a picture of `tiling.first`, row by row, and the whole one as large as a tile.

    apart   the whole one, where it is not made of that picture but resized by itself
    """
    from PIL import Image as pillow

    filters, edge = pillow.Resampling[settings.resampling.upper()], settings.tile
    image = image.resize((tiling.size[1], tiling.size[0]), filters)
    corners = [(column * edge, row * edge) for row in range(tiling.rows) for column in range(tiling.columns)]
    whole = (apart or image.resize((edge, edge), filters)) if corners else image
    return [*(image.crop((left, top, left + edge, top + edge)) for left, top in corners), whole]


def _orientation(image: Image) -> int:
    """EXIF's; 1, upright, where there is none or it is damaged."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return 1


def _resized(image: Image, sizes: Sequence[tuple[int, int]], filters: Resampling, gap: float | None, ours: bool) -> list[Image]:
    """8 bits of red, green and blue, of each height and width, transparent parts on white.

    gap    as Pillow's `reducing_gap`
    ours   as of `_prepared`
    """
    from PIL import Image as pillow

    colours = _rgb(image)
    if ours and all(each is not image for each in colours):
        image.close()
    made = []
    for height, width in sizes:
        resized = [each.resize((width, height), filters, reducing_gap=gap) for each in colours]
        made.append(resized[0] if len(resized) == 1 else pillow.merge("RGB", resized))
    return made


def _rgb(image: Image) -> list[Image]:
    """8 bits of red, green and blue, transparent parts on white: one picture, or of a transparent one three of a colour each,
    which take 3 bytes per pixel where one would take 4."""
    from PIL import Image as pillow

    image.load()
    if image.mode == "F":
        raise InputError("a picture of floating-point numbers; expected 8 or 16 bits per channel")
    if image.mode.startswith("I"):
        # The upper byte, as Pillow takes it of 16-bit colours.
        return [pillow.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")]
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return [image if image.mode == "RGB" else image.convert("RGB")]
    colours = [pillow.new("L", image.size) for _ in range(3)]
    for top in range(0, image.height, STRIP):
        strip = image.crop((0, top, image.width, min(top + STRIP, image.height))).convert("RGBA")
        white = pillow.new("RGBA", strip.size, (255, 255, 255, 255))
        for colour, part in zip(colours, pillow.alpha_composite(white, strip).split(), strict=False):
            colour.paste(part, (0, top))
    return colours


def _levels(pixels: NDArray[np.uint8], vision: VisionConfig) -> NDArray[np.uint8]:
    """Patches uint8 [n, 3, size, size] of pixels uint8 [height, width, 3]; pixels beyond the last whole patch are left out."""
    size, merge = vision.patch_size, vision.merge
    rows, columns = pixels.shape[0] // size // merge, pixels.shape[1] // size // merge
    pixels = pixels[: rows * merge * size, : columns * merge * size]
    # Rows and columns of tokens, within a token, and of pixels within a patch.
    order = pixels.reshape(rows, merge, size, columns, merge, size, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return order.reshape(-1, 3, size, size)


def _values(vision: VisionConfig) -> NDArray[np.float32]:
    """What stands for each level of each channel, float32 [3, 256]."""
    # In the arithmetic of the processors: a product in float64, the rest in float32.
    values = (np.arange(256, dtype=np.float64) * vision.image.rescale).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None] for each in (vision.image.mean, vision.image.std))
    made: NDArray[np.float32] = (values - mean) / std
    return made
