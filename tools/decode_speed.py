"""How fast this machine decodes: models of a shape in several widths, measured, from which the speed of an allocation follows.

The time of a token is not its bytes over a bandwidth alone: a product of few bits has more to compute for each byte, and every
operation takes time of its own.  So files of the shape with random weights, all in one codec, are written, loaded and decoded
for a moment; between them the time of a token follows its bytes in straight lines (`Device.decode_points`).
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from edgeq import machine
from edgeq.codec import Codec
from edgeq.config import ModelConfig
from edgeq.container import ModelFile
from edgeq.devices import Device, needed
from edgeq.errors import ResourceError
from edgeq.measurements import measured
from edgeq.records import Mode
from edgeq.runtime import Model
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.jit.compile import cache_folder as kernels
from edgeq.targets.cpu.probes import ALONE, read_bandwidth
from edgeq.tools.random_file import bytes_per_token, file_bytes, with_layers, write_random
from edgeq.tools.terminal import progress

BITS = (2, 3, 4, 5, 6, 7, 8)
CODECS = tuple(Codec("int", bits, 64, symmetric=False) for bits in BITS)
"""What is measured, by rising bytes; the group size is in the middle of those of an allocation."""
PROBE = 1
"""Version of what is measured here: numbers of other versions are not used."""
CONTEXT = 256
SECONDS, FILE_SECONDS = 1.0, 3.0
"""How long models of several widths are decoded, and how long the one file that is asked about: on a machine that others share
the tokens of one second and the next differ by a tenth."""
LEAST_TOKENS = 5
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


def this_machine_for(config: ModelConfig, mode: Mode) -> Device:
    """This machine with the measured decode of models of this shape; kept per machine, shape, mode and code of the kernels.

    ResourceError: there is no room for two layers of it.
    """
    layers, points = _layers(config), list[tuple[int, float]]()
    with progress() as bar:
        for i, codec in enumerate(CODECS):
            bar(i, len(CODECS), f"measuring how fast {codec.bits} bits are decoded")
            points.append(_point(config, codec, mode, layers))
    return replace(this_machine(), decode_points=rising(points))


def rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Points of rising bytes without those that took as long as more bytes, or longer: what disturbs only adds time."""
    found = list[tuple[int, float]]()
    for point in reversed(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return tuple(reversed(found))


def this_machine_with(file: ModelFile) -> Device:
    """This machine with the measured decode of a file; with its bandwidth alone where the file does not fit in memory."""
    found, sizes, seconds = this_machine(), file.metadata.bytes_per_token(), seconds_here(file)
    return found if seconds is None else replace(found, decode_points=((sizes["weights"] + sizes["head"], seconds),))


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
    times = list[float]()
    with Model.load(path, context=context, mode=mode) as model:
        session = model.session()
        # The first touches every page of the weights.
        session.prefill([0])
        threads = model.program.threads
        began, used = time.perf_counter(), time.process_time()
        for token in range(1, context):
            started = time.process_time()
            session.prefill([token % model.config.vocab_size])
            times.append((time.process_time() - started) / threads)
            if token >= LEAST_TOKENS and time.perf_counter() - began > seconds:
                break
        share = (time.process_time() - used) / (time.perf_counter() - began) / threads
    return statistics.median(times), share >= ALONE


def _layers(config: ModelConfig) -> tuple[int, ...]:
    """The numbers of layers that are measured: all, or two from which all follow.  ResourceError: no room."""
    room, every = min(LARGEST, machine.available_bytes() // MEMORY_SHARE), config.num_hidden_layers
    one, two = (file_bytes(with_layers(config, min(count, every)), CODECS[-1]) for count in (1, 2))
    if two > room:
        raise ResourceError(
            f"--speed on this machine: measuring {min(2, every)} layers of this model takes {two / 1e9:.1f} GB, and "
            f"{room / 1e9:.1f} GB are the most: a quarter of the available memory, up to {LARGEST / 1e9:.1f} GB; "
            "give the bytes of a token with --read"
        )
    fits = every if every <= 2 else 1 + (room - one) // (two - one)
    return (every,) if fits >= every else (fits // 2, fits)


def _point(config: ModelConfig, codec: Codec, mode: Mode, layers: tuple[int, ...]) -> tuple[int, float]:
    """Bytes that a token reads in `codec`, and its seconds: those of all layers, also from two numbers of them."""
    seconds = [_seconds(with_layers(config, count), codec, mode) for count in layers]
    if len(layers) > 1:
        each = max(0.0, (seconds[1] - seconds[0]) / (layers[1] - layers[0]))
        seconds = [seconds[1] + each * (config.num_hidden_layers - layers[1])]
    return bytes_per_token(config, codec), seconds[0]


def _seconds(config: ModelConfig, codec: Codec, mode: Mode) -> float:
    """Seconds of a token of a model all in `codec`, measured unless known."""

    def measure() -> tuple[float, bool]:
        with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
            path = Path(folder) / "random.edgeq"
            write_random(path, config, codec)
            return seconds_per_token(path, mode)

    about = [asdict(config), codec.name, mode, PROBE, choose()[0].name, kernels().name]
    digest = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:16]
    return measured(f"decode_seconds {digest}", machine.cpu().cores, measure)
