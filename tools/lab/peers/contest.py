"""The competitors and the rounds: every competitor once, then every competitor again, each time in a fresh process.

A fresh process gives each repetition its own load time and peak memory, leaves nothing of one peer running while another is
measured, and lets a peer crash alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np

import edgeq
from edgeq.network.config import ModelConfig
from edgeq.tools.lab.peers.peer import PEERS, Stored, Times, Variant, variants
from edgeq.tools.measure.alternating import rounds

BOOT = "import sys; sys.path.append(sys.argv[1]); from edgeq.tools.lab.peers.worker import main; main()"
MAX_ANSWER_SECONDS = 1800.0
"""Seconds; a large model on a small board takes minutes to build and to read a prompt."""
MAX_REASON_CHARACTERS = 200
WARM_UP_STEPS = 4
Report = Callable[[float, float, str], None]


class PeerError(Exception):
    """A peer cannot take part, or dropped out; the message is the reason that the table gives."""


class Process:
    """A worker run by the Python at `python`, which finds edgeq after everything that it has itself."""

    def __init__(self, python: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        root = str(Path(edgeq.__file__).parent.parent)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self.started = perf_counter()
        try:
            self._process = subprocess.Popen([python, "-c", BOOT, root], **pipes)
        except OSError as error:
            raise PeerError(f"{python}: {error.strerror}") from None

    def ask(self, **request: Any) -> Any:
        """The result of a request.  PeerError: the worker refused, died or did not answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._death()) from None
        answer = json.loads(self._line())
        if "error" in answer:
            raise PeerError(shortened(answer["error"]))
        return answer["result"]

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        file, line, end = self._process.stdout.fileno(), b"", monotonic() + MAX_ANSWER_SECONDS
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([file], [], [], max(0.0, end - monotonic()))
            if not ready:
                raise PeerError(f"no answer in {MAX_ANSWER_SECONDS:.0f} s")
            part = os.read(file, 1 << 16)
            if not part:
                raise PeerError(self._death())
            line += part
        return line

    def _death(self) -> str:
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        printed = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return shortened(f"its process ended with {how}" + (f": {printed[-1]}" if printed else ""))

    def peak_rss(self) -> int | None:
        """Peak of its bytes in memory, mapped files included; None without /proc."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._errors.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def process(python: str) -> Iterator[Process]:
    """A worker that ends with the block."""
    worker = Process(python)
    try:
        yield worker
    finally:
        worker.close()


def shortened(text: str) -> str:
    """`text` in one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_CHARACTERS else line[: MAX_REASON_CHARACTERS - 4] + " ..."


@dataclass
class Entry:
    """One competitor with one number of threads, and what was measured.

    load_s    opening the model, the library already imported; ready_s: from the start of the process
    failure   why it dropped out; what was measured before stays
    read_bandwidth   of the GPU, bytes per second, where it runs on one and measures it
    """

    variant: Variant
    threads: int
    stored: Stored
    settings: str = ""
    load_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    peak_rss: list[int] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    failure: str | None = None
    read_bandwidth: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.variant.name}, threads {self.threads}"


@dataclass
class Contest:
    """One run of the tool.

    model       a published GGUF file that all run as it is; None: the random model of `config`
    isa         instruction set of edgeq's kernels; None: the best that this processor has
    versions    of the peers that are there; `left_out` has the reason of each peer or variant that is not
    """

    config: ModelConfig
    work: Path
    peer_python: str
    prompt: int
    steps: int
    report: Report
    model: Path | None = None
    isa: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def python(self, peer: str) -> str:
        return sys.executable if peer == "edgeq" else self.peer_python

    def find(self, wanted: Sequence[str]) -> list[Variant]:
        """The variants among `wanted` whose peer is installed."""
        chosen = [variant for name, variant in variants().items() if name in wanted]
        for peer in [peer for peer in PEERS if any(variant.peer == peer for variant in chosen)]:
            try:
                with process(self.python(peer)) as worker:
                    self.versions[peer] = worker.ask(do="version", peer=peer)
            except PeerError as error:
                self.left_out[peer] = str(error)
        return [variant for variant in chosen if variant.peer in self.versions]

    def build(self, variants: Sequence[Variant]) -> dict[str, Stored]:
        """Build the models that are not there yet; sizes by variant."""
        sizes: dict[str, Stored] = {}
        for i, variant in enumerate(variants):
            self.report(i, len(variants), f"build {variant.file}")
            folder = self.folder(variant)
            try:
                sizes[variant.name] = self._built(variant, folder)
            except PeerError as error:
                self.left_out[variant.name] = f"build: {error}"
        return sizes

    def folder(self, variant: Variant) -> Path:
        """The folder of a model: its name depends on the model, the version of the peer and the code that builds it."""
        parts = [(Path(__file__).parent / f"{name}.py").read_bytes() for name in ("weights", PEERS[variant.peer])]
        parts += [self.config.to_json().encode(), self.versions[variant.peer].encode()]
        if self.model is not None:
            status = self.model.stat()
            parts.append(f"{self.model} {status.st_size} {status.st_mtime_ns}".encode())
        key = hashlib.blake2b(b"\0".join(parts))
        return self.work / f"{variant.file}-{key.hexdigest()[:12]}"

    def _built(self, variant: Variant, folder: Path) -> Stored:
        sizes = folder / "stored.json"
        if not sizes.exists():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            with process(self.python(variant.peer)) as worker:
                if self.model is not None:
                    stored = worker.ask(do="take", peer=variant.peer, model=str(self.model), folder=str(partial))
                else:
                    stored = worker.ask(do="build", variant=variant.name, config=self.config.to_json(), folder=str(partial))
            (partial / sizes.name).write_text(json.dumps(stored), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        return Stored(**json.loads(sizes.read_text(encoding="utf-8")))

    def compete(self, entries: Sequence[Entry], repetitions: int, before_round: Callable[[], None]) -> None:
        """Run the rounds of entries with the same number of threads."""
        rounds(entries, repetitions, self._round, PeerError, report=self.report, before_round=before_round)

    def _round(self, entry: Entry) -> None:
        variant, config = entry.variant, self.config.to_json()
        folder, context = str(self.folder(variant)), self.prompt + self.steps + 1
        with process(self.python(variant.peer)) as worker:
            names = {"do": "load", "variant": variant.name, "config": config, "folder": folder}
            loaded = worker.ask(**names, threads=entry.threads, context=context, isa=self.isa)
            ready = perf_counter() - worker.started
            # Another prompt than the one that is timed: a peer may keep what it has computed for a beginning it has seen.
            worker.ask(do="run", prompt=self._prompt(1), steps=min(WARM_UP_STEPS, self.steps))
            times = Times(**worker.ask(do="run", prompt=self._prompt(0), steps=self.steps))
            if len(times.tokens) != self.steps + 1:
                raise PeerError(f"drew {len(times.tokens)} tokens instead of {self.steps + 1}")
            peak = worker.peak_rss()
        entry.settings = loaded["settings"]
        entry.load_s.append(loaded["load_s"])
        entry.ready_s.append(ready)
        entry.times.append(times)
        entry.read_bandwidth += [loaded["read_bandwidth"]] if loaded.get("read_bandwidth") else []
        entry.peak_rss += [peak] if peak is not None else []

    def _prompt(self, seed: int) -> list[int]:
        return [int(token) for token in np.random.default_rng(seed).integers(0, self.config.vocab_size, self.prompt)]
