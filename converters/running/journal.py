"""Lets a killed conversion be resumed: `OUT.edgeq.partial.json` beside `OUT.edgeq.partial`.

The journal holds the segments already safe on the disk and a fingerprint of everything the result depends on.  It is replaced
atomically, after the segments it names have been synced; so at any moment the two files describe a state that can be resumed.
What a method found out about the whole model before its first layer is kept in `OUT.edgeq.partial.npz`.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.planning.output import JOURNAL
from edgeq.errors import InputError, ResourceError
from edgeq.format.metadata import Segment
from edgeq.format.partial import Partial
from edgeq.system.whole_file import no_follow, write_whole

Fingerprint = dict[str, object]


class Journal:
    """The journal of the file `partial`, which this process holds locked.

    provenance   what the finished layers say in the provenance, as JSON by name
    """

    def __init__(self, partial: Partial, fingerprint: Fingerprint) -> None:
        self._locked, self.partial = partial, partial.path
        self.path = self.partial.with_name(self.partial.name.removesuffix(".partial") + JOURNAL)
        self.fingerprint = fingerprint
        self.provenance: dict[str, object] = {}

    def resume(self, restart: bool) -> list[Segment]:
        """The segments that the next run may rely on; empty to start over.

        InputError: the journal is of another source, other options or another version; the message names what differs.
        """
        if restart or self._locked.empty:
            self.remove()
        if not self.path.exists():
            return []
        try:
            state = json.loads(self.path.read_text())
            before: Fingerprint = state["fingerprint"]
            segments = [Segment(offset, length, bytes.fromhex(digest)) for offset, length, digest in state["segments"]]
            provenance = dict(state.get("provenance", {}))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(f"{self.path}: not a journal of a conversion ({error}); run again with --restart") from None
        changed = [key for key in sorted({*before, *self.fingerprint}) if before.get(key) != self.fingerprint.get(key)]
        if changed:
            # Another version has other code too: the version says more.
            key = next((key for key in changed if key != "code"), "code")
            if key == "code":
                raise InputError(
                    f"{self.partial}: a conversion was interrupted here that other code of edgeq {before.get('edgeq')} had "
                    "begun; pass --restart to start over"
                )
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise InputError(
                f"{self.partial}: a conversion was interrupted here with {key} {before.get(key)!r}, now it is "
                f"{self.fingerprint.get(key)!r}{more}; pass --restart to start over, or the same source and options to go on"
            )
        # Shorter than promised: the disk lost what it had synced.
        end = max((s.offset + s.length for s in segments), default=0)
        if self.partial.stat().st_size < end:
            self.remove()
            return []
        self.provenance = provenance
        return segments

    def study(self) -> dict[str, NDArray[Any]] | None:
        """What `keep` kept for the conversion that goes on; None where there is nothing, or it is damaged."""
        try:
            with np.load(self._study_path, allow_pickle=False) as kept:
                return dict(kept) if self.path.exists() else None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return None

    def keep(self, study: dict[str, NDArray[Any]], segments: list[Segment]) -> None:
        """Keep `study` for a run that goes on from `segments`, none as yet."""
        try:
            with open(self._study_path, "wb", opener=no_follow) as file:
                np.savez(file, **study)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failed(self._study_path, error) from None
        self.record(segments)

    @property
    def _study_path(self) -> Path:
        return self.partial.with_name(self.partial.name + ".npz")

    @property
    def _unfinished(self) -> Path:
        return self.path.with_name(self.path.name + ".new")

    def record(self, segments: list[Segment]) -> None:
        """Replace the journal; the segments are synced already."""
        state = {"fingerprint": self.fingerprint, "segments": [[s.offset, s.length, s.digest.hex()] for s in segments]}
        state |= {"provenance": self.provenance} if self.provenance else {}
        try:
            write_whole(self.path, json.dumps(state), durable=True, through=self._unfinished)
        except OSError as error:
            raise self._failed(self.path, error) from None

    def remove(self) -> None:
        self._study_path.unlink(missing_ok=True)
        self._unfinished.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _failed(self, path: Path, error: OSError) -> ResourceError:
        return ResourceError(f"{path}: cannot write it: {error.strerror}; free some space and run the same command again")
