"""Reads calibration samples: a folder with pictures, and samples.jsonl with questions about them and their answers.

Each line is an object with `image`, a file name, or `images`, a list of them, `question` and `answer`.  A sample is what the
model reads and says: the question in the chat template, the pictures' tokens, and the answer, so that the rows of decoding are
observed like those of a prompt.  Pictures come from anybody: they are read as `edgeq run` reads them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.converters.checkpoint.tokenizer import TextAssets
from edgeq.errors import CheckpointError, EdgeqError, InputError, UnsupportedError
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.pictures.image import Picture, read_picture
from edgeq.pictures.prompt import PicturePlace, placed
from edgeq.text.chat_template import ChatTemplate
from edgeq.text.tokenizer import Tokenizer

FILE = "samples.jsonl"
MAX_FILE = 256 << 20
MAX_LINE = 1 << 20
MAX_IMAGES = 64
MAX_SAMPLES = 128
"""That are used unless more are asked for, evenly spaced."""
MAX_TOKENS = 576
"""Tokens of a picture whose size is not the model's own: all attention scores of a tower stand in memory."""
KEYS = ("image", "images", "question", "answer")


@dataclass(frozen=True)
class PictureFile:
    """A picture that was read once: its patches are not kept.

    most_tokens   that it may have
    piece         which of its pieces this is;  tiling, tiles: as of Picture
    """

    path: Path
    vision: VisionConfig
    most_tokens: int
    grid: tuple[int, int, int]
    digest: bytes
    piece: int = 0
    tiling: tuple[int, int] = (0, 0)
    tiles: tuple[PictureFile, ...] = ()

    @property
    def pieces(self) -> tuple[PictureFile, ...]:
        return self.tiles or (self,)

    def read(self) -> Picture:
        """CheckpointError: it is not the picture that it was."""
        found = read_picture(self.path, self.vision, self.most_tokens).pieces[self.piece]
        if found.digest != self.digest:
            raise CheckpointError(f"{self.path}: the picture changed while it was used; run the same command again")
        return found


@dataclass(frozen=True)
class PictureSample:
    """A question about pictures and its answer as tokens, those of pictures in them.

    places     of the pictures among the tokens
    """

    tokens: list[int]
    pictures: tuple[PictureFile, ...]
    places: tuple[PicturePlace, ...]


@dataclass(frozen=True)
class PictureSamples:
    """Samples, the folder's name and the digest of what was used of it."""

    source: str
    sha256: str
    samples: tuple[PictureSample, ...]

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def longest(self) -> int:
        return max(len(sample.tokens) for sample in self.samples)

    @property
    def pictures(self) -> tuple[PictureFile, ...]:
        return tuple(picture for sample in self.samples for picture in sample.pictures)

    def few(self, count: int) -> PictureSamples:
        """About `count` of them, evenly spaced."""
        return PictureSamples(self.source, self.sha256, self.samples[:: -(-len(self.samples) // count)])


def read_samples(folder: Path, config: ModelConfig, text: TextAssets, most: int | None = None) -> PictureSamples:
    """At most `most` samples of `folder`; None: MAX_SAMPLES.

    InputError: there are none, a line is not one, a picture is missing or cannot be read, or a sample is longer than what the
    model takes.  UnsupportedError: the model has no chat template; Pillow is not installed.
    """
    vision = config.vision
    if vision is None:
        raise InputError(f"--calibration {folder}: a folder of pictures, and this model reads text alone; give a text file")
    if config.bidirectional_prompt:
        raise UnsupportedError(
            f"--calibration {folder}: in a prompt of this model ({config.model_type}) tokens see those after them, through "
            "which no pictures are calibrated yet; calibrate with a text"
        )
    lines = _lines(folder / FILE)
    count = min(most or MAX_SAMPLES, len(lines))
    chosen = [lines[i * len(lines) // count] for i in range(count)]
    if "chat_template" not in text.blobs:
        raise UnsupportedError("the checkpoint has no chat template, which says where a picture goes; calibrate with a text")
    encoder = Tokenizer(text.blobs["tokenizer.json"], text.generation)
    template = ChatTemplate(text.blobs["chat_template"].decode("utf-8"), encoder, True, vision.texts)
    most_tokens = vision.most_tokens
    if vision.tokens_vary:
        most_tokens = max(vision.piece_tokens(1), min(most_tokens, MAX_TOKENS, config.max_position_embeddings // 2))
    digest, found = hashlib.sha256(), []
    # All lines before the first picture: those take longer.
    places = [(f"{folder / FILE} line {number}", line) for number, line in chosen]
    for where, values in [(where, _checked(line, where)) for where, line in places]:
        pictures = [_picture(folder, name, vision, most_tokens, where) for name in values["images"]]
        sample = _sample(values, pictures, config, template, encoder, where)
        digest.update(json.dumps([sample.tokens, [file.digest.hex() for file in sample.pictures]]).encode())
        found.append(sample)
    return PictureSamples(folder.name, digest.hexdigest(), tuple(found))


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines of the file that are not empty, and their numbers."""
    try:
        if not path.is_file() and path.exists():
            # A pipe would be waited for.
            raise InputError(f"{path}: not a regular file; give a folder with one sample per line in {FILE}")
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise InputError(f"{path}: more than {MAX_FILE >> 20} MiB, which are the most that is read")
        found = [(i + 1, line) for i, line in enumerate(text.splitlines()) if line.strip()]
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}; a folder of calibration pictures needs it") from None
    if not found:
        raise InputError(f"{path}: no samples; expected a line for each, with image, question and answer")
    return found


def _checked(line: bytes, where: str) -> dict[str, Any]:
    """`question`, `answer` and `images` of a line.  InputError: it is no sample."""
    if len(line) > MAX_LINE:
        raise InputError(f"{where}: {len(line)} bytes; at most {MAX_LINE >> 20} MiB are read")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{where}: not an object; expected image, question and answer")
    for key in ("question", "answer"):
        if not isinstance(values.get(key), str) or not values[key].strip():
            raise InputError(f"{where}: {key} is {str(values.get(key))[:80]!r}; every sample needs its {key}, a text")
    one, several = values.get("image"), values.get("images")
    names = [one] if several is None and one is not None else several if one is None else None
    if not isinstance(names, list) or not 0 < len(names) <= MAX_IMAGES or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}: expected `image`, a file name, or `images`, a list of 1 to {MAX_IMAGES} of them")
    return {"question": values["question"], "answer": values["answer"], "images": names}


def _picture(folder: Path, name: str, vision: VisionConfig, most_tokens: int, where: str) -> PictureFile:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise InputError(f"{where}: image {name[:80]!r} is outside of the folder; expected a name in it")
    try:
        found = read_picture(folder / path, vision, most_tokens)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    pieces = tuple(
        PictureFile(folder / path, vision, most_tokens, piece.grid, piece.digest, number)
        for number, piece in enumerate(found.pieces)
    )
    return replace(pieces[-1], tiling=found.tiling, tiles=pieces if found.tiles else ())


def _sample(
    values: dict[str, Any],
    pictures: list[PictureFile],
    config: ModelConfig,
    template: ChatTemplate,
    encoder: Tokenizer,
    where: str,
) -> PictureSample:
    assert config.vision is not None
    turns = [{"role": "user", "content": values["question"]}, {"role": "assistant", "content": values["answer"]}]
    try:
        image_token = config.vision.image_token_id
        tokens = template.encode_with_images(turns, len(pictures), image_token, add_generation_prompt=False)
        tokens, places = placed(tokens, pictures, config.vision, encoder.encode_part)
    except EdgeqError as error:
        raise type(error)(f"{where}: {error}") from None
    if len(tokens) > (most := config.max_position_embeddings):
        raise InputError(f"{where}: {len(tokens)} tokens with its pictures; this model takes at most {most}")
    return PictureSample(tokens, tuple(piece for picture in pictures for piece in picture.pieces), places)
