"""Over how many blocks of threads a fused product is spread: what the device says that it holds, and waves.  Without TVM."""

from __future__ import annotations

import pytest

from edgeq.converters.families.table import recognise
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.runtime.network.decoder import decoder
from edgeq.targets.cuda.lowering.context import Tuning
from edgeq.targets.cuda.lowering.spread import PROLOGUE, divided
from edgeq.targets.cuda.run.plan import Product, products
from edgeq.targets.target import Options
from edgeq.tools.lab.make_checkpoint import SHAPES, llama_config
from edgeq.tools.measure.random_file import with_layers, write_random

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    config = with_layers(recognise(llama_config(SHAPES["smollm-135m"]))[1], 1)
    path = tmp_path_factory.mktemp("spread") / "random.edgeq"
    write_random(path, config, Codec("int", 4, 128))
    return ModelFile.open(path)


def spread(file: ModelFile, held: int, multiprocessors: int = 8) -> dict[str, Product]:
    found = products(decoder(file.metadata), file, Options("a16", max_rows=16), multiprocessors, lambda variant: held)
    return {each.name: each for each in found}


@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize("places", [1, 7, 32, 108, 924])
def test_blocks_of_threads_have_every_block_of_the_file_once_and_end_as_soon_as_they_can(places: int, factors: int) -> None:
    for blocks in (1, 2, 31, 128, 512, 8016):
        found = divided(blocks, factors, 8, places)
        assert 1 <= found.each * factors <= 8 and (found.ctas - 1) * found.each < blocks <= found.ctas * found.each
        waves = -(-found.ctas // places)
        for each in range(1, 8 // factors + 1):
            others = -(-blocks // (each * places))
            assert waves * (found.each * factors + PROLOGUE) <= others * (each * factors + PROLOGUE)
        if blocks <= places:
            assert (found.each, waves) == (1, 1)


def test_a_gpu_with_places_for_fewer_gets_no_second_wave_of_a_few() -> None:
    """512 blocks beside their gates, on 36 multiprocessors that hold three blocks of threads each: 128 would leave 88 idle."""
    assert divided(512, 2, 8, 36 * 4).ctas == 128 and divided(512, 2, 8, 36 * 3).ctas == 171


def test_as_many_are_started_as_the_device_says_that_it_holds(file: ModelFile) -> None:
    three, four, more = (spread(file, held) for held in (3, 4, Tuning().resident + 3))
    assert [each["gate_up"].ctas for each in (three, four)] == [24, 32] and more == four
    # A block of threads for each head, however many are held: fewer of them ask for more ahead.
    assert three["qkv"].ctas == four["qkv"].ctas == 15
    one = spread(file, 1)["head"]
    assert one.ctas <= 8 * -(-3072 // 64) and one.ahead > four["head"].ahead


def test_what_holds_no_block_of_threads_is_spread_all_the_same(file: ModelFile) -> None:
    """A driver that says so refuses the launch, with its own words."""
    assert spread(file, 0) == spread(file, 1)
