"""`edgeq pull`, `edgeq list` and `edgeq rm`: what they do."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.tools.cli.terminal import write
from edgeq.tools.hub.cached import CachedModel, cached_models, removed
from edgeq.tools.hub.choice import chosen, models_in
from edgeq.tools.hub.fetch import (
    check_digest,
    conversion,
    fetched,
    has_safetensors,
    pulled_checkpoint,
    tower_beside,
    without_models,
)
from edgeq.tools.hub.listing import listing
from edgeq.tools.hub.names import hub_name


def pull(text: str, access: HubAccess, as_json: bool) -> None:
    """Fetch a model and check the digest of every file; what was fetched goes to standard output.

    Errors: as edgeq.tools.hub.fetch.model_file; CheckpointError: a digest is wrong.
    """
    name = hub_name(text)
    found = listing(name, access)
    model = chosen(name, models_in(found.files))
    if model is None and not has_safetensors(found):
        raise without_models(name, found)
    if model is None:
        paths, files = [pulled_checkpoint(name, found, access)], list[dict[str, Any]]()
        lines = [str(paths[0]), f"a checkpoint: {conversion(name.repository)}"]
    else:
        paths = fetched(name, model, found, access)
        parts = list(zip(model.files, paths, strict=True))
        tower = tower_beside(name, model, paths[0], found, access)
        if tower:
            parts.append(tower)
        for file, path in parts:
            check_digest(name, file, path)
        files = [{"path": str(path), "bytes": file.size, "digest": file.digest} for file, path in parts]
        lines = [f"{path}  {_size(file.size)}  {_digest(file.digest)}" for file, path in parts]
    facts = {"name": str(name), "path": str(paths[0]), "files": files}
    for line in [json.dumps(facts)] if as_json else lines:
        write(f"{line}\n")


def show(as_json: bool) -> None:
    """The models on this machine, to standard output."""
    models = cached_models()
    if as_json:
        return write(json.dumps({"models": [_record(model) for model in models], "bytes": sum(map(_all, models))}) + "\n")
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        converted = f", {_size(model.conversion.size).strip()} converted" if model.conversion else ""
        digest = f"  sha256 {model.digest[:12]}" if model.digest else ""
        write(f"{model.name:{width}}  {model.kind:10}  {_size(model.size)}  {_used(model.path)}{digest}{converted}\n")
    write(f"{len(models)} models, {_size(sum(map(_all, models))).strip()}\n" if models else "no models\n")


def remove(names: tuple[str, ...]) -> None:
    """Remove models by their names, one after another.  InputError: there is none of a name; those before it are removed."""
    for name in names:
        write(f"removed {name}: {_size(removed(name)).strip()}\n")


def _record(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "kind": model.kind,
        "bytes": model.size,
        "sha256": model.digest or None,
        "path": str(model.path),
        "converted_bytes": model.conversion.size if model.conversion else 0,
        "modified": _used(model.path),
    }


def _all(model: CachedModel) -> int:
    return model.size + (model.conversion.size if model.conversion else 0)


def _used(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d")


def _size(size: int) -> str:
    return f"{size / 1e6:>9,.1f} MB"


def _digest(digest: str) -> str:
    return f"sha256 {digest}" if len(digest) == 64 else f"git {digest}"
