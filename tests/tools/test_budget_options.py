"""A budget as the command line gives it."""

from __future__ import annotations

from edgeq.converters.budget.budget import Budget
from edgeq.system.devices import DEVICES
from edgeq.tools.commands.budget import resolved


def test_a_file_for_a_gpu_has_the_codecs_of_one_for_any_other_device() -> None:
    for device in (None, DEVICES["raspberry-pi-5"], DEVICES["rtx-4090"]):
        assert resolved({"average_bits": 2.5, "method": None}, device)["budget"] == Budget("bits", 2.5)
