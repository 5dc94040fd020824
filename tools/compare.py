"""`edgeq compare`: what a file lost against its source, over windows of the same text.

Each window starts with an empty cache; its first token is only context.  The log-probabilities of the source are held for one
window at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np

from edgeq.errors import InputError
from edgeq.runtime import Model
from edgeq.tools import corpus
from edgeq.tools.convert import quiet_libraries
from edgeq.tools.report import bits_per_weight
from edgeq.tools.statistics import Array, kl_divergence, log_softmax, paired_difference, percentile
from edgeq.tools.terminal import progress

WINDOW = 512
ROWS = 64
"""Positions of a file whose logits are in memory at a time; those of the source are there for a whole window."""


class Scorer(Protocol):
    """A model that computes logits, of at most `longest` tokens at a time."""

    name: str
    vocab_size: int
    longest: int

    def logits(self, tokens: Sequence[int]) -> Iterator[np.ndarray[Any, Any]]:
        """Parts, float32 [n, vocab], of the logits after each of `tokens`, from an empty cache."""
        ...


def facts_of(model: Model) -> dict[str, Any]:
    """What a result is to be weighed against: effective bits per weight, head included, bytes of the file, mode, cache."""
    bits = bits_per_weight(model.file.metadata, lambda name: True)
    options = model.program.options
    return {"bits_per_weight": bits, "bytes": model.file.size, "mode": options.mode, "kv": options.kv.name}


class FileScorer:
    """An .edgeq file."""

    def __init__(self, path: Path, window: int | None, options: dict[str, Any]) -> None:
        self.model = Model.load(path, context=window, max_logits=ROWS, **options)
        self.name, self.facts = path.name, facts_of(self.model)
        self.vocab_size = self.model.config.vocab_size
        self.longest = self.model.context
        self._session = self.model.session()

    @property
    def weights(self) -> str:
        """Which weights the logits are computed with."""
        return "made for each window from all of its own tokens" if self.model.requantization else "the file's"

    def logits(self, tokens: Sequence[int]) -> Iterator[np.ndarray[Any, Any]]:
        """With test-time requantization a window is read twice: with the masters, then with the requantized weights."""
        self._session.trim(0)
        if self.model.requantization:
            self._session.prefill(tokens)
            self._session.requantize()
            self._session.trim(0)
        return self._session.all_logits(tokens)


class SourceScorer:
    """A Hugging Face checkpoint through transformers, in float32.

    InputError: it cannot be loaded.  ModuleNotFoundError: torch or transformers is not installed.
    """

    def __init__(self, source: str) -> None:
        quiet_libraries()
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            self._model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        # A damaged checkpoint raises whatever its libraries raise: safetensors and torch have exceptions of their own.
        except Exception as error:
            reason = f"transformers cannot load it: {(str(error).splitlines() or [type(error).__name__])[0]}"
            raise InputError(f"{source}: {reason}; pass a folder, a hub id or an .edgeq file") from None
        self._torch = torch
        self.name = Path(source).name
        self.vocab_size = int(self._model.config.vocab_size)
        self.longest = int(self._model.config.max_position_embeddings)

    def logits(self, tokens: Sequence[int]) -> Iterator[np.ndarray[Any, Any]]:
        with self._torch.no_grad():
            yield self._model(self._torch.tensor([tokens])).logits[0].numpy()


@dataclass
class Scores:
    """The results of one model.

    weights  which weights it ran with
    facts    of the file: bits per weight, bytes, mode, codec of the cache
    nll      negative log-likelihood of every window in nats, a sum over its predicted tokens
    kl       KL divergence from the source in nats: float64 [n], one per predicted token
    agree    predictions whose most probable token is that of the source
    """

    name: str
    weights: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    nll: list[float] = field(default_factory=list)
    kl: list[Array] = field(default_factory=list)
    agree: int = 0

    def mean_nll(self, tokens: int) -> float:
        return sum(self.nll) / tokens


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
    """Perplexity, KL divergence and top-1 agreement of every file against the source, to standard output.

    `options` go to Model.load.

    InputError: a text that cannot be read or is too short, or models that do not share a vocabulary.
    """
    files = [FileScorer(path, window, options) for path in models]
    source: Scorer
    if against.endswith(".edgeq"):
        # Requantization is for the files that are compared, not for the source.
        source = FileScorer(Path(against), window, options | {"requantization": None})
    else:
        source = SourceScorer(against)
    for scorer in files:
        if scorer.vocab_size != source.vocab_size:
            raise InputError(
                f"{scorer.name} has {scorer.vocab_size} tokens, {source.name} {source.vocab_size}: not the same model; "
                "compare a file with the checkpoint it was made from"
            )
    size = min(window or WINDOW, source.longest, *(scorer.longest for scorer in files))
    documents = read_documents(text)
    encoded = [files[0].model.text.encode(document) for document in documents]
    tokens = [token for ids in encoded for token in ids][:limit]
    others: list[Scorer] = [*files[1:], source]
    for other in others:
        if isinstance(other, FileScorer) and other.model.text.encode(documents[0]) != encoded[0]:
            raise InputError(f"{other.name} and {files[0].name} have different tokenizers; compare files of the same model")
    windows = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    if len(windows) < 2:
        raise InputError(
            f"the text has {len(tokens)} tokens, too few for two windows of {size}: pass more text or a smaller --window"
        )
    reference, scores = score(source, files, windows)
    result = summarize(reference, scores, windows) | {"text": text, "text_sha256": corpus.digest(documents), "window": size}
    click.echo(json.dumps(result, indent=1) if as_json else table(result))


def read_documents(text: str) -> list[str]:
    """The text of a file, or held-out text of Python itself by the names code and docs.

    InputError: it cannot be read.
    """
    if text == "code":
        return corpus.evaluation_code()
    if text == "docs":
        return corpus.evaluation_docs()
    try:
        return [Path(text).read_text(encoding="utf-8")]
    except UnicodeDecodeError:
        raise InputError(f"{text}: not UTF-8 text; convert it to UTF-8") from None
    except OSError as error:
        raise InputError(f"{text}: cannot read it: {error.strerror}; pass a text file, code or docs") from None


def score(source: Scorer, files: Sequence[FileScorer], windows: Sequence[Sequence[int]]) -> tuple[Scores, list[Scores]]:
    """Run all models over all windows; the results of the source, then those of the files."""
    reference, scores = Scores(source.name), [Scores(scorer.name, scorer.weights, scorer.facts) for scorer in files]
    with progress() as report:
        for i, window in enumerate(windows):
            report(i, len(windows), "windows")
            next_tokens = np.asarray(window[1:])
            theirs = np.concatenate(list(source.logits(window)))[:-1]
            reference.nll.append(sum(float(part.sum()) for part in _nll(theirs, next_tokens)))
            for scorer, result in zip(files, scores, strict=True):
                add_window(result, theirs, scorer.logits(window), next_tokens)
    return reference, scores


def _nll(logits: np.ndarray[Any, Any], next_tokens: np.ndarray[Any, Any]) -> Iterator[Array]:
    for start in range(0, len(next_tokens), ROWS):
        wanted = next_tokens[start : start + ROWS]
        yield -log_softmax(logits[start : start + len(wanted)])[np.arange(len(wanted)), wanted]


def add_window(
    result: Scores,
    theirs: np.ndarray[Any, Any],
    parts: Iterator[np.ndarray[Any, Any]],
    next_tokens: np.ndarray[Any, Any],
) -> None:
    """Count one window of a file; `theirs` are the source's logits float32 [predictions, vocab]."""
    at, total = 0, 0.0
    for part in parts:
        wanted = next_tokens[at : at + len(part)]
        # Nothing is predicted after the last token of the window.
        q, p = log_softmax(part[: len(wanted)]), log_softmax(theirs[at : at + len(wanted)])
        total -= float(q[np.arange(len(wanted)), wanted].sum())
        result.kl.append(kl_divergence(p, q))
        result.agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        at += len(part)
    result.nll.append(total)


def summarize(reference: Scores, scores: Sequence[Scores], windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Everything that is reported, as plain values."""
    counts = [len(window) - 1 for window in windows]
    tokens = sum(counts)
    files = []
    for s in scores:
        kl = np.concatenate(s.kl)
        difference = paired_difference(s.nll, reference.nll, counts)
        files.append(
            {
                "file": s.name,
                "weights": s.weights,
                **s.facts,
                "perplexity": float(np.exp(s.mean_nll(tokens))),
                "kl_mean": float(kl.mean()),
                "kl_p99": percentile(kl.tolist(), 99),
                "top1_agreement": s.agree / tokens,
                "window_nll": s.nll,
                "nll_difference": vars(difference),
                "perplexity_ratio": vars(difference.exp()),
            }
        )
    pairs = [
        {"file": b.name, "against": a.name, "perplexity_ratio": vars(paired_difference(b.nll, a.nll, counts).exp())}
        for a, b in combinations(scores, 2)
    ]
    return {
        "source": {"name": reference.name, "perplexity": float(np.exp(reference.mean_nll(tokens)))},
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
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
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
