"""Predicted GPU speeds, with numbers written out; tests/cuda/supply/test_occupancy.py has the whole page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeq.system.devices import DEVICES
from edgeq.tools.lab.gpu_roofline.page import BARS, BOARDS, CODEC, MODELS, ONE_BY_ONE, speed_up
from edgeq.tools.lab.gpu_roofline.prediction import (
    BETTER,
    BOARD_HOST,
    CLOCKS,
    EXPECTED,
    HOST,
    WORSE,
    AttentionWork,
    ProductWork,
    Token,
    product_bounds,
)

AGX, NANO, H200 = (DEVICES[name] for name in ("jetson-agx-orin-64gb", "jetson-orin-nano-8gb-15w", "h200"))
WORK = ProductWork("o", 2048, 2048, ctas=64, places=64, blocks=2, rounds=2, shares=1, normed=False, ahead=1e9)


def test_a_product_takes_the_longest_of_its_bytes_its_chain_and_its_instructions() -> None:
    """Numbers written out: 2.16 MB at 164 GB/s; 1,200 + 1,200 + 4 * 820 + 500 clocks of 1.3 GHz."""
    found = product_bounds(WORK, AGX, CODEC, EXPECTED)
    assert found.memory == pytest.approx(2048 * 2048 * 4.125 / 8 / (0.8 * 204.8e9))
    assert found.chain == pytest.approx(6180 / 1.3e9)
    assert found.issue == pytest.approx(2048 * 2048 * 4.125 / 8 / (16 * 1.3e9 * 4096 / 156))
    assert (found.seconds, found.name) == (found.memory, "bytes")
    assert product_bounds(WORK, H200, CODEC, EXPECTED).name == "latency"
    assert product_bounds(replace(WORK, rows=65536), NANO, CODEC, BETTER).name == "bytes"


def test_waves_norms_and_shares_change_the_chain_as_they_do_on_a_gpu() -> None:
    one = product_bounds(WORK, H200, CODEC, EXPECTED).chain
    assert product_bounds(replace(WORK, ctas=65), H200, CODEC, EXPECTED).chain == 2 * one
    assert product_bounds(replace(WORK, normed=True), H200, CODEC, EXPECTED).chain - one == pytest.approx(700 / 1.83e9)
    deep = replace(WORK, columns=8192, rounds=8)
    assert replace(deep, rounds=2, shares=4).chain < deep.chain / 2
    # A norm is hidden as long as bytes come that were asked for before it.
    asked, late = (replace(WORK, normed=True, ahead=ahead) for ahead in (1e9, 0))
    idle = product_bounds(late, AGX, CODEC, EXPECTED).memory - product_bounds(asked, AGX, CODEC, EXPECTED).memory
    assert idle == pytest.approx(asked.prologue / 1.3e9)


def test_a_token_is_the_sum_of_its_launches_and_no_shorter_than_what_the_host_does() -> None:
    works = [WORK, replace(WORK, rows=128256, ctas=64)]
    token = Token(works, layers=3, launches=3 * 2 + 1 + 4, kv_bytes=2048, context=256, heads=8)
    gpu, whole = token.seconds(AGX, CODEC, EXPECTED)
    layer, head = (product_bounds(work, AGX, CODEC, EXPECTED).seconds for work in token.products)
    # Four parts of a page, of which each has a block of threads.
    attention, others = (2500 + 1900) / 1.3e9, 4 * 2000 / 1.3e9
    assert gpu == pytest.approx(3 * (layer + attention) + head + others + 11 * 2.5e-6)
    assert whole == pytest.approx(gpu + BOARD_HOST / 64)
    for assumed, faster in ((WORSE, EXPECTED), (EXPECTED, BETTER)):
        assert token.seconds(AGX, CODEC, assumed)[1] > token.seconds(AGX, CODEC, faster)[1]
    small = replace(token, products=[WORK, WORK])
    assert small.seconds(H200, CODEC, BETTER)[1] == pytest.approx(HOST * 65 / 64)


def test_parts_of_a_context_shorten_the_chain_of_attention() -> None:
    short, one = (AttentionWork(context, 8, 132) for context in (512, 64))
    assert (list(short.blocks), short.chain) == ([1] * 8, 2500 + 1900) and one.chain == 2500
    # 28 parts, of which the last 12 have eight pages each; where 8 blocks of threads have a place, each of them has 28 in turn.
    long = AttentionWork(8192, 8, 132)
    assert list(long.blocks) == [1] * 8 + [2] * 4 + [4] * 4 + [8] * 12
    assert long.chain == 2500 + 7 * 1900 + 2 * 1900
    assert replace(long, multiprocessors=4).chain == 28 * 2500 + 100 * 1900 + 2 * 1900


def test_every_board_of_the_page_has_a_clock_and_servers_are_among_them() -> None:
    assert CLOCKS.keys() == set(BOARDS) and {"h100", "h200"} <= set(BOARDS) and set(ONE_BY_ONE) <= set(MODELS)


def test_a_draft_that_costs_a_token_gains_nothing_and_a_free_one_at_most_its_length() -> None:
    for beta in (0.5, 0.99):
        assert speed_up(beta, 4, 1.0, 1.0) < 1 < speed_up(beta, 4, 0.0, 1.0) < 5
    assert speed_up(0.5, 1, 0.0, 1.0) == 1.5


def test_bars_are_of_devices_and_shapes_of_the_page() -> None:
    assert {bar.device for bar in BARS} <= set(DEVICES) and {bar.model for bar in BARS} <= set(MODELS)
    assert {bar.trust for bar in BARS} <= {"A", "B"}
