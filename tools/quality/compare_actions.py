"""What quantization lost in a policy: how far its actions are from those of the source, from the same inputs and noise.

No data of robots are at hand: a situation is made of pictures, a state and noise by chance, and of a line of text.  How far
actions are apart is given in spreads, standard deviations, of each of their numbers in the source, over all situations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.runtime import Model
from edgeq.runtime.network.policy import check_acts
from edgeq.tools.cli.terminal import Report, progress
from edgeq.tools.measure.report import in_columns
from edgeq.tools.quality import corpus
from edgeq.tools.quality.scorers import facts_of
from edgeq.tools.quality.windows import read_documents

if TYPE_CHECKING:
    from PIL.Image import Image

SITUATIONS = 16
CAMERAS = 2
COARSE = 8
"""Random pixels of an edge, between which a picture changes smoothly."""
MAX_CHARACTERS = 80
Actions = NDArray[np.float64]


@dataclass(frozen=True)
class Situation:
    images: list[Image]
    text: str
    state: NDArray[np.float32]
    noise: NDArray[np.float32]


def compare_actions(models: Sequence[Path], against: str, text: str, *, as_json: bool, options: dict[str, Any]) -> None:
    """To standard output, of every file: the error of its actions, RMS and largest, in spreads of those of the source.

    InputError: the source is no file, a policy of other sizes, or a text that cannot be read or has no line.
    """
    if not against.endswith(".edgeq"):
        raise InputError(
            f"--against {against}: a policy is compared with a file of it; convert the checkpoint with --method none, and give "
            "what that makes"
        )
    configs = [ModelFile.open(path).metadata.config for path in (Path(against), *models)]
    for path, config in zip(models, configs[1:], strict=True):
        if sizes(config) != sizes(configs[0]):
            raise InputError(f"{path} takes or makes others than {against}; compare files of the same model")
    documents = read_documents(text)
    made = list(situations(configs[0], documents))
    with progress() as report:
        # Requantization is for the files that are compared, not for the source.
        wanted, _ = of_file(Path(against), made, options | {"requantization": None}, report)
        spreads = wanted.std(axis=(0, 1))
        # A number that is always the same has no spread to go by.
        some, found = spreads > 0, []
        if not some.any():
            raise InputError(f"{against}: its actions are always the same; there is no spread to compare with")
        for path in models:
            actions, facts = of_file(path, made, options, report)
            found.append({"file": path.name, **facts, **measured(actions[..., some], wanted[..., some], spreads[some])})
    result = {"source": {"name": Path(against).name, "spreads": spreads.tolist()}, "files": found, "situations": len(made)}
    result |= {"text": text, "text_sha256": corpus.digest(documents)}
    click.echo(json.dumps(result, indent=1) if as_json else table(result))


def sizes(config: ModelConfig) -> tuple[int, ...]:
    """What a policy takes and makes.  InputError: it is none."""
    expert = check_acts(config)
    return expert.state_size, expert.actions, expert.action_size, expert.steps, config.vocab_size


def situations(config: ModelConfig, documents: Sequence[str]) -> Iterator[Situation]:
    """The same ones whenever they are asked for.  InputError: no line in the documents."""
    from PIL import Image

    expert, vision = check_acts(config), config.vision
    assert vision is not None
    edge = vision.image.height
    lines = [line.strip()[:MAX_CHARACTERS] for document in documents for line in document.splitlines() if line.strip()]
    if not lines:
        raise InputError("the text has no line that could be an instruction; give one with --text")
    rng = np.random.default_rng(0)
    for i in range(SITUATIONS):
        pixels = rng.integers(0, 256, (CAMERAS, COARSE, COARSE, 3), np.uint8)
        images = [Image.fromarray(each).resize((edge, edge), Image.Resampling.BICUBIC) for each in pixels]
        state = rng.standard_normal(len(expert.state_mean) or expert.state_size, np.float32)
        if expert.state_mean:
            state = np.array(expert.state_mean, np.float32) + np.array(expert.state_std, np.float32) * state
        noise = rng.standard_normal((expert.actions, expert.action_size), np.float32)
        yield Situation(images, lines[i * len(lines) // SITUATIONS], state, noise)


def of_file(path: Path, made: Sequence[Situation], options: dict[str, Any], report: Report) -> tuple[Actions, dict[str, Any]]:
    """The actions of a file float64 [situations, actions, numbers], and what it is."""
    with Model.load(path, **options) as model:
        found = []
        for done, each in enumerate(made):
            report(done, len(made), f"{path.name}: situations")
            found.append(model.act(each.images, each.text, each.state, noise=each.noise))
        return np.stack(found).astype(np.float64), facts_of(model)


def measured(actions: Actions, wanted: Actions, spreads: Actions) -> dict[str, Any]:
    """RMS and largest error in spreads, over all and for each number of an action."""
    errors = np.abs(actions - wanted) / spreads
    return {
        "rms": float(np.sqrt(np.square(errors).mean())),
        "largest": float(errors.max()),
        "rms_of_numbers": np.sqrt(np.square(errors).mean(axis=(0, 1))).tolist(),
        "largest_of_numbers": errors.max(axis=(0, 1)).tolist(),
        "rms_of_situations": np.sqrt(np.square(errors).mean(axis=(1, 2))).tolist(),
    }


def table(result: dict[str, Any]) -> str:
    """Text with one line per file."""
    rows = [("model", "bits", "MB", "mode", "RMS error", "of its numbers", "largest error", "of its numbers")]
    for f in result["files"]:
        size = f"{f['bits_per_weight']:.2f}", f"{f['bytes'] / 1e6:,.1f}", f["mode"]
        ranges = (f"{min(f[key]):.4f} to {max(f[key]):.4f}" for key in ("rms_of_numbers", "largest_of_numbers"))
        rms, largest = ranges
        rows.append((f["file"], *size, f"{f['rms']:.4f}", rms, f"{f['largest']:.4f}", largest))
    lines = in_columns(rows)
    lines.append(
        f"source {result['source']['name']}; {result['situations']} situations by chance, lines of {result['text']} "
        f"(sha256 {result['text_sha256'][:16]}); errors in spreads of each number of an action in the source"
    )
    return "\n".join(lines)
