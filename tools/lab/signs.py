"""Signs: small pictures of one to five characters, three kinds of question about them, and how many a model answers rightly.

    python -m edgeq.tools.lab.signs draw OUT --split evaluation --count 2048
    python -m edgeq.tools.lab.signs read FILE OUT --json

models/tiny-qwen2vl was trained on such signs.  Every sign has a seed of its own; the seeds of calibration and evaluation are
disjoint from each other and from those of the training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from edgeq.errors import InputError
from edgeq.tools.cli.entry import Commands
from edgeq.tools.cli.params import EdgeqFile
from edgeq.tools.cli.terminal import compilation, note, progress

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, HEIGHT = 140, 56
COLORS = {"red": (235, 20, 20), "green": (10, 190, 40), "blue": (20, 40, 235), "black": (0, 0, 0), "white": (255, 255, 255),
          "yellow": (250, 240, 20)}  # fmt: skip
CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
FONT_SIZES = (24, 28, 32, 36)
FIRST_SEED = {"calibration": 1 << 40, "evaluation": 1 << 41}
"""Training draws all its signs from generators that were seeded with 1 and 1,000,000."""
MAX_SIGNS = 1 << 30
SAMPLES = "samples.jsonl"
MAX_ANSWER_TOKENS = 16
"""Tokens."""


class Sign(NamedTuple):
    picture: Image
    text: str
    color: str


class Sample(NamedTuple):
    """A picture file, a question about it, and the answer."""

    image: str
    question: str
    answer: str


def draw(rng: random.Random, difficulty: float = 1.0) -> Sign:
    """One sign; at difficulty 0 all have one font and one place, and no noise."""
    from PIL import Image, ImageDraw, ImageFont

    text = "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(1, 5)))
    color = rng.choice(list(COLORS))
    spread = 28 * difficulty
    background = [122 + int(rng.uniform(-spread, spread)) for _ in range(3)]
    picture = Image.new("RGB", (WIDTH, HEIGHT), (background[0], background[1], background[2]))
    pen = ImageDraw.Draw(picture)
    size = rng.choice(FONT_SIZES) if rng.random() < difficulty else 28
    while size > FONT_SIZES[0] and pen.textlength(text, font=ImageFont.load_default(size)) > WIDTH - 4:
        size -= 4
    font = ImageFont.load_default(size)
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    x = 4 + difficulty * (rng.uniform(0, max(0, WIDTH - (right - left) - 2)) - 4)
    y = 14 + difficulty * (rng.uniform(0, max(0, HEIGHT - (bottom - top) - 2)) - 14)
    pen.text((int(x) - left, int(y) - top), text, font=font, fill=COLORS[color])
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 6 * difficulty + 0.01, (HEIGHT, WIDTH, 3))
    noisy = np.clip(np.asarray(picture, np.float32) + noise, 0, 255).astype(np.uint8)
    return Sign(Image.fromarray(noisy), text, color)


def question(rng: random.Random, text: str, color: str) -> tuple[str, str]:
    """A question about a sign, and its answer: seven of ten ask for the characters, the others for colour and number."""
    kind = rng.random()
    if kind < 0.7:
        return "What does the sign say?", " ".join(text)
    return ("What color is the text?", color) if kind < 0.85 else ("How many characters?", str(len(text)))


def write(folder: Path, split: str, count: int) -> None:
    """Draw `count` signs of a split: PNG files, and samples.jsonl with a question and an answer for each.

    InputError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / SAMPLES, "w", encoding="utf-8") as samples, progress() as report:
            for i in range(count):
                rng = random.Random(FIRST_SEED[split] + i)
                picture, text, color = draw(rng)
                asked, answer = question(rng, text, color)
                name = f"{i:06}.png"
                picture.save(folder / name)
                samples.write(json.dumps(Sample(name, asked, answer)._asdict()) + "\n")
                report(i + 1, count, "signs")
    except OSError as error:
        raise InputError(f"{folder}: cannot write signs: {error.strerror}") from None


def read(folder: Path) -> list[Sample]:
    """The samples that `write` wrote.  InputError: there are none, or a line is no sample."""
    try:
        lines = (folder / SAMPLES).read_text(encoding="utf-8").splitlines()
        found = [Sample(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / SAMPLES}: not samples of signs: {error}") from None
    if not found:
        raise InputError(f"{folder / SAMPLES}: no samples")
    return found


def answers(file: Path, folder: Path, **options: Any) -> Iterator[tuple[Sample, str]]:
    """Every sample and what the model in `file` answers, greedily."""
    from edgeq.runtime import Model

    with compilation() as report:
        model = Model.load(file, on_progress=report, **options)
        model.prepare_images(report)
    with model:
        for sample in read(folder):
            messages = [{"role": "user", "content": sample.question}]
            generation = model.chat(messages, images=[folder / sample.image], max_tokens=MAX_ANSWER_TOKENS)
            yield sample, generation.text().strip()


@click.group(cls=Commands)
def main() -> None:
    """Signs: pictures, questions and answers."""


@main.command("draw")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--split", type=click.Choice(list(FIRST_SEED)), default="evaluation", show_default=True)
@click.option("--count", type=click.IntRange(1, MAX_SIGNS), default=64, show_default=True)
def draw_command(out: Path, split: str, count: int) -> None:
    """Write PNG files and samples.jsonl to OUT."""
    write(out, split, count)


@main.command("read")
@click.argument("file", type=EdgeqFile())
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-t", "--threads", type=int, default=0, help="Threads; 0: the target chooses.")
def read_command(file: Path, folder: Path, as_json: bool, threads: int) -> None:
    """Ask the model in FILE every question of FOLDER, and count the answers that are exactly right."""
    right = []
    with progress() as report:
        total = len(read(folder))
        for i, (sample, answer) in enumerate(answers(file, folder, threads=threads)):
            right.append(int(answer == sample.answer))
            report(i + 1, total, "signs")
    if as_json:
        click.echo(json.dumps({"right": right, "accuracy": sum(right) / len(right)}))
    else:
        note(f"{sum(right)} of {len(right)} answered exactly: {100 * sum(right) / len(right):.1f} %")


if __name__ == "__main__":
    main()
