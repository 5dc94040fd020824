"""How fast this machine decodes: models of a shape, all in one codec or with a codec for each part, measured as `bench` does.

The time of a token is not its bytes over a bandwidth alone: a product of few bits has more to compute for each byte, and every
operation takes time of its own.  So files of the shape with random weights are written, loaded and decoded for a moment: their
speed follows from shape and codecs.  What those in one codec say about a mixture is in `DecodeTimes`; a mixture that is chosen
by it is decoded too.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

from edgeq.converters.probing.decode_times import MEASURED, WIDTHS, DecodeTimes
from edgeq.errors import ResourceError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.manifest import Shape
from edgeq.format.records import Mode
from edgeq.network.config import ModelConfig
from edgeq.runtime import Model
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.session.context_size import expected_cache_bytes
from edgeq.system import machine
from edgeq.system.devices import DeviceSpec, needed
from edgeq.system.measurements import ALONE, measured
from edgeq.targets import load
from edgeq.tools.cli.terminal import progress
from edgeq.tools.commands.bench import WARM_UP_TOKENS, Test, run
from edgeq.tools.measure.random_file import bytes_per_token, file_bytes, linears_read, with_layers, write_random

PROBE = 3
"""Version of what is measured here: numbers of other versions are not used."""
TEXT = Test("tg", 128, 0)
"""What is timed: the default of `edgeq bench`."""
SECONDS, FILE_SECONDS = 1.0, 3.0
"""How long a model of one width is decoded, and how long the one file that is asked about: on a machine that others share
the tokens of one second and the next differ by a tenth."""
ROUNDS = 3
"""How often every codec is measured, in turn, before the median counts: what else runs for a moment, here or on the
same host, must not decide."""
TURNS, TURN_SECONDS = 5, 0.5
"""How often an allocation and the first one are decoded in turn, and how long each time: what else the host does slows both."""
MAX_TURNS = 4 * TURNS
"""How often at most, where something else ran during some: seconds of the processor, which count then, can be a quarter off."""
MEMORY_SHARE = 4
"""One part in so many of the available memory may be taken by a file: a larger model is measured with fewer layers."""
MAX_FILE_BYTES = 4 << 30
"""The largest file that is written for a measurement, in bytes."""


def this_machine() -> DeviceSpec:
    """This machine as a device, with its measured read bandwidth."""
    cpu = machine.cpu()
    with progress() as bar:
        bar(0, 0, "measuring how fast memory is read")
        bandwidth = load("cpu").hardware().read_bandwidth(cpu.cores)
    assert bandwidth is not None
    rate = bandwidth.bytes_per_s
    return DeviceSpec("this-machine", cpu.arch, cpu.cores, machine.memory().total, rate, rate)


def times_here(config: ModelConfig, mode: Mode) -> DecodeTimes:
    """The measured decode of models of this shape, kept per machine, shape, mode and kernels where nothing disturbed.

    ResourceError: there is no room for two layers of it.
    """
    layers, cores = _layers(config), machine.cpu().cores
    found = {codec: list[float]() for codec in MEASURED}
    with progress() as bar:
        for done in range(ROUNDS * len(MEASURED)):
            turn, codec = done // len(MEASURED), MEASURED[done % len(MEASURED)]
            bar(done, ROUNDS * len(MEASURED), f"measuring how fast {codec.name} is decoded")
            name = kept_name("decode_seconds", config, codec.name, turn, mode, layers)
            measure = partial(_token_seconds, config, codec, mode, layers)
            found[codec].append(measured(name, cores, measure))
    return DecodeTimes(
        {codec: (bytes_per_token(config, codec, floats=False), statistics.median(taken)) for codec, taken in found.items()}
    )


def this_machine_with(file: ModelFile) -> DeviceSpec:
    """This machine with the measured decode of a file; with its bandwidth alone where the file does not fit in memory."""
    found, sizes, seconds = this_machine(), file.metadata.bytes_per_token(), seconds_here(file)
    return found if seconds is None else replace(found, decoded=(sizes["weights"] + sizes["head"], seconds))


def seconds_here(file: ModelFile) -> float | None:
    """The measured time of a token of a file; None: it does not fit in memory, so that the disk would be measured."""
    cache = expected_cache_bytes(decoder(file.metadata), file.metadata.kv, TEXT.count)
    if needed(file.size, cache) > machine.available_bytes():
        return None
    with progress() as bar:
        bar(0, 0, "measuring how fast the file is decoded")
        return seconds_per_token(file.path, seconds=FILE_SECONDS)[0]


def seconds_per_token(path: Path, mode: Mode | None = None, seconds: float = SECONDS) -> tuple[float, bool]:
    """`decoded` of a file, loaded for it."""
    with _loaded(path, mode) as model:
        return decoded(model, seconds)


def decoded(model: Model, seconds: float) -> tuple[float, bool]:
    """The time of a token of TEXT, as `edgeq bench` finds it, and whether what else runs left it alone.

    The median over texts that take `seconds`, or the beginning of one.  On a busy machine, in seconds of the processor over the
    number of threads: they still hold for one thread, as far as the others leave it caches and memory; several wait for each
    other.
    """
    test, threads, texts, tokens = replace(TEXT, count=min(TEXT.count, model.context)), model.program.threads, list[float](), 0
    # The first tokens touch every page of the weights.
    deque(run(model, test, WARM_UP_TOKENS["tg"]), 0)
    began, used = time.perf_counter(), time.process_time()
    while not texts or time.perf_counter() - began < seconds:
        times, end = list[float](), time.perf_counter() + seconds
        for taken in run(model, test, test.count):
            times.append(taken)
            if time.perf_counter() > end:
                break
        texts.append(statistics.mean(times))
        tokens += len(times)
    used = (time.process_time() - used) / threads
    alone = used >= ALONE * (time.perf_counter() - began)
    return (statistics.median(texts) if alone else used / tokens), alone


def in_turn(models: Mapping[str, Model], rounds: int, seconds: float) -> dict[str, list[tuple[float, bool]]]:
    """`decoded` of each, so many times in turn."""
    found: dict[str, list[tuple[float, bool]]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            found[name].append(decoded(model, seconds))
    return found


class AllocationsHere:
    """Decode of allocations on this machine (`DecodeHere`): of files with random weights, each in turn with the first one.

    Of a model too large for that the first layers and the head count for all.  Seconds are those of the median moment of all
    measurements, so that they can be compared.  The files go when the `with` ends.
    """

    def __init__(self, config: ModelConfig, mode: Mode, resumes: bool) -> None:
        """ResourceError: as `times_here`."""
        self.times, self.resumes, self.alone = times_here(config, mode), resumes, True
        layers, cpu = _layers(config)[-1], machine.cpu()
        self.setting = kept_name("decode_seconds", config, cpu.name, cpu.cores, mode, layers)
        self._config, self._mode = with_layers(config, layers), mode
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeq-")))
        self._first: Model | None = None
        self._of_first = list[float]()
        self._ratios: dict[tuple[Codec, ...], float] = {}

    def __enter__(self) -> AllocationsHere:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ratio(self, codecs: Mapping[str, Codec]) -> float:
        key = (*codecs.values(),)
        if key not in self._ratios:
            predicted = sum(
                self.times.seconds(codec, partial(_bytes_read, shape, share))
                for shape, codec, share in linears_read(self._config, WIDTHS[-1], codecs)
                if share and codec.integer
            )
            self._ratios[key] = self._seconds(codecs) / predicted
        return self._ratios[key]

    def _seconds(self, codecs: Mapping[str, Codec]) -> float:
        path = self._folder / f"{len(self._ratios)}.edgeq"
        write_random(path, self._config, WIDTHS[-1], codecs)
        if self._first is None:
            self._first = self._stack.enter_context(_loaded(path, self._mode))
            turns = self._turns(self._first)
        else:
            with _loaded(path, self._mode) as model:
                turns = self._turns(model)
            path.unlink()
        self._of_first += [first for first, _ in turns]
        return statistics.median(this / first for first, this in turns) * statistics.median(self._of_first)

    def _turns(self, model: Model) -> list[tuple[float, float]]:
        """Seconds of a token of the first allocation and of `model` in each turn: of those that nothing disturbed, if any."""
        models = {"first": self._first or model, "this": model}
        every, calm = list[tuple[float, float]](), list[tuple[float, float]]()
        while len(every) < MAX_TURNS and len(calm) < TURNS:
            ((first, alone),), ((this, both),) = in_turn(models, 1, TURN_SECONDS).values()
            every.append((first, this))
            if alone and both:
                calm.append((first, this))
        self.alone &= len(calm) == TURNS
        return calm or every


def _bytes_read(shape: Shape, share: Fraction, codec: Codec) -> float:
    return float(share * codec.nbytes(*shape))


def _loaded(path: Path, mode: Mode | None) -> Model:
    limit = ModelFile.open(path).metadata.config.max_position_embeddings
    return Model.load(path, context=min(TEXT.count, limit), mode=mode)


def _layers(config: ModelConfig) -> tuple[int, ...]:
    """The numbers of layers that are measured: all, or two from which all follow.  ResourceError: no room."""
    room, every = min(MAX_FILE_BYTES, machine.available_bytes() // MEMORY_SHARE), config.num_hidden_layers
    one, two = (file_bytes(with_layers(config, min(count, every)), WIDTHS[-1]) for count in (1, 2))
    if two > room:
        raise ResourceError(
            f"--speed on this machine: measuring {min(2, every)} layers of this model takes {two / 1e9:.1f} GB, and "
            f"{room / 1e9:.1f} GB are the most: a quarter of the available memory, up to {MAX_FILE_BYTES / 1e9:.1f} GB; "
            "give the bytes of a token with --read"
        )
    fits = every if every <= 2 else 1 + (room - one) // (two - one)
    return (every,) if fits >= every else (fits // 2, fits)


def _token_seconds(config: ModelConfig, codec: Codec, mode: Mode, layers: tuple[int, ...]) -> tuple[float, bool]:
    """Seconds of a token with all layers in `codec`, also from two numbers of them, and whether nothing disturbed."""
    found = [_seconds(with_layers(config, count), codec, mode) for count in layers]
    seconds, alone = found[-1][0], all(alone for _, alone in found)
    if len(layers) > 1:
        each = max(0.0, (seconds - found[0][0]) / (layers[1] - layers[0]))
        seconds += each * (config.num_hidden_layers - layers[1])
    return seconds, alone


def _seconds(config: ModelConfig, codec: Codec, mode: Mode) -> tuple[float, bool]:
    """Those of a model all in `codec`, which is written for it."""
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        path = Path(folder) / "random.edgeq"
        write_random(path, config, codec)
        return seconds_per_token(path, mode)


def kept_name(what: str, *about: object) -> str:
    """The name of a measurement that depends on all this, and on the kernels."""
    every = [
        *(asdict(each) if isinstance(each, ModelConfig) else each for each in about),
        PROBE,
        *load("cpu").hardware().kernel_version(),
    ]
    return f"{what} {hashlib.sha256(json.dumps(every, default=str).encode()).hexdigest()[:16]}"
