"""How long a picture takes: the vision tower, then the prompt with its features, up to the first token."""

from __future__ import annotations

import statistics
import struct
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import with_pictures
from edgeq.runtime import Model, Prompt

SEED = 0


@dataclass(frozen=True)
class PictureTimes:
    """One line of the table; seconds are medians of the repetitions.

    width, height   of the picture;  tokens: that it has in the decoder
    prompt_tokens   of the prompt: the picture and one token more
    read_s          reading it: resizing and cutting into patches
    vision_s        vision tower and projector
    prefill_s       running the prompt
    first_s         tower and prompt together: the time to the first token, but for reading
    samples_s       first_s of each repetition
    """

    width: int
    height: int
    tokens: int
    prompt_tokens: int
    read_s: float
    vision_s: float
    prefill_s: float
    first_s: float
    samples_s: list[float]


def measure(model: Model, size: tuple[int, int], repetitions: int, report: Callable[[float, str], None]) -> PictureTimes:
    """A warm-up, then `repetitions` timed runs of a picture of noise.

    InputError: the model reads text alone, or the picture does not fit its context.
    """
    picture, reading = drawn(model, size), list[float]()
    prompt = prompt_of(model, picture)
    samples = list[tuple[float, float]]()
    for i in range(repetitions + 1):
        report(i / (repetitions + 1), f"image {size[0]}x{size[1]}")
        reading.append(drawn(model, size).read_s)
        with model.session() as session:
            started = perf_counter()
            session.prefill(prompt)
            if i:
                samples.append((perf_counter() - started, session.vision_s))
    first = [seconds for seconds, _ in samples]
    return PictureTimes(
        width=size[0],
        height=size[1],
        tokens=prompt.visual_tokens,
        prompt_tokens=len(prompt.tokens),
        read_s=statistics.median(reading[1:]),
        vision_s=statistics.median(vision for _, vision in samples),
        prefill_s=statistics.median(seconds - vision for seconds, vision in samples),
        first_s=statistics.median(first),
        samples_s=first,
    )


def drawn(model: Model, size: tuple[int, int]) -> Picture:
    """A picture of noise, the same in every call, read by Pillow."""
    width, height = size
    stride = (3 * width + 3) // 4 * 4
    # A BMP can be written without Pillow: its two headers, then lines of whole words.
    head = struct.pack("<2sIIIIiiHHIIiiII", b"BM", 54 + stride * height, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return model.read_image(head + np.random.default_rng(SEED).bytes(stride * height))


def prompt_of(model: Model, picture: Picture) -> Prompt:
    """The picture and one token after it.  InputError: it is longer than the context."""
    vision = model.config.vision
    assert vision is not None
    after = (vision.image_token_id + 1) % model.config.vocab_size
    return with_pictures([vision.image_token_id, after], [picture], vision, model.text.encode_part)


def cells(lines: list[PictureTimes]) -> list[list[str]]:
    """The table, its heading first."""
    heading = ["picture", "tokens", "read ms", "tower ms", "prompt ms", "first token ms", "min – max"]
    return [heading] + [
        [
            f"{line.width} x {line.height}",
            str(line.tokens),
            f"{1000 * line.read_s:,.0f}",
            f"{1000 * line.vision_s:,.0f}",
            f"{1000 * line.prefill_s:,.0f}",
            f"{1000 * line.first_s:,.0f}",
            f"{1000 * min(line.samples_s):,.0f} – {1000 * max(line.samples_s):,.0f}",
        ]
        for line in lines
    ]
