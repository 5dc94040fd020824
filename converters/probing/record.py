"""What a probe measured, kept in the cache folder: a second budget, or the run after a killed one, measures nothing again.

Beside it the allocations that were chosen by decoding them: a speed that is asked for again gets the codecs that it got before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edgeq.system.least_recently_used import remove_least_recently_used
from edgeq.system.machine import cache_folder
from edgeq.system.whole_file import write_whole

Divergences = dict[str, dict[str, float]]
"""Part -> name of a codec -> mean KL divergence in nats with this part alone in this codec."""
MAX_BYTES = 1 << 24
"""Size of one file; one of a model with a hundred thousand parts is smaller."""
MAX_KEPT_BYTES = 1 << 26
"""Size of all files together: those that were used last stay."""
MAX_CHOICES = 256
"""Choices kept of a model; of more, those that were made last."""
DIGITS = 6


@dataclass(frozen=True)
class ChosenAllocation:
    """An allocation that was chosen by decoding it: its codecs' names by part, its measured seconds over the predicted ones,
    and whether nothing else ran meanwhile."""

    names: Mapping[str, str]
    ratio: float
    alone: bool


@dataclass
class Record:
    """The divergences measured so far, and the choices made by decoding, by what they depend on besides.

    settings   everything that divergences depend on: source, calibration text, tokens, how weights are rounded
    path       of the file that keeps them; one that is damaged, or of other settings, counts as none
    """

    settings: Mapping[str, object]
    path: Path
    divergences: Divergences = field(default_factory=dict)
    choices: dict[str, ChosenAllocation] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Record:
        """What is kept for these settings."""
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        record = cls(settings, cache_folder() / "probes" / f"{digest[:32]}.json")
        record.divergences, record.choices = _read(record.path, json.loads(json.dumps(settings)))
        return record

    def keep(self, measured: Divergences | None = None) -> bool:
        """Add what was measured, in so many digits as are kept: a resumed run goes on with the same numbers.  Write everything,
        and forget what was not used for longest.

        False: the folder cannot be written, and nothing is kept.
        """
        for part, by_codec in (measured or {}).items():
            rounded = {codec: float(f"{value:.{DIGITS}g}") for codec, value in by_codec.items()}
            self.divergences.setdefault(part, {}).update(rounded)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            choices = {key: asdict(choice) for key, choice in [*self.choices.items()][-MAX_CHOICES:]}
            kept = {"settings": self.settings, "divergences": self.divergences, "choices": choices}
            write_whole(self.path, json.dumps(kept, indent=1))
            remove_least_recently_used(self.path.parent.glob("*.json*"), MAX_KEPT_BYTES)
        except OSError:
            return False
        return True


def _read(path: Path, settings: object) -> tuple[Divergences, dict[str, ChosenAllocation]]:
    try:
        with open(path, "rb") as file:
            kept = json.loads(file.read(MAX_BYTES))
        with suppress(OSError):
            os.utime(path)
        if kept["settings"] != settings:
            return {}, {}
        found = {
            str(part): {str(codec): float(value) for codec, value in by_codec.items() if 0 <= float(value) < float("inf")}
            for part, by_codec in kept["divergences"].items()
        }
        return found, {str(key): _choice(**fields) for key, fields in kept.get("choices", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, {}


def _choice(names: Mapping[str, str], ratio: float, alone: bool) -> ChosenAllocation:
    """ValueError or TypeError: one that `keep` did not write."""
    if not 0 < ratio < float("inf"):
        raise ValueError
    return ChosenAllocation({str(part): str(name) for part, name in names.items()}, float(ratio), bool(alone))
