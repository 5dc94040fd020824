"""What products of decode cost with other bits, measured: neither their bytes nor their arithmetic alone tell it.

How well unpacking and reading overlap differs from width to width.  So two files with random weights, in a codec and in the
same with other bits, are decoded in turn, and their products compared.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from edgeq.format.codec import ROWS, Codec
from edgeq.format.records import Mode
from edgeq.network.config import ModelConfig
from edgeq.runtime import Model
from edgeq.system.machine import available_bytes, last_level_cache
from edgeq.system.measurements import ALONE, measured
from edgeq.tools.cli.terminal import compilation, progress
from edgeq.tools.commands.bench import Test
from edgeq.tools.measure.conditions import core_wait_s
from edgeq.tools.measure.decode_speed import MEMORY_SHARE, kept_name
from edgeq.tools.measure.random_file import file_bytes, with_layers, write_random
from edgeq.tools.profile.operations import breakdown
from edgeq.tools.profile.runs import Combination, Setting

WidthCost = Callable[[Codec, int, int, Mode], float]
"""(codec, other bits, threads, mode) -> how many times as long products take with those bits."""
TOKENS = Test("tg", 8, 0)
ROUNDS = 9
"""How often the two files take turns; the first turn is warm-up, of the others the median counts."""
MIN_BYTES, CACHES = 64 << 20, 4
"""A token reads as much as one of the model does, or at least so much and so many times the largest cache."""


def width_cost(model: Model, codec: Codec, bits: int, threads: int, mode: Mode) -> float:
    """How many times as long as in `codec` the products of decode take with other bits, with the isa of `model`.

    Measured in some seconds, to which the first time compiling is added, and kept per machine, shape and kernels.

    ResourceError: there is no room for the files.
    """
    config, isa = _shape(model.file.metadata.config, codec), model.program.options.isa
    name = kept_name("width_cost", config, codec.name, bits, mode, isa)

    def measure() -> tuple[float, bool]:
        with progress() as report:
            report(0, 0, f"measuring what {bits} bits cost")
            return _measured(config, (codec, replace(codec, bits=bits)), threads, mode, isa)

    return 1.0 if bits == codec.bits else measured(name, threads, measure)


def _shape(config: ModelConfig, codec: Codec) -> ModelConfig:
    """The model; of one that is much larger than the caches the first layers, with next to no head."""
    whole = with_layers(config, config.num_hidden_layers)
    room = min(max(MIN_BYTES, CACHES * (last_level_cache() or 0)), available_bytes() // MEMORY_SHARE)
    if file_bytes(whole, codec) <= room:
        return whole
    headless = replace(whole, vocab_size=ROWS)
    sizes = (file_bytes(with_layers(headless, count), codec) for count in range(1, config.num_hidden_layers))
    return with_layers(headless, 1 + sum(size < room for size in sizes))


def _measured(
    config: ModelConfig, codecs: tuple[Codec, Codec], threads: int, mode: Mode, isa: str | None
) -> tuple[float, bool]:
    """Seconds of products in the second codec over those in the first, and whether the threads were alone on their cores."""
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        pair = [_loaded(Path(folder) / f"{codec.bits}.edgeq", config, codec, threads, mode, isa) for codec in codecs]
        for each in pair:
            _product_seconds(each)
        began, waited = perf_counter(), core_wait_s()
        turns = [[_product_seconds(each) for each in pair] for _ in range(ROUNDS - 1)]
        took, now = perf_counter() - began, core_wait_s()
    alone = waited is not None and now is not None and now - waited <= (1 - ALONE) * threads * took
    return statistics.median(other / own for own, other in turns), alone


def _loaded(path: Path, config: ModelConfig, codec: Codec, threads: int, mode: Mode, isa: str | None) -> Combination:
    write_random(path, config, codec)
    with compilation() as on_progress:
        model = Model.load(
            path, target="cpu", isa=isa, mode=mode, threads=threads, context=TOKENS.count, on_progress=on_progress
        )
    return Combination(Setting(threads, mode, "f16"), model, 0.0, 0.0, False)


def _product_seconds(combination: Combination) -> float:
    """Seconds of a token that the products of the layers take."""
    found = breakdown(TOKENS.name, [combination.run(TOKENS, TOKENS.count, True)], {})
    return sum(line.seconds for line in found.lines if line.layer >= 0 and line.macs)
