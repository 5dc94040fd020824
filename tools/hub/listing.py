"""The files of a repository: those that the hub has, or without a network those that its cache on this machine has."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeq.converters.checkpoint.download import HubAccess, HubUnreachable, hub_errors
from edgeq.tools.cli.terminal import note
from edgeq.tools.hub.choice import RepositoryFile
from edgeq.tools.hub.names import HubName

MAIN = "main"
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Listing:
    """The files of one revision.  `folder`: None, or where they lie in the cache because the hub could not be asked."""

    files: tuple[RepositoryFile, ...]
    folder: Path | None = None


def listing(name: HubName, access: HubAccess) -> Listing:
    """What the repository has.

    CheckpointError: there is no such repository or revision, or no access.  HubUnreachable: no network, and nothing cached.
    """
    from huggingface_hub import HfApi, constants

    # What a user must know is an error of edgeq.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    offline = access.offline or constants.HF_HUB_OFFLINE
    try:
        if offline:
            raise HubUnreachable(f"{name}: run once with a network")
        with hub_errors(str(name), access):
            found = HfApi(token=access.token).model_info(name.repository, revision=access.revision, files_metadata=True)
    except HubUnreachable as error:
        folder = snapshot(name.repository, access.revision)
        if folder is None:
            raise HubUnreachable(f"{name}: not in the local hub cache; {str(error).removeprefix(f'{name}: ')}") from None
        if not offline:
            note(f"{name}: the hub cannot be reached; this is what was fetched before")
        return Listing(tuple(files_of(folder)), folder)
    files = (
        RepositoryFile(file.rfilename, file.size or 0, _digest(file.lfs.sha256 if file.lfs else file.blob_id))
        for file in found.siblings or ()
    )
    return Listing(tuple(files))


def repository_folder(repository: str) -> Path:
    """Where huggingface_hub's cache has a repository, or would have it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def snapshot(repository: str, revision: str | None = None) -> Path | None:
    """The folder of a revision in the cache; None: it has none."""
    folder = repository_folder(repository)
    try:
        commit = (folder / "refs" / (revision or MAIN)).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = revision or ""
    found = folder / "snapshots" / commit
    return found if commit and found.is_dir() else None


def files_of(folder: Path) -> Iterator[RepositoryFile]:
    """The files of a snapshot that are whole."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield RepositoryFile(path.relative_to(folder).as_posix(), path.stat().st_size, _digest(path.resolve().name))


def _digest(text: str | None) -> str:
    """SHA-1 or SHA-256 as the hub says it, by which the cache names a file; "" for anything else, which could be a path."""
    return text if text and _DIGEST.fullmatch(text) else ""
