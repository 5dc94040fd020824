"""What fused products have asked of the memory, computed from what the compiler states, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.system.devices import DEVICES
from edgeq.targets.cuda.device import occupancy
from edgeq.targets.cuda.lowering.context import Tuning
from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.tools.lab.gpu_roofline.page import GPUS, MARGIN, MODELS, Shape, page, shape

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive]

CODEC = (4, False, False, 128)
FUSED = (
    Variant("fused_rows", ("group", *CODEC)),
    Variant("fused_activate", ("silu", True, "group", *CODEC)),
    Variant("fused_heads", ("f16", False, "group", *CODEC)),
)
PAGE = Path(__file__).parents[3] / "docs" / "cuda-speed.md"
PRODUCTS = ["qkv", "o", "gate_up", "down", "head"]


@pytest.fixture(scope="module")
def shapes() -> dict[str, Shape]:
    if reason := build.refusal() or nvrtc.refusal():
        pytest.skip(reason)
    return {name: shape(name) for name in MODELS}


@pytest.mark.parametrize("variant", FUSED, ids=lambda variant: variant.symbol)
def test_a_busy_multiprocessor_has_half_as_much_again_in_flight_as_it_needs(needs_generator: None, variant: Variant) -> None:
    if reason := nvrtc.refusal():
        pytest.skip(reason)
    assert len(GPUS) > 5
    images = build.compiled(variant, sorted({device.isa for device in GPUS})).images
    for device in GPUS:
        held, needed = occupancy.blocks_held(images[device.isa], 128), occupancy.bytes_needed(device)
        assert held and needed and MARGIN * needed <= Tuning().in_flight
        # As many blocks as are started, where there is work for them.
        asked = occupancy.bytes_in_flight(variant, min(held, Tuning().resident), 128)
        assert asked and asked >= MARGIN * needed, device.name


@pytest.mark.parametrize("model", MODELS)
def test_every_product_asks_for_half_as_much_again_as_a_device_needs_or_for_all_of_itself(
    shapes: dict[str, Shape], model: str
) -> None:
    rows = shapes[model].asked
    assert [(row.device.name, row.product.name) for row in rows] == [
        (device.name, name) for device in GPUS for name in PRODUCTS
    ]
    machine_code = {f"sm_{sm}" for sm in nvrtc.COMPILED_FOR}
    assert {each.name for each in GPUS} == {name for name, each in DEVICES.items() if each.isa in machine_code}
    for row in rows:
        assert row.share >= MARGIN, (row.device.name, row.product)
        each, started = row.product, row.resident * row.device.multiprocessors
        if row.asked is None:
            assert each.ctas <= started and each.ahead == each.rounds
        else:
            # More than what a block of threads multiplies and what it has asked for there is not.
            assert row.asked * row.device.multiprocessors <= 2 * each.rows * each.columns // 2, (row.device.name, each)


def test_the_page_is_what_the_command_prints(shapes: dict[str, Shape]) -> None:
    assert PAGE.read_text(encoding="utf-8") == "\n".join(page(shapes)) + "\n"
