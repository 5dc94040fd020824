"""Fetches a model of the hub into huggingface_hub's cache, where other programs find it too, and checks its digest.

huggingface_hub gives every run of a process a file of its own to download into, so it goes on after a cut connection but not
after a process that ended.  Here the unfinished file keeps the name that its versions before had for it, and goes on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgeq.converters.checkpoint.download import HubAccess, OnDownload, byte_meter, download, hub_errors
from edgeq.converters.importers.gguf_source import check_tower, takes_tower
from edgeq.converters.importers.safetensors_folder import TEXT_FILES, WEIGHT_FILES
from edgeq.errors import CheckpointError, ResourceError, UnsupportedError
from edgeq.tools.cli.terminal import note, progress
from edgeq.tools.hub.choice import HubModel, RepositoryFile, chosen, models_in, tower_in
from edgeq.tools.hub.listing import Listing, listing, repository_folder, snapshot
from edgeq.tools.hub.names import HubName, hub_name

ASIDE = ".incomplete"
PIECE = 1 << 22
SHA256_DIGITS = 64


def model_file(text: str, with_tower: bool) -> tuple[Path, Path | None]:
    """The .edgeq or GGUF file that a name of the hub means, in the cache; fetched now if it is not there.

    with_tower   look for the vision tower of a GGUF file too, the second of the two paths

    CheckpointError: there is none, or several, of this name; it cannot be had.  ResourceError: the disk has no room.
    """
    name, access = hub_name(text), HubAccess()
    found = listing(name, access)
    model = chosen(name, models_in(found.files))
    if model is None:
        raise without_models(name, found)
    path = fetched(name, model, found, access)[0]
    return path, _path_of_tower(name, model, path, found, access) if with_tower else None


def tower_beside(
    name: HubName, model: HubModel, path: Path, contents: Listing, access: HubAccess
) -> tuple[RepositoryFile, Path] | None:
    """The vision tower in the repository of a GGUF file, which is at `path`, and where it was put; None: there is none that
    runs with it.

    Nothing is fetched for a model whose own metadata say that edgeq has no tower for it.  Errors: as `fetched`.
    """
    found = None if model.converted else tower_in(contents.files, model)
    if found is None or not takes_tower(path):
        return None
    tower = fetched(name, found, contents, access)[0]
    try:
        check_tower(path, tower)
    except (CheckpointError, UnsupportedError) as error:
        note(f"{name}: pictures are not read: {error}")
        return None
    return found.files[0], tower


def _path_of_tower(name: HubName, model: HubModel, path: Path, contents: Listing, access: HubAccess) -> Path | None:
    found = tower_beside(name, model, path, contents, access)
    return found[1] if found else None


def checkpoint_source(text: str, access: HubAccess, with_tower: bool) -> tuple[str, Path | None]:
    """What `edgeq convert` reads where a name of the hub is given: a GGUF file in the cache, or the id of a repository.

    with_tower   look for the vision tower of a GGUF file too, the second of the two

    Without a type a repository that has weights in safetensors is meant as such.  Errors: as `model_file`; CheckpointError: the
    name means an .edgeq file.
    """
    name = hub_name(text)
    found = listing(name, access)
    if not name.quant and has_safetensors(found):
        return name.repository, None
    model = chosen(name, models_in(found.files))
    if model is None:
        return name.repository, None
    if model.converted:
        raise CheckpointError(f"{name}: {model.files[0].path} is an .edgeq file already: edgeq run {name}")
    path = fetched(name, model, found, access)[0]
    return str(path), _path_of_tower(name, model, path, found, access) if with_tower else None


def has_safetensors(contents: Listing) -> bool:
    """Whether weights in safetensors are at the top of a repository."""
    return any(file.path.endswith(".safetensors") and "/" not in file.path for file in contents.files)


def without_models(name: HubName, contents: Listing) -> CheckpointError:
    """The error for a repository without a file that can run."""
    problem = "no model that edgeq reads: neither .edgeq, GGUF nor safetensors files"
    if has_safetensors(contents):
        problem = f"a checkpoint, with neither .edgeq nor GGUF files; convert it first: {conversion(name.repository)}"
    return CheckpointError(f"{name}: {problem}")


def conversion(repository: str) -> str:
    """The command that makes an .edgeq file of the checkpoint in a repository."""
    return f"edgeq convert {repository} -o {repository.rpartition('/')[2]}.edgeq"


def fetched(name: HubName, model: HubModel, contents: Listing, access: HubAccess) -> list[Path]:
    """The paths of all files of a model in the cache, the first part first; what is missing is fetched, its digest checked.

    CheckpointError: a digest is not the one that the hub says; it cannot be had.  ResourceError: the disk has no room.
    """
    if contents.folder is not None:
        return [contents.folder / file.path for file in model.files]
    if unknown := [file.path for file in model.files if not file.digest]:
        raise CheckpointError(f"{name}: the hub says no digest of {unknown[0]}; download it by other means and give its path")
    missing = [file for file in model.files if not _blob(name, file).exists()]
    if missing:
        _check_room(name, missing)
        note(f"{name}: fetching {model.files[0].path} ({model.size / 1e6:,.1f} MB)")
        with progress() as bar:
            before, total = 0, sum(file.size for file in missing)
            for file in missing:
                _fetch(name, file, replace(access, on_download=_after(before, total, bar.in_bytes)))
                before += file.size
    return [_linked(name, file, access) for file in model.files]


def pulled_checkpoint(name: HubName, contents: Listing, access: HubAccess) -> Path:
    """The folder in the cache with all that `edgeq convert` reads of a repository; errors as `hub_errors`."""
    patterns = (*TEXT_FILES, *WEIGHT_FILES)
    with progress() as bar:
        expected = sum(file.size for file in contents.files if file.path.endswith(".safetensors"))
        return download(name.repository, replace(access, on_download=bar.in_bytes), patterns, expected)


def digest_of(path: Path, digest: str, on_read: Callable[[int], None]) -> str:
    """The digest of a file, of the same kind as `digest`; `on_read` takes the bytes that were read until then."""
    # A blob of git begins with its length.
    digits = hashlib.sha256() if len(digest) == SHA256_DIGITS else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    read = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digits.update(piece)
            read += len(piece)
            on_read(read)
    return digits.hexdigest()


def check_digest(name: HubName, file: RepositoryFile, path: Path) -> None:
    """CheckpointError: `path` holds something else than the hub has; it is removed."""
    if not file.digest:
        return
    with progress() as bar:
        digest = digest_of(path, file.digest, lambda read: bar(read, file.size, f"checking {file.path}"))
    if digest != file.digest:
        path.resolve().unlink(missing_ok=True)
        found = f"{file.path} has the digest {digest}, and the hub says {file.digest}"
        raise CheckpointError(f"{name}: {found}; it was removed, run the same command again")


def _after(before: float, total: float, on_download: OnDownload) -> OnDownload:
    """Progress of one file as that of all of them: `before` bytes came before it."""
    return lambda done, _, label: on_download(before + done, total, label)


def _blob(name: HubName, file: RepositoryFile) -> Path:
    return repository_folder(name.repository) / "blobs" / file.digest


def _check_room(name: HubName, missing: list[RepositoryFile]) -> None:
    """ResourceError: the disk has less room than is still to be fetched."""
    folder = repository_folder(name.repository)
    needed = 0
    for file in missing:
        aside = _blob(name, file).with_name(file.digest + ASIDE)
        needed += file.size - (aside.stat().st_size if aside.exists() else 0)
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        found = f"{needed / 1e6:,.1f} MB are to be fetched, and {place} has {free / 1e6:,.1f} MB free"
        instead = "make room (edgeq list, edgeq rm), choose a smaller model, or set HF_HOME to a folder on another disk"
        raise ResourceError(f"{name}: {found}; {instead}")


def _fetch(name: HubName, file: RepositoryFile, access: HubAccess) -> None:
    """Fetch a file into its place among the blobs, from where an earlier run stopped, and check its digest."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

    blob = _blob(name, file)
    aside = blob.with_name(blob.name + ASIDE)
    folder = repository_folder(name.repository)
    lock = folder.parent / ".locks" / folder.name / f"{file.digest}.lock"
    with hub_errors(str(name), access):
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        # That of huggingface_hub: another process may fetch the same file.
        with WeakFileLock(lock):
            if blob.exists():
                return
            if aside.exists() and aside.stat().st_size > file.size:
                aside.unlink()
            with open(aside, "ab") as output:
                begun = output.tell()
                meter = byte_meter(access.on_download, f"downloading {name.repository}", file.size)
                if begun < file.size:
                    http_get(
                        hf_hub_url(name.repository, file.path, revision=access.revision),
                        output,
                        resume_size=begun,
                        headers=build_hf_headers(token=access.token),
                        expected_size=file.size,
                        tqdm_class=meter,
                    )
                output.flush()
                os.fsync(output.fileno())
            check_digest(name, file, aside)
            os.replace(aside, blob)


def _linked(name: HubName, file: RepositoryFile, access: HubAccess) -> Path:
    """The path under the name that the file has in the repository; huggingface_hub makes it, and finds the blob there."""
    from huggingface_hub import hf_hub_download

    folder = snapshot(name.repository, access.revision)
    if folder is not None and (folder / file.path).resolve() == _blob(name, file).resolve():
        return folder / file.path
    with hub_errors(str(name), access):
        return Path(hf_hub_download(name.repository, file.path, revision=access.revision, token=access.token))
