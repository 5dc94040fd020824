"""What fused products have asked of the memory, computed from what the compiler states."""

from __future__ import annotations

import pytest

from edgeq.devices import DEVICES
from edgeq.targets.cuda import build, nvrtc, occupancy
from edgeq.targets.cuda.lowering.fused import RESIDENT
from edgeq.targets.cuda.pack import Variant

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_generator")]

CODEC = (4, False, False, 128)
FUSED = (
    Variant("fused_rows", ("group", *CODEC)),
    Variant("fused_activate", ("silu", True, "group", *CODEC)),
    Variant("fused_heads", ("f16", False, "group", *CODEC)),
)
GPUS = [device for device in DEVICES.values() if device.isa.startswith("sm_")]


@pytest.mark.parametrize("variant", FUSED, ids=lambda variant: variant.symbol)
def test_a_busy_multiprocessor_has_half_as_much_again_in_flight_as_it_needs(variant: Variant) -> None:
    if reason := nvrtc.refusal():
        pytest.skip(reason)
    assert len(GPUS) > 5
    images = build.compiled(variant, sorted({device.isa for device in GPUS})).images
    for device in GPUS:
        held, needed = occupancy.blocks_held(images[device.isa], 128), occupancy.bytes_needed(device)
        assert held and needed
        # As many blocks as are started, where there is work for them.
        asked = occupancy.bytes_in_flight(variant, min(held, RESIDENT), 128)
        assert asked and asked >= 1.5 * needed, device.name
