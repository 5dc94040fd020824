"""The experts that rows chose, which the host reads from their routing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgeq.targets.cuda.device.device import Device
from edgeq.targets.cuda.lowering.context import Launch, Routed


def launches(device: Device, routed: Routed, count: int) -> Iterator[tuple[Launch, int]]:
    """The launches of every expert that one of `count` rows chose, with how many did; the host waits for the routing.

    Each is to be started before the next is asked for: an expert's rows take the place of those of the one before.
    """
    chosen = routed.operation.chosen
    routing = np.empty((count, 2 * chosen), np.float32)
    device.read(routed.routing, routing)
    experts = routing[:, chosen:].astype(np.int64)
    for expert in np.unique(experts).tolist():
        rows, ranks = np.nonzero(experts == expert)
        device.write(routed.rows, rows.astype(np.int32))
        device.write(routed.places, (rows * chosen + ranks).astype(np.int32))
        for launch in routed.launches[expert]:
            yield launch, len(rows)
    yield routed.combine, count
