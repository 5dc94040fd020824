"""Conversions that are killed while their partial file is there, and run again until they end: always in the same bytes."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.format.partial import partial_path

sys.path.append(str(Path(__file__).parents[2]))
from tests.checkpoints.families import build_checkpoint  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
CALIBRATED = {"calibration": "built-in", "calibration_rows": 1, "calibration_length": 16}
METHODS: dict[str, ConvertOptions] = {
    "rtn": ConvertOptions(),
    "awq": ConvertOptions("awq", **CALIBRATED),  # type: ignore[arg-type]
    "gptq": ConvertOptions("gptq", **CALIBRATED),  # type: ignore[arg-type]
    "ttq": ConvertOptions("ttq"),
}
MAX_SECONDS = 300.0
"""Seconds that a conversion of about one may take before it counts as hung."""


class Conversions:
    """One checkpoint, and for each method what an undisturbed conversion wrote and how long its partial file was there."""

    def __init__(self, folder: Path) -> None:
        # Threads would not survive the fork, whose child would wait for them.
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.source, self.output = folder / "checkpoint", folder / "out.edgeq"
        build_checkpoint(self.source, "llama_gqa", "bfloat16", "5GB", SMALL)
        self.expected, self.seconds = {}, {}
        for name, options in METHODS.items():
            began = self._begun(options)
            self._finish()
            self.seconds[name] = time.monotonic() - began
            self.expected[name] = self.output.read_bytes()
            self.output.unlink()

    def trial(self, rng: random.Random) -> str:
        """One to three kills, each inside the partial file at a moment of its life, then an undisturbed run."""
        for left in self.output.parent.glob("out.edgeq*"):
            left.unlink()
        name = rng.choice(list(METHODS))
        options, wanted, kills = METHODS[name], rng.choice((1, 2, 3)), 0
        while kills < wanted:
            # What is left of a conversion takes the less time the more of it was done.
            moment = self._begun(options) + rng.random() * self.seconds[name] / (1 + kills)
            while self._running() and time.monotonic() < moment:
                time.sleep(0.0005)
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            if self.output.exists():
                # Too late.  The journal may still be there: the same command removes it.
                self._begun(options)
                self._finish()
                self._compare(name)
                kills = 0
            elif partial_path(self.output).stat().st_size:
                kills += 1
        self._begun(options)
        self._finish()
        self._compare(name)
        return f"{name}: the same bytes after {kills} kills"

    def _begun(self, options: ConvertOptions) -> float:
        """Start a conversion in a child; the time at which its partial file is no longer empty, or it has ended."""
        self.child = os.fork()
        if not self.child:
            status = 1
            try:
                convert(str(self.source), self.output, options, lambda done, total, label: None)
                status = 0
            finally:
                os._exit(status)
        began, partial = time.monotonic(), partial_path(self.output)
        before = partial.stat().st_mtime_ns if partial.exists() else 0
        while self._running():
            try:
                found = partial.stat()
            except FileNotFoundError:
                found = None
            # A partial file that an earlier run left is cut when this one goes on with it.
            if found is not None and found.st_size and found.st_mtime_ns != before:
                break
            assert time.monotonic() - began < MAX_SECONDS, "a conversion does not begin to write"
            time.sleep(0.0005)
        return time.monotonic()

    def _running(self) -> bool:
        """Whether the child still runs; AssertionError: it failed."""
        info = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert info is None or info.si_status == 0, f"a conversion failed (status {info.si_status})"
        return info is None

    def _finish(self) -> None:
        while self._running():
            time.sleep(0.0005)
        os.waitpid(self.child, 0)

    def _compare(self, name: str) -> None:
        assert self.output.read_bytes() == self.expected[name], f"{name}: other bytes after a kill"
        left = sorted(path.name for path in self.output.parent.glob("out.edgeq.*"))
        assert not left, f"{name}: {left} are left"
        self.output.unlink()
