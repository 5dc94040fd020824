"""The JSON document of a profile: what `-o json` prints, `--save` keeps, `--compare` reads and the page is drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache, partial
from typing import Any

from edgeq import __version__
from edgeq.tools.measure.report import bits_per_weight
from edgeq.tools.profile.collect import Profile
from edgeq.tools.profile.findings import findings
from edgeq.tools.profile.limits import limits_of
from edgeq.tools.profile.options import Change
from edgeq.tools.profile.prediction.what_if import SpeedPrediction, predictions
from edgeq.tools.profile.prediction.width_cost import width_cost
from edgeq.tools.profile.record import SCHEMA
from edgeq.tools.profile.runs import Combination


def document(profile: Profile, changes: tuple[Change, ...] = ()) -> dict[str, Any]:
    """Everything that is known, as plain values; docs/profile.md has it as a schema.

    changes   of which it predicts what they would change
    """
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "partial": profile.partial,
        "edgeq": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "measurements": [record.fields() for record in profile.measurements()],
        "operations": [{**label(series.combination), **each.fields()} for series, each in profile.breakdowns()],
        "limits": [
            {**label(combination), "phase": phase, **asdict(each)}
            for combination in profile.combinations
            for phase, each in profile.limits.get(combination.setting, {}).items()
        ],
        "weights": weights(profile),
        "memory": [moment._asdict() for moment in profile.moments],
        "sustained": profile.sustained and profile.sustained.fields(),
        "sensors": profile.sensors,
        "idle_watts": profile.idle_watts,
    }
    made["what_if"] = [asdict(each) for each in predicted(made, profile, changes)] if changes else []
    return {**made, "findings": [asdict(finding) for finding in findings(made)]}


def predicted(made: dict[str, Any], profile: Profile, changes: tuple[Change, ...]) -> Iterator[SpeedPrediction]:
    """What each change would make of each test that decodes; limits with other threads and the cost of other bits are measured
    now."""
    model = profile.combinations[0].model
    return predictions(made, changes, model.file, partial(limits_of, model), cache(partial(width_cost, model)))


def label(combination: Combination) -> dict[str, Any]:
    """The settings of a combination, as its records have them."""
    options = combination.model.program.options
    return {"threads": combination.model.program.threads, "mode": options.mode, "kv": options.kv.name}


def weights(profile: Profile) -> dict[str, float]:
    """Bytes that a token reads, and of those the head's with its bits per weight."""
    metadata = profile.combinations[0].model.file.metadata
    sizes = metadata.bytes_per_token()
    bits = bits_per_weight(metadata, lambda name: name == "head")
    return {"bytes_per_token": sizes["weights"] + sizes["head"], "head": sizes["head"], "head_bits": bits}
