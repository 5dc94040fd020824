"""How fast this machine decodes: models of a shape in several codecs, measured, from which the speed of an allocation follows.

The time of a token is not its bytes over a bandwidth alone: a product of few bits has more to compute for each byte, and every
operation takes time of its own.  So files of the shape with random weights, all in one codec, are written, loaded and decoded
for a moment (`DecodeTimes` has what follows for a mixture).
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from edgeq import machine
from edgeq.codec import Codec
from edgeq.config import ModelConfig
from edgeq.container import ModelFile
from edgeq.converters.allocation.decode_times import MEASURED, WIDTHS, DecodeTimes
from edgeq.devices import Device, needed
from edgeq.errors import ResourceError
from edgeq.measurements import keep, known
from edgeq.records import Mode
from edgeq.runtime import Model
from edgeq.runtime.session import Session
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.jit.compile import cache_folder as kernels
from edgeq.targets.cpu.probes import ALONE, read_bandwidth
from edgeq.tools.random_file import bytes_per_token, file_bytes, with_layers, write_random
from edgeq.tools.terminal import progress

PROBE = 2
"""Version of what is measured here: numbers of other versions are not used."""
CONTEXT = 256
SECONDS, FILE_SECONDS = 1.0, 3.0
"""How long a model of one width is decoded, and how long the one file that is asked about: on a machine that others share
the tokens of one second and the next differ by a tenth."""
SPAN = 0.05
"""Seconds of tokens that are timed together.  Linux adds what other threads took to a process's time at their next tick, some
milliseconds later: the half of a token of a millisecond in two threads would be missing."""
ROUNDS = 3
"""How often every codec is measured, in turn, before the median counts: what else runs for a moment, here or on the
same host, must not decide."""
MEMORY_SHARE = 4
"""One part in so many of the available memory may be taken by a file: a larger model is measured with fewer layers."""
LARGEST = 4 << 30
"""The largest file that is written for a measurement, in bytes."""


def this_machine() -> Device:
    """This machine as a device, with its measured read bandwidth."""
    cpu = machine.cpu()
    with progress() as bar:
        bar(0, 0, "measuring how fast memory is read")
        bandwidth = read_bandwidth(cpu.cores)
    return Device("this-machine", cpu.arch, cpu.cores, machine.memory().total, bandwidth, bandwidth)


def times_here(config: ModelConfig, mode: Mode) -> DecodeTimes:
    """The measured decode of models of this shape; where nothing disturbed, kept per machine, shape, mode and kernels.

    ResourceError: there is no room for two layers of it.
    """
    layers, cores = _layers(config), machine.cpu().cores
    names = {codec: _name(config, codec, mode, layers) for codec in MEASURED}
    times = {codec: seconds for codec, name in names.items() if (seconds := known(name, cores)) is not None}
    missing = [codec for codec in MEASURED if codec not in times]
    found = {codec: list[tuple[float, bool]]() for codec in missing}
    with progress() as bar:
        for done in range(ROUNDS * len(missing)):
            codec = missing[done % len(missing)]
            bar(done, ROUNDS * len(missing), f"measuring how fast {codec.name} is decoded")
            found[codec].append(_token_seconds(config, codec, mode, layers))
    for codec, taken in found.items():
        times[codec] = statistics.median(seconds for seconds, _ in taken)
        if all(alone for _, alone in taken):
            keep(names[codec], cores, times[codec])
    return DecodeTimes({codec: (bytes_per_token(config, codec, floats=False), times[codec]) for codec in MEASURED})


def this_machine_with(file: ModelFile) -> Device:
    """This machine with the measured decode of a file; with its bandwidth alone where the file does not fit in memory."""
    found, sizes, seconds = this_machine(), file.metadata.bytes_per_token(), seconds_here(file)
    return found if seconds is None else replace(found, decoded=(sizes["weights"] + sizes["head"], seconds))


def seconds_here(file: ModelFile) -> float | None:
    """The measured time of a token of a file; None: it does not fit in memory, so that the disk would be measured."""
    if needed(file.size, file.metadata.bytes_per_token()["kv_per_position"], CONTEXT) > machine.available_bytes():
        return None
    with progress() as bar:
        bar(0, 0, "measuring how fast the file is decoded")
        return seconds_per_token(file.path, seconds=FILE_SECONDS)[0]


def seconds_per_token(path: Path, mode: Mode | None = None, seconds: float = SECONDS) -> tuple[float, bool]:
    """The median time of a token of a file at the beginning of a text, decoded for `seconds`, and whether what else runs left
    it alone.

    In seconds of the processor over the number of threads: on a machine with nothing else to do the seconds of a clock.  On a
    busy one they still hold for one thread, as far as the others leave it caches and memory; several wait for each other.
    """
    context = min(CONTEXT, ModelFile.open(path).metadata.config.max_position_embeddings)
    with Model.load(path, context=context, mode=mode) as model:
        session = model.session()
        # The first touches every page of the weights.
        session.prefill([0])
        threads, times = model.program.threads, list[float]()
        began, used = time.perf_counter(), time.process_time()
        while not times or time.perf_counter() - began < seconds:
            times.append(span(model, session, SPAN) / threads)
        share = (time.process_time() - used) / (time.perf_counter() - began) / threads
    return statistics.median(times), share >= ALONE


def span(model: Model, session: Session, seconds: float) -> float:
    """Seconds of the processor, of all threads together, for a token: the mean of those that are decoded in `seconds`.

    They follow the session's first token, again and again where its context ends.
    """
    tokens, began, used = 0, time.perf_counter(), time.process_time()
    while not tokens or time.perf_counter() - began < seconds:
        if len(session.tokens) == session.context:
            session.trim(1)
        session.prefill([tokens % model.config.vocab_size])
        tokens += 1
    return (time.process_time() - used) / tokens


def _layers(config: ModelConfig) -> tuple[int, ...]:
    """The numbers of layers that are measured: all, or two from which all follow.  ResourceError: no room."""
    room, every = min(LARGEST, machine.available_bytes() // MEMORY_SHARE), config.num_hidden_layers
    one, two = (file_bytes(with_layers(config, min(count, every)), WIDTHS[-1]) for count in (1, 2))
    if two > room:
        raise ResourceError(
            f"--speed on this machine: measuring {min(2, every)} layers of this model takes {two / 1e9:.1f} GB, and "
            f"{room / 1e9:.1f} GB are the most: a quarter of the available memory, up to {LARGEST / 1e9:.1f} GB; "
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


def _name(config: ModelConfig, codec: Codec, mode: Mode, layers: tuple[int, ...]) -> str:
    """That under which the number is kept."""
    about = [asdict(config), codec.name, mode, layers, PROBE, choose()[0].name, kernels().name]
    return f"decode_seconds {hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:16]}"
