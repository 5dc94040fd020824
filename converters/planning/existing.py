"""Finds out whether the file that a conversion would write is already there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeq.converters.planning.plan import ConversionPlan
from edgeq.errors import EdgeqError, InputError
from edgeq.format.container import ModelFile

REPLACE = "pass --force to replace it, or choose another name"
CHOSEN = ("head",)
"""Options that are recorded with what was measured where they were not given."""
MEASURED = ("measured", "split_rows")
"""Entries of the provenance that only a conversion knows."""
FORMER = {
    **{"awq-asymmetric": "min-max", "awq-symmetric": "absmax", "smoothquant": "absmax", "quarot": "absmax-search"},
    **{"gptq-asymmetric": "min-max-zero", "gptq-symmetric": "absmax-full"},
}
"""Names of quantizers in files of earlier versions: those of now."""


def already_there(plan: ConversionPlan, output: Path) -> ModelFile | None:
    """The file `output` if it is what the plan would make; None: there is none, or it is to be replaced.

    It is that if its metadata is, what is measured on the way apart, and no file of the checkpoint is newer; weights are not
    compared.  InputError: it was made in another way, which the message names.
    """
    if plan.options.force or not output.exists():
        return None
    try:
        file = ModelFile.open(output)
    except EdgeqError as error:
        raise InputError(f"{error}; {REPLACE}") from None
    difference = _difference(plan, file)
    if difference:
        raise InputError(f"{output}: {difference}; {REPLACE}")
    return file


def _difference(plan: ConversionPlan, file: ModelFile) -> str | None:
    planned = plan.metadata()
    both = [json.loads(json.dumps(provenance)) for provenance in (planned.provenance, file.metadata.provenance)]
    # An option that only one of them has is named before what follows from it.
    options = [name for each in both if isinstance(each.get("options"), dict) for name in each["options"]]
    wanted, found = (_flat(each, [x for x in options if getattr(plan.options, x, None) or x not in CHOSEN]) for each in both)
    for key in [*wanted, *found]:
        if wanted.get(key) != found.get(key):
            if key == "code" and wanted["edgeq"] == found.get("edgeq"):
                return f"is there, made by other code of edgeq {wanted['edgeq']}, whose files may differ"
            return f"is there, made with {key} {found.get(key)!r}, now it is {wanted.get(key)!r}"
    generation = json.loads(json.dumps(planned.generation))
    if (planned.config, generation) != (file.metadata.config, file.metadata.generation):
        return "is there, made of other settings of the model or of its text"
    made = file.path.stat().st_mtime_ns
    for path in plan.checkpoint.files():
        status = path.stat()
        # A file that was copied or moved here keeps its time of modification, but has a new one of its inode.
        if max(status.st_mtime_ns, status.st_ctime_ns) > made:
            return f"is there, but {path.name} has changed since it was made"
    return None


def _flat(provenance: dict[str, Any], options: Sequence[str]) -> dict[str, object]:
    """Provenance without what is measured, one level deep, with these options, given or not."""
    flat: dict[str, object] = {}
    for key, value in provenance.items():
        if key == "options" and isinstance(value, dict):
            flat.update({name: value.get(name) for name in options})
        elif key not in MEASURED:
            flat[key] = FORMER.get(str(value), value) if key == "quantizer" else value
    return flat
