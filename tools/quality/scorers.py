"""Models that compute logits over windows of text: an .edgeq file through the runtime, a checkpoint block by block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq import __version__
from edgeq.converters.planning.code_digest import CONVERTERS, code_digest
from edgeq.errors import CheckpointError, InputError, ResourceError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model
from edgeq.system.machine import available_bytes
from edgeq.tools.cli.terminal import Report, note
from edgeq.tools.commands.convert import quiet_libraries
from edgeq.tools.measure.report import overall_bits
from edgeq.tools.quality.kept_predictions import kept_or_made
from edgeq.tools.quality.predictions import Collect, Collector, Predictions

SCORING = tuple(CONVERTERS / room for room in ("calibration", "checkpoint", "families"))
"""The rooms whose code computes the logits of a checkpoint."""
Windows = NDArray[np.int64]
"""Tokens [windows, length]; each window is run from an empty cache, and its first token is only context."""
ROWS = 64
"""Positions of a file whose logits are in memory at a time."""


class Scorer(Protocol):
    """A model that computes logits, of at most `longest` tokens at a time."""

    name: str
    vocab_size: int
    longest: int

    def run(self, windows: Windows, collect: Collect, report: Report) -> None:
        """Give `collect` the logits after every token that has a next one in its window."""
        ...

    def predictions(self, windows: Windows, report: Report) -> Predictions:
        """What is kept of them, where files are compared with this model."""
        ...


class FileScorer:
    """An .edgeq file.  InputError: it takes no windows of that many tokens; otherwise as Model.load."""

    def __init__(self, path: Path, window: int | None, options: dict[str, Any]) -> None:
        longest = ModelFile.open(path).metadata.config.max_position_embeddings
        if window and window > longest:
            raise InputError(f"--window {window}: {path.name} takes at most {longest} tokens")
        self.model = Model.load(path, context=window, max_logits=ROWS, **options)
        self.name, self.facts = path.name, facts_of(self.model)
        self.vocab_size = self.model.config.vocab_size
        self.longest = self.model.context
        self._session = self.model.session()

    @property
    def weights(self) -> str:
        """Which weights the logits are computed with."""
        return "made for each window from all of its own tokens" if self.model.requantization else "the file's"

    def logits(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Parts, float32 [n, vocab], of the logits after each of `tokens`, from an empty cache.

        With test-time requantization a window is read twice: with the masters, then with the requantized weights.
        """
        self._session.rewind(0)
        if self.model.requantization:
            self._session.prefill(tokens)
            self._session.requantize()
            self._session.rewind(0)
        return self._session.all_logits(tokens)

    def run(self, windows: Windows, collect: Collect, report: Report) -> None:
        at = 0
        for index, window in enumerate(windows):
            report(index, len(windows), f"{self.name}: windows")
            end = at + len(window) - 1
            for part in self.logits(window.tolist()):
                # Nothing is predicted after the last token of the window.
                wanted = part[: end - at]
                if len(wanted):
                    collect(at, 0, wanted)
                    at += len(wanted)

    def predictions(self, windows: Windows, report: Report) -> Predictions:
        return collected(self, windows, report)


def facts_of(model: Model) -> dict[str, Any]:
    """What a result is to be weighed against: effective bits per weight, head included, bytes of the file, mode, cache."""
    bits = overall_bits(model.file.metadata)
    options = model.program.options
    return {"bits_per_weight": bits, "bytes": model.file.size, "mode": options.mode, "kv": options.kv.name}


class CheckpointScorer:
    """A Hugging Face folder or hub id, run in float32.

    Its predictions are kept in the cache folder; those of the same checkpoint for the same windows are not computed again.
    Errors: as `edgeq.converters.calibration.logits.Network.open`.  ModuleNotFoundError: torch is not installed.
    """

    def __init__(self, source: str, threads: int = 0, pooling: str | None = None) -> None:
        """`threads` of torch; 0: it chooses.  `pooling`: the files that are compared with it embed texts so; None: they do not.

        InputError: it does what they do not.
        """
        quiet_libraries()
        # Before torch: edgeq.converters says how its threads wait.
        from edgeq.converters.calibration.logits import Network

        if threads:
            import torch

            torch.set_num_threads(threads)
        self._source = source
        self.network = Network.open(source, pooling)
        if self.network.config.pooling and pooling is None:
            raise InputError(f"{source} embeds texts and the files continue them; compare each with its own source")
        self.name = Path(self.network.checkpoint.name).name
        self.vocab_size = self.network.config.vocab_size
        self.longest = self.network.config.max_position_embeddings

    def run(self, windows: Windows, collect: Collect, report: Report) -> None:
        """ResourceError: too little memory."""
        from edgeq.converters.calibration.logits import stream_logits

        self._check_memory(windows)
        stream_logits(self.network, windows, collect, report)

    def predictions(self, windows: Windows, report: Report) -> Predictions:
        count, length = windows.shape
        wait = f"{self.name}: waiting for another process, which scores it on the same text"
        return kept_or_made(
            self._key(windows),
            count * (length - 1),
            self.vocab_size,
            lambda: collected(self, windows, report),
            lambda: note(wait),
        )

    def vectors(self, windows: Windows, report: Report) -> NDArray[np.float32]:
        """Those of the windows, where it embeds texts, float32 [windows, hidden].  ResourceError: too little memory."""
        from edgeq.converters.calibration.logits import pooled_vectors

        self._check_memory(windows)
        return pooled_vectors(self.network, windows, report)

    def _key(self, windows: Windows) -> dict[str, Any]:
        """Everything that the predictions depend on."""
        checkpoint = self.network.checkpoint
        status = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files()]
        return {
            "edgeq": __version__,
            "code": code_digest(SCORING, (Path(__file__), Path(__file__).with_name("predictions.py"))),
            "source": checkpoint.digest(),
            "files": status,
            "tokens": hashlib.sha256(windows.astype("<i8").tobytes()).hexdigest(),
            "windows": list(windows.shape),
        }

    def _check_memory(self, windows: Windows) -> None:
        """Say how much memory it takes.  ResourceError: more than there is; the message has what would fit."""
        count, length = windows.shape
        needed, available = self.network.memory_bytes(count, length), available_bytes()
        if needed > available:
            fits = self.network.windows_that_fit(length)
            way_out = f"--limit {fits * length} would fit" if fits > 1 else "a smaller --window needs less"
            raise ResourceError(
                f"{self._source}: scoring {count * length} tokens needs {needed / 1e9:.1f} GB of memory, "
                f"{available / 1e9:.1f} GB are available; {way_out}"
            )
        note(f"{self.name}: scoring {count * length:,} tokens, in up to {needed / 1e9:.1f} GB of memory")


def collected(scorer: Scorer, windows: Windows, report: Report) -> Predictions:
    """The predictions of a model.  CheckpointError: it computes NaN or infinity."""
    collector = Collector(windows[:, 1:].ravel(), scorer.vocab_size)
    scorer.run(windows, collector.add, report)
    try:
        return collector.finish()
    except FloatingPointError as error:
        raise CheckpointError(f"{scorer.name}: its {error}; nothing can be compared with it") from None
