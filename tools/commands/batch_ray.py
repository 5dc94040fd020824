"""Lines of a batch over the machines of a Ray cluster: each worker loads the model and answers parts of the lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from edgeq.runtime.server.interfaces.batch_lines import BatchLine, Lines, ResultLine

LOCAL = "local"
"""The address of a cluster that this process starts for itself."""
PART = 16
"""Lines of a part for each seat of a worker: only within a part does a line begin as soon as another ends."""


class Worker:
    """Holds the model in a process of its own."""

    def __init__(self, load: Callable[[], Lines]) -> None:
        self._lines = load()

    def __call__(self, part: dict[str, Any]) -> dict[str, Any]:
        """Records of lines, as arrays of Python objects."""
        from edgeq.runtime.server.interfaces.batch_lines import BatchLine

        lines = [
            BatchLine(*each) for each in zip(part["id"].tolist(), part["data"].tolist(), part["wrong"].tolist(), strict=True)
        ]
        found = list(self._lines.records(lines))
        return {
            "id": np.array([each.id for each in found], object),
            "data": np.array([each.data for each in found], object),
            "failed": np.array([each.failed for each in found]),
        }


def records(
    address: str, load: Callable[[], Lines], lines: Iterator[BatchLine], workers: int, *, threads: int, seats: int
) -> Iterator[ResultLine]:
    """The record of each line, as parts are finished.  ModuleNotFoundError: Ray is not installed.

    load      what each worker calls, where it runs;  threads: that it takes
    """
    import ray
    import ray.data

    from edgeq.runtime.server.interfaces.batch_lines import ResultLine

    if address == LOCAL:
        ray.init(num_cpus=workers * threads, include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=address, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        given = ray.data.from_items([each._asdict() for each in lines], override_num_blocks=workers)
        found = given.map_batches(
            Worker,
            fn_constructor_kwargs={"load": load},
            batch_size=PART * seats,
            concurrency=workers,
            num_cpus=threads,
        )
        for row in found.iter_rows():
            yield ResultLine(row["id"], bytes(row["data"]), bool(row["failed"]))
    finally:
        ray.shutdown()
