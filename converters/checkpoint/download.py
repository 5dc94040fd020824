"""Fetches files of a hub repository into huggingface_hub's cache, with progress of our own; its errors as one line.

huggingface_hub resumes a cut connection; of a process that was killed, files that were whole are kept.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq.errors import CheckpointError, ResourceError

OnDownload = Callable[[float, float, str], None]
"""Progress callback: (bytes fetched, bytes in all, label)."""
SERVER_ERROR = 500
"""HTTP status from which on the trouble is the hub's own."""
LOG_IN = "run `hf auth login` or set HF_TOKEN"


def silent(done: float, total: float, label: str) -> None:
    """An OnDownload that shows nothing."""


@dataclass(frozen=True)
class HubAccess:
    """How to reach the hub, as huggingface_hub has it: access token, branch or commit, cached files only.

    on_download   called from several threads, but by one at a time
    """

    token: str | None = field(default=None, repr=False)
    revision: str | None = None
    offline: bool = False
    on_download: OnDownload = silent


class HubUnreachable(CheckpointError):
    """Nothing came from the hub: no network, no answer, or it was not to be asked."""


@contextmanager
def hub_errors(repository: str, access: HubAccess) -> Iterator[None]:
    """Turn what huggingface_hub raises into one clear error that begins with `repository`.

    CheckpointError: it cannot be had.  HubUnreachable: not now.  ResourceError: the disk is full.
    """
    from huggingface_hub import errors

    # What its errors share with those of the client library below it, which has another name in each major version.
    client_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
        return
    except errors.GatedRepoError:
        problem = f"access is restricted: accept its licence on huggingface.co, then {LOG_IN}"
    except errors.RevisionNotFoundError:
        problem = f"it has no revision {access.revision!r}"
    except errors.RepositoryNotFoundError:
        problem = f"no such folder here and no such repository on the hub; if it is private, {LOG_IN}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        problem = "no such folder here and not in the local hub cache; run once with a network, or give a folder"
        raise HubUnreachable(f"{repository}: {problem}") from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ResourceError(f"{repository}: the disk is full; make room, then run the same command again") from None
        problem = f"the download failed: {str(error).splitlines()[0]}; run the same command again to continue it"
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code >= SERVER_ERROR:
            raise HubUnreachable(f"{repository}: {problem}") from None
    except client_error as error:
        problem = f"no connection to the hub ({type(error).__name__}); run the same command again when there is one"
        raise HubUnreachable(f"{repository}: {problem}") from None
    raise CheckpointError(f"{repository}: {problem}")


def download(repository: str, access: HubAccess, patterns: tuple[str, ...], expected: int = 0) -> Path:
    """The local snapshot of a hub repository, restricted to `patterns`.

    expected: bytes that the files have together, as far as known.  Errors: as `hub_errors`.
    """
    from huggingface_hub import snapshot_download

    with hub_errors(repository, access):
        return Path(
            snapshot_download(
                repository,
                revision=access.revision,
                token=access.token,
                local_files_only=access.offline,
                allow_patterns=list(patterns),
                tqdm_class=byte_meter(access.on_download, f"downloading {repository}", expected),
            )
        )


def byte_meter(on_download: OnDownload, label: str, expected: int) -> type[Any]:
    """A class of tqdm bars that draws nothing.

    huggingface_hub makes several: of files, of bytes received and of bytes written.  Those of bytes, of which the largest is
    the truth, are reported; their total grows with each file that is begun, so `expected` counts where it is more.
    """
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    lock, fetched = threading.Lock(), dict[int, tuple[float, float]]()

    class Meter(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            # A disabled bar would not count.
            super().__init__(*arguments, **{**settings, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.unit == "B":
                with lock:
                    fetched[id(self)] = (self.n, self.total or 0)
                    done = max(n for n, _ in fetched.values())
                    on_download(done, max(expected, *(total for _, total in fetched.values())), label)

        def display(self, *arguments: Any, **settings: Any) -> bool:
            return True

    return Meter
