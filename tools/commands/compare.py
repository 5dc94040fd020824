"""`edgeq compare`: what a file lost against its source, over windows of the same text.

Each window starts with an empty cache; its first token is only context.  The source is scored first, and only what
`edgeq.tools.quality.predictions` keeps of it stays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import numpy as np

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.runtime.network.embedding import check_continues
from edgeq.tools.cli.terminal import Report, progress
from edgeq.tools.hub.fetch import checkpoint_source
from edgeq.tools.hub.names import is_hub_name
from edgeq.tools.measure.report import in_columns
from edgeq.tools.measure.statistics import Array, paired_difference, percentile
from edgeq.tools.quality import corpus
from edgeq.tools.quality.compare_actions import compare_actions
from edgeq.tools.quality.compare_vectors import compare_vectors
from edgeq.tools.quality.predictions import Divergence, Predictions
from edgeq.tools.quality.scorers import CheckpointScorer, FileScorer, Scorer, Windows
from edgeq.tools.quality.windows import cut, read_documents

WINDOW = 512


@dataclass(frozen=True)
class Scores:
    """The results of one model.

    weights  which weights it ran with
    facts    of the file: bits per weight, bytes, mode, codec of the cache
    nll      negative log-likelihood of every window in nats, a sum over its predicted tokens, [windows]
    kl       KL divergence from the source in nats, [tokens]
    agree    predictions whose most probable token is that of the source
    """

    name: str
    nll: list[float]
    kl: Array
    agree: int
    weights: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def compare(
    *,
    models: tuple[Path, ...],
    against: str,
    text: str,
    window: int | None,
    limit: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Perplexity, KL divergence and top-1 agreement of every file against the source, to standard output; of files that embed
    texts the cosine similarity of vectors, and of policies the error of actions.

    `options` go to Model.load.

    InputError: a text that cannot be read or is too short, or models that do not share a vocabulary.
    ResourceError: too little memory to score the source.
    """
    configs = {path: ModelFile.open(path).metadata.config for path in models}
    if embed := [path for path in models if configs[path].pooling]:
        if len(embed) < len(models):
            raise InputError(f"{embed[0]} embeds texts and others continue them; compare files of the same model")
        compare_vectors(models, against, text, window=window or WINDOW, limit=limit, as_json=as_json, options=options)
        return
    if acting := [path for path in models if configs[path].policy]:
        if len(acting) < len(models):
            raise InputError(f"{acting[0]} makes actions and others continue texts; compare files of the same model")
        compare_actions(models, against, text, as_json=as_json, options=options)
        return
    if is_hub_name(against):
        against, _ = checkpoint_source(against, HubAccess(), with_tower=False)
    if against.endswith(".edgeq"):
        check_continues(ModelFile.open(Path(against)))
    files = [FileScorer(path, window, options) for path in models]
    source: Scorer
    if against.endswith(".edgeq"):
        # Requantization is for the files that are compared, not for the source.
        source = FileScorer(Path(against), window, options | {"requantization": None})
    else:
        source = CheckpointScorer(against, options.get("threads", 0))
    for scorer in files:
        if scorer.vocab_size != source.vocab_size:
            raise InputError(
                f"{scorer.name} has {scorer.vocab_size} tokens, {source.name} {source.vocab_size}: not the same model; "
                "compare a file with the checkpoint it was made from"
            )
    documents, encode = read_documents(text), files[0].model.text.encode
    others = [other for other in (*files[1:], source) if isinstance(other, FileScorer)]
    for other in others:
        if other.model.text.encode(documents[0]) != encode(documents[0]):
            raise InputError(f"{other.name} and {files[0].name} have different tokenizers; compare files of the same model")
    size = min(window or WINDOW, source.longest, *(scorer.longest for scorer in files))
    windows = cut(documents, encode, size, limit)
    with progress() as report:
        reference = source.predictions(windows, report)
        scores = [score(scorer, reference, windows, report, scorer.weights, scorer.facts) for scorer in files]
    result = summarize(source.name, reference, scores, windows)
    result |= {"text": text, "text_sha256": corpus.digest(documents), "window": size}
    click.echo(json.dumps(result, indent=1) if as_json else table(result))


def score(
    scorer: Scorer, reference: Predictions, windows: Windows, report: Report, weights: str, facts: dict[str, Any]
) -> Scores:
    """Run a model over all windows against the predictions of the source."""
    divergence = Divergence(reference, windows[:, 1:].ravel())
    scorer.run(windows, divergence.add, report)
    nll = of_windows(divergence.nll, windows)
    return Scores(scorer.name, nll, divergence.kl(), int(divergence.agrees.sum()), weights, facts)


def of_windows(nll: Array, windows: Windows) -> list[float]:
    """Sums over the predicted tokens of each window."""
    sums: list[float] = nll.reshape(len(windows), -1).sum(1).tolist()
    return sums


def summarize(source: str, reference: Predictions, scores: Sequence[Scores], windows: Windows) -> dict[str, Any]:
    """Everything that is reported, as plain values."""
    tokens, counts = len(reference.nll), [windows.shape[1] - 1] * len(windows)
    source_nll = of_windows(reference.nll, windows)
    files = []
    for s in scores:
        difference = paired_difference(s.nll, source_nll, counts)
        files.append(
            {
                "file": s.name,
                "weights": s.weights,
                **s.facts,
                "perplexity": float(np.exp(sum(s.nll) / tokens)),
                "kl_mean": float(s.kl.mean()),
                "kl_p99": percentile(s.kl.tolist(), 99),
                "top1_agreement": s.agree / tokens,
                "window_nll": s.nll,
                "window_kl": of_windows(s.kl, windows),
                "nll_difference": vars(difference),
                "perplexity_ratio": vars(difference.exp()),
            }
        )
    pairs = [
        {"file": b.name, "against": a.name, "perplexity_ratio": vars(paired_difference(b.nll, a.nll, counts).exp())}
        for a, b in combinations(scores, 2)
    ]
    return {
        "source": {"name": source, "perplexity": float(np.exp(sum(source_nll) / tokens))},
        "files": files,
        "pairs": pairs,
        "windows": len(windows),
        "predicted_tokens": tokens,
    }


def percent(ratio: dict[str, float]) -> str:
    """`+1.30 % (+1.10 to +1.50)`: how much higher the perplexity is, with its 95 % interval."""
    value, low, high = (100 * (ratio[key] - 1) for key in ("value", "low", "high"))
    return f"{value:+.2f} % ({low:+.2f} to {high:+.2f})"


def table(result: dict[str, Any]) -> str:
    """Text with one line per model, and one for each file against the one before it; --json has all pairs."""
    source = result["source"]
    head = ("model", "bits", "MB", "mode", "perplexity", "against source", "KL mean", "KL p99", "top-1")
    rows = [head, (source["name"], "", "", "", f"{source['perplexity']:.3f}", "", "", "", "")]
    for f in result["files"]:
        ratio = percent(f["perplexity_ratio"])
        agreement = f"{100 * f['top1_agreement']:.1f} %"
        size = f"{f['bits_per_weight']:.2f}", f"{f['bytes'] / 1e6:,.1f}", f["mode"]
        found = f"{f['perplexity']:.3f}", ratio, f"{f['kl_mean']:.4f}", f"{f['kl_p99']:.3f}", agreement
        rows.append((f["file"], *size, *found))
    lines = in_columns(rows)
    names = [f["file"] for f in result["files"]]
    neighbours = set(zip(names[1:], names, strict=False))
    for pair in (pair for pair in result["pairs"] if (pair["file"], pair["against"]) in neighbours):
        lines.append(f"{pair['file']} against {pair['against']}: perplexity {percent(pair['perplexity_ratio'])}")
    lines += [f"{f['file']}: weights {f['weights']}" for f in result["files"] if f["weights"] != "the file's"]
    lines.append(
        f"{result['windows']} windows of {result['window']} tokens of {result['text']} "
        f"(sha256 {result['text_sha256'][:16]}); KL in nats; intervals: 95 %, paired bootstrap over windows"
    )
    return "\n".join(lines)
