"""Models on this machine that a name of the hub or a GGUF file brought: what there is, and how it is removed.

Two places hold them: huggingface_hub's cache, which other programs share, and edgeq's own of converted GGUF files.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from edgeq.errors import InputError
from edgeq.tools.commands.from_gguf import Conversion, conversion_of, conversions
from edgeq.tools.hub.choice import HubModel, chosen, models_in
from edgeq.tools.hub.fetch import ASIDE
from edgeq.tools.hub.listing import files_of, repository_folder
from edgeq.tools.hub.names import HubName, hub_name, is_hub_name

EDGEQ, GGUF, CHECKPOINT, UNFINISHED, CONVERTED = "edgeq", "gguf", "checkpoint", "unfinished", "converted"
"""Kinds: files of the hub, weights of a repository in safetensors, downloads that stopped, conversions of GGUF files."""
REPOSITORY = "models--"


@dataclass(frozen=True)
class CachedModel:
    """A model that is on this machine.

    name         what commands take, and `edgeq rm`
    size         bytes on the disk
    path         of its first file, or its folder
    digest       SHA-256 of the file, in hexadecimal, where it is one file of the hub; else ""
    conversion   the .edgeq file that was made of it, if it is a GGUF file
    """

    name: str
    kind: str
    size: int
    path: Path
    digest: str = ""
    conversion: Conversion | None = None


def cached_models() -> list[CachedModel]:
    """All models on this machine: those of the hub by name, then conversions of other GGUF files by path."""
    found = [model for folder in _repositories() for model in _models_of(folder)]
    of_hub = {model.conversion.folder for model in found if model.conversion}
    rest = (each for each in conversions() if each.folder not in of_hub)
    return found + [CachedModel(str(each.origin), CONVERTED, each.size, each.file or each.folder) for each in rest]


def removed(text: str) -> int:
    """Remove a model by its name in `cached_models`, and what was converted from it; the bytes that this freed.

    Of hf:ORG/REPO without a type all goes, an unfinished download too.  InputError: there is no such model, or it
    cannot be removed.
    """
    try:
        if is_hub_name(text):
            name = hub_name(text)
            return _remove_models(name) if name.quant else _remove_repository(name)
        conversion = conversion_of(Path(text))
        if conversion is None:
            raise InputError(f"{text}: nothing is kept of it; edgeq list shows what there is")
        return _remove_conversion(conversion)
    except OSError as error:
        raise InputError(f"{text}: cannot be removed: {error.strerror or error}") from None


def _repositories() -> list[Path]:
    try:
        base = repository_folder("any/name").parent
    except ModuleNotFoundError:
        # Without huggingface_hub nothing was fetched by edgeq.
        return []
    return sorted(base.glob(f"{REPOSITORY}*--*")) if base.is_dir() else []


def _models_of(repository: Path) -> list[CachedModel]:
    """Those of one repository: of all its revisions, each file once."""
    name = HubName(repository.name.removeprefix(REPOSITORY).replace("--", "/", 1))
    rows, seen = list[CachedModel](), set[Path]()
    for snapshot in _snapshots(repository):
        files = list(files_of(snapshot))
        for model in models_in(files):
            path = snapshot / model.files[0].path
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            kind, digest = EDGEQ if model.converted else GGUF, model.files[0].digest
            digest = digest if len(model.files) == 1 and len(digest) == 64 else ""
            conversion = None if model.converted else conversion_of(path)
            rows.append(CachedModel(f"{name}:{model.quant}", kind, model.size, path, digest, conversion))
        weights = {(snapshot / file.path).resolve(): file.size for file in files if file.path.endswith(".safetensors")}
        if new := weights.keys() - seen:
            seen |= new
            rows.append(CachedModel(str(name), CHECKPOINT, sum(weights[path] for path in new), snapshot))
    unfinished = sum(path.stat().st_size for path in (repository / "blobs").glob(f"*{ASIDE}"))
    if unfinished:
        rows.append(CachedModel(str(name), UNFINISHED, unfinished, repository))
    return rows


def _snapshots(repository: Path) -> list[Path]:
    """The newest first, so that a file of the same name in an older revision comes after it."""
    folders = [path for path in (repository / "snapshots").glob("*") if path.is_dir()]
    return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


def _remove_repository(name: HubName) -> int:
    folder = _repository(name)
    converted = sum(_remove_conversion(model.conversion) for model in _models_of(folder))
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    shutil.rmtree(folder)
    shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
    return size + converted


def _remove_models(name: HubName) -> int:
    """The files of one model in every revision; a file of the blobs goes with the last name that it has."""
    folder, freed, paths = _repository(name), 0, set[str]()
    for snapshot in _snapshots(folder):
        model = _named(name, models_in(files_of(snapshot)))
        for file in model.files if model else ():
            path = snapshot / file.path
            paths.add(file.path)
            freed += _remove_conversion(conversion_of(path))
            blob = path.resolve()
            path.unlink()
            if blob.exists() and not any(other.resolve() == blob for other in (folder / "snapshots").rglob("*")):
                freed += blob.stat().st_size
                blob.unlink()
            elif not blob.exists():
                freed += file.size
    if not paths:
        raise InputError(f"{name}: no such model in the cache; edgeq list shows what there is")
    if not _models_of(folder):
        shutil.rmtree(folder)
    return freed


def _named(name: HubName, models: list[HubModel]) -> HubModel | None:
    return chosen(name, models) if any(model.is_called(name.quant) for model in models) else None


def _repository(name: HubName) -> Path:
    """InputError: the cache does not have it."""
    folder = repository_folder(name.repository)
    if not folder.is_dir():
        raise InputError(f"{name}: not in the cache; edgeq list shows what there is")
    return folder


def _remove_conversion(conversion: Conversion | None) -> int:
    """The bytes that this freed."""
    if conversion is None:
        return 0
    conversion.remove()
    return conversion.size
