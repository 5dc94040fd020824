"""What quantization lost in a model that embeds texts: the cosine of each vector with that of the source, and its neighbour."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model
from edgeq.runtime.network.embedding import check_embeds
from edgeq.text.tokenizer import Tokenizer
from edgeq.tools.cli.terminal import Report, progress
from edgeq.tools.measure.report import in_columns
from edgeq.tools.measure.statistics import paired_difference
from edgeq.tools.quality import corpus
from edgeq.tools.quality.scorers import CheckpointScorer, Windows, facts_of
from edgeq.tools.quality.windows import cut, read_documents

Vectors = NDArray[np.float64]


def compare_vectors(
    models: Sequence[Path], against: str, text: str, *, window: int, limit: int, as_json: bool, options: dict[str, Any]
) -> None:
    """To standard output, of every file: the cosines of the vectors of windows of text with those of the source, and how often
    the nearest of the other windows is the same.

    InputError, ResourceError: as `edgeq.tools.commands.compare.compare`; files that pool differently.
    """
    files = [ModelFile.open(path) for path in models]
    source = ModelFile.open(Path(against)) if against.endswith(".edgeq") else None
    every = [*files, source] if source else files
    kinds = {check_embeds(file).kind for file in every}
    if len(kinds) > 1:
        raise InputError(f"the files pool differently ({' and '.join(sorted(kinds))}); compare files of the same model")
    scorer = None if source else CheckpointScorer(against, options.get("threads", 0), kinds.pop())
    longest = min(file.metadata.config.max_position_embeddings for file in every)
    documents = read_documents(text)
    windows = whole_texts(Tokenizer.from_file(files[0]), documents, min(window, longest), limit)
    if int(windows.max()) >= min(file.metadata.config.vocab_size for file in files):
        raise InputError("the files differ in their tokens; compare files of the same model")
    with progress() as report:
        name = scorer.name if scorer else Path(against).name
        wanted = unit(scorer.vectors(windows, report) if scorer else of_file(Path(against), windows, options, report)[0])
        found = []
        for path in models:
            vectors, facts = of_file(path, windows, options, report)
            if vectors.shape != wanted.shape:
                raise InputError(f"{path}: vectors of {vectors.shape[1]} dimensions, {name} gives {wanted.shape[1]}")
            found.append({"file": path.name, **facts, **measured(unit(vectors), wanted)})
    result = {"source": {"name": name}, "files": found, "windows": len(windows), "window": windows.shape[1]}
    result |= {"text": text, "text_sha256": corpus.digest(documents)}
    click.echo(json.dumps(result, indent=1) if as_json else table(result))


def whole_texts(reader: Tokenizer, documents: Sequence[str], size: int, limit: int) -> Windows:
    """Windows [windows, size] that begin and end as the tokenizer begins and ends a text.  InputError: too little text."""
    inner = reader.encode_part("a")
    whole = reader.encode("a")
    at = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
    begin, end = whole[:at], whole[at + len(inner) :]
    encode: Callable[[str], list[int]] = reader.encode_part
    windows = cut(documents, encode, max(1, size - len(begin) - len(end)), limit)
    ends = [np.tile(np.array(tokens, np.int64), (len(windows), 1)) for tokens in (begin, end)]
    return np.concatenate([ends[0], windows, ends[1]], axis=1)


def of_file(
    path: Path, windows: Windows, options: dict[str, Any], report: Report
) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """The vectors of windows by a file, and what it is."""
    with Model.load(path, context=windows.shape[1], **options) as model:
        label = f"{path.name}: windows"
        vectors = model.embed(windows.tolist(), on_progress=lambda done, total: report(done, total, label))
        return vectors, facts_of(model)


def unit(vectors: NDArray[np.float32]) -> Vectors:
    wide = vectors.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))


def measured(vectors: Vectors, wanted: Vectors) -> dict[str, Any]:
    """For unit vectors [windows, hidden] mean cosine with its 95 % interval, the least, and equal nearest neighbours."""
    cosines = (vectors * wanted).sum(1)
    mean = paired_difference(cosines, np.zeros(len(cosines)), np.ones(len(cosines)))
    return {
        "cosine": vars(mean),
        "cosine_least": float(cosines.min()),
        "nearest_agreement": float((nearest(vectors) == nearest(wanted)).mean()),
    }


def nearest(vectors: Vectors) -> NDArray[np.intp]:
    """The index of the nearest other vector of each."""
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -np.inf)
    found: NDArray[np.intp] = similar.argmax(1)
    return found


def table(result: dict[str, Any]) -> str:
    """Text with one line per file."""
    rows = [("model", "bits", "MB", "mode", "cosine with source", "least", "same nearest")]
    for f in result["files"]:
        mean = "{value:.5f} ({low:.5f} to {high:.5f})".format(**f["cosine"])
        size = f"{f['bits_per_weight']:.2f}", f"{f['bytes'] / 1e6:,.1f}", f["mode"]
        rows.append((f["file"], *size, mean, f"{f['cosine_least']:.5f}", f"{100 * f['nearest_agreement']:.1f} %"))
    lines = in_columns(rows)
    lines.append(
        f"source {result['source']['name']}; {result['windows']} windows of {result['window']} tokens of {result['text']}"
    )
    return "\n".join(lines)
