"""Over how many blocks of threads a fused product is spread: what the device says that it holds, and waves.  Without TVM."""

from __future__ import annotations

import pytest

from edgeq.converters.families.table import recognise
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.runtime.network.decoder import decoder
from edgeq.targets.cuda.lowering.context import Tuning
from edgeq.targets.cuda.lowering.spread import PROLOGUE, divided, shared
from edgeq.targets.cuda.run.plan import NoDevice, Product, device_bytes, names_only, products
from edgeq.targets.cuda.run.program import CudaProgram
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


def test_blocks_of_threads_without_work_get_a_share_of_the_input_channels() -> None:
    """128 blocks of threads of eight rounds on 528 places: four shares of two rounds each, and no share without a round."""
    assert shared(128, 8, 528) == 4 and shared(48, 2, 528) == 2
    assert shared(64, 8, 64) == shared(40, 8, 64) == shared(1, 1, 64) == 1
    for ctas, rounds, places in ((10, 8, 32), (3, 7, 64), (1, 112, 924), (5, 3, 11)):
        found = shared(ctas, rounds, places)
        each = -(-rounds // found)
        assert 1 < found <= rounds and found * ctas <= places and (found - 1) * each < rounds <= found * each


def test_products_of_few_channels_are_shared_where_a_gpu_has_places_and_their_room_is_foreseen(file: ModelFile) -> None:
    """1,536 input channels are two rounds, and 576 output channels 36 blocks of threads."""
    many, few = spread(file, 4, 108)["down"], spread(file, 4, 8)["down"]
    assert (many.shares, many.ctas, many.rounds, many.blocks) == (2, 72, 1, 1) and few.shares == 1
    assert {name: each.shares for name, each in spread(file, 4, 108).items() if name != "down"} == dict.fromkeys(
        ("qkv", "o", "gate_up", "head"), 1
    )
    graph, options = decoder(file.metadata), Options("a16", max_rows=16)
    foreseen = [device_bytes(graph, file, options, NoDevice(multiprocessors=count)) for count in (8, 108)]
    assert foreseen[1] > foreseen[0]
    for held in (1, 4):
        device = NoDevice(multiprocessors=108, blocks_held=lambda variant, held=held: held)
        assert CudaProgram(device, graph, file, options, kernel_source=names_only).device_bytes == foreseen[1]
