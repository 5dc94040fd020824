"""`edgeq cache`: the prompts that `edgeq serve --prompt-cache` keeps."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from edgeq.errors import InputError
from edgeq.runtime.batching.page_file import identity_of
from edgeq.runtime.batching.prompt_store import StoredFile, check_folder, stored
from edgeq.targets.rows import PAGE


def files(folder: Path) -> dict[str, list[StoredFile]]:
    """Those of each model, by its identity; "" for what is damaged or of another version.

    InputError: the folder is not this user's alone.
    """
    check_folder(folder)
    found: dict[str, list[StoredFile]] = defaultdict(list)
    for each in stored(folder):
        found[identity_of(each.path) or ""].append(each)
    return found


def ls(folder: Path, as_json: bool) -> None:
    rows = [
        {
            "model": model or None,
            "positions": PAGE * len(own),
            "files": len(own),
            "bytes": sum(each.size for each in own),
            "used": datetime.fromtimestamp(max(each.used for each in own)).isoformat(timespec="seconds"),
        }
        for model, own in sorted(files(folder).items())
    ]
    if as_json:
        return print(json.dumps({"models": rows, "bytes": sum(int(str(row["bytes"])) for row in rows)}))
    for row in rows:
        size, name = int(str(row["bytes"])) / 1e6, row["model"] or "damaged or of another version"
        print(f"{name:32}  {row['positions']:>9,} positions  {size:>9,.1f} MB  used {row['used']}")
    if not rows:
        print("no prompts")


def rm(folder: Path, model: str | None) -> None:
    """InputError: there are none of this model."""
    found = files(folder)
    chosen = [name for name in found if model is None or (model and name.startswith(model))]
    if model is not None and not chosen:
        raise InputError(f"{folder}: no prompts of a model {model!r}; `edgeq cache ls {folder}` shows those there are")
    removed = [each for name in chosen for each in found[name]]
    for each in removed:
        with suppress(FileNotFoundError):
            each.path.unlink()
    print(f"removed {len(removed)} files, {sum(each.size for each in removed) / 1e6:,.1f} MB")
