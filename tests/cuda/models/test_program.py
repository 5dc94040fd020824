"""The trained tiny Llama on the emulated device: the whole program, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import DeviceError, UnsupportedError
from edgeq.format.codec import ArraySpec, Codec
from edgeq.format.container import ModelFile
from edgeq.format.records import ArrayRef, KvCodec, LinearSpec, Mode
from edgeq.runtime import Model, Sampling
from edgeq.runtime.answers.tokenizer import Tokenizer
from edgeq.runtime.network.decoder import decoder
from edgeq.targets import TargetChoice, load
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.lowering import linear as linear_lowering
from edgeq.targets.cuda.run import plan, storage
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.family_operations import Gate
from edgeq.targets.graph import Attention, CacheSpec, Embed, Graph, Linear, Operation, Select
from edgeq.targets.rows import PAGE, Page, Rows
from edgeq.targets.target import Options, Program
from tests.cuda.comparing import kl
from tests.cuda.emulated import BACKWARD, SHUFFLED, EmulatedDevice
from tests.targets.cases import Arrays, product, recording, weight
from tests.targets.test_cpu_kernels import identity

# `make test` has the products that a model needs, `make test-cuda` whole models too: their kernels take a minute to compile.
pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

CONTEXT, TOKENS = 1024, 256
MAX_ERROR = 1e-2
"""As a share of the largest logit of the reference, in a16."""
MAX_KL = 1e-3
"""Nats in the mean: in a8 a last bit can turn a code."""
TIE = 1e-2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama by rtn: 4 bits with zero points, groups of 128, a tied head of 8 bits."""
    pytest.importorskip("torch")
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    made = tmp_path_factory.mktemp("cuda") / "rtn.edgeq"
    source = Path(__file__).parents[3] / "models" / "tiny-llama"
    convert(str(source), made, ConvertOptions(method="rtn"), lambda *_: None)
    return made


@pytest.fixture(scope="module")
def file(path: Path) -> ModelFile:
    return ModelFile.open(path)


@pytest.fixture(scope="module")
def graph(file: ModelFile) -> Graph:
    return decoder(file.metadata, CONTEXT)


@pytest.fixture(scope="module")
def tokens(file: ModelFile) -> np.ndarray:
    """Python code that the model was not trained with."""
    text = (Path(__file__).parents[3] / "runtime" / "sampling.py").read_text(encoding="utf-8")
    return np.array(Tokenizer.from_file(file).encode(text)[:TOKENS], np.int32)


class Reader:
    """A session by hand: `read` runs the next tokens and gives the logits of all of them."""

    def __init__(self, program: Program) -> None:
        self.program, self.pages, self.length = program, list[Page](), 0

    def rows(self, tokens: Sequence[int] | np.ndarray) -> Rows:
        count, first = len(tokens), self.length
        while len(self.pages) * PAGE < first + count:
            self.pages.append(self.program.new_page())
        places = np.arange(first, first + count, dtype=np.int32)
        every = np.arange(count, dtype=np.int32)
        return Rows(np.asarray(tokens, np.int32), places[None], places, np.zeros(count, np.int32), [self.pages], every)

    def read(self, tokens: Sequence[int] | np.ndarray, mode: Mode | None = None) -> np.ndarray:
        logits = self.program.run(self.rows(tokens), mode).copy()
        self.length += len(tokens)
        return logits


def compiled(device: EmulatedDevice, graph: Graph, file: ModelFile, mode: Mode = "a16", **options: object) -> CudaProgram:
    return CudaTarget(device).compile(graph, file, Options(mode, max_rows=TOKENS, max_logits=TOKENS, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(graph: Graph, file: ModelFile, tokens: np.ndarray) -> dict[Mode, np.ndarray]:
    modes: tuple[Mode, ...] = ("a16", "a8")
    program = load("reference").compile(graph, file, Options("a16", max_rows=TOKENS, max_logits=TOKENS))
    return {mode: Reader(program).read(tokens, mode) for mode in modes}


@pytest.mark.parametrize("mode", ["a16", "a8"])
def test_the_logits_are_those_of_the_reference(
    mode: Mode, device: EmulatedDevice, graph: Graph, file: ModelFile, tokens: np.ndarray, reference: dict[Mode, np.ndarray]
) -> None:
    logits, wanted = Reader(compiled(device, graph, file, mode)).read(tokens), reference[mode]
    divergence = kl(wanted, logits)
    error = np.abs(logits - wanted).max() / np.abs(wanted).max()
    print(f"{mode}: largest error {error:.1e} of the largest logit, KL {divergence:.1e} nats")
    assert divergence <= MAX_KL
    if mode == "a16":
        assert error <= MAX_ERROR


@pytest.mark.parametrize("mode", ["a16", "a8"])
def test_any_chunking_gives_the_same_bits(
    mode: Mode, device: EmulatedDevice, graph: Graph, file: ModelFile, tokens: np.ndarray
) -> None:
    """Prompt at once, in chunks by both kernels, token by token, across the end of a page; in other orders of threads."""
    program = compiled(device, graph, file, mode)
    whole = Reader(program).read(tokens[:100])
    for cuts in ((1, 8, 17, 64, 10), (62, *(1,) * 5, 33)):
        reader, places = Reader(program), np.cumsum([0, *cuts])
        parts = [reader.read(tokens[a:b]) for a, b in zip(places, places[1:], strict=False)]
        assert np.array_equal(np.concatenate(parts), whole), cuts
    for order in (BACKWARD, SHUFFLED):
        assert np.array_equal(Reader(compiled(EmulatedDevice(order), graph, file, mode)).read(tokens[:100]), whole)
    assert {name.partition("_")[0] for name in device.launches} >= {"fused", "matmul"}


def test_a_batch_gives_the_bits_of_each_session_alone(
    device: EmulatedDevice, graph: Graph, file: ModelFile, tokens: np.ndarray
) -> None:
    program = compiled(device, graph, file)
    alone = [Reader(program) for _ in range(4)]
    last = [reader.read(tokens[: 40 + 10 * i])[-1:] for i, reader in enumerate(alone)]
    together = [Reader(program) for _ in range(4)]
    for i, reader in enumerate(together):
        reader.read(tokens[: 40 + 10 * i])
    parts = [reader.rows(logits.argmax(axis=1)) for reader, logits in zip(together, last, strict=True)]
    batch = Rows(
        tokens=np.concatenate([p.tokens for p in parts]),
        positions=np.concatenate([p.positions for p in parts], axis=1),
        slots=np.concatenate([p.slots for p in parts]),
        sessions=np.arange(4, dtype=np.int32),
        pages=[p.pages[0] for p in parts],
        wanted=np.array([3, 0, 1, 2], np.int32),
    )
    found = program.run(batch).copy()
    wanted = np.concatenate([reader.read(logits.argmax(axis=1)) for reader, logits in zip(alone, last, strict=True)])
    assert np.array_equal(found, wanted[[3, 0, 1, 2]])


def greedy(model: Model, prompt: str) -> list[int]:
    generation = model.generate(prompt, max_tokens=24, sampling=Sampling(temperature=0), ignore_eos=True)
    assert generation.text()
    return generation.tokens


def test_greedy_tokens_are_those_of_the_reference_but_for_ties(
    path: Path, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the Python API, as a user would have it, with a context that the target's room allows."""
    prompt = "def read_file(path):"
    with Model.load(path, target="reference", mode="a16", kv="f16") as model:
        wanted = greedy(model, prompt)
    monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(CudaTarget(device), []))
    with Model.load(path, target="cuda", mode="a16", kv="f16", context=512) as model:
        assert model.target == "cuda" and device.name in model.description
        found = greedy(model, prompt)
        assert len(found) == len(wanted) == 24
        differs = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None)
        if differs is not None:
            session = model.session()
            logits = session.prefill([*model.text.encode(prompt), *wanted[:differs]])
            assert abs(logits[found[differs]] - logits[wanted[differs]]) < TIE


def test_pages_are_copied_saved_and_taken_again(
    device: EmulatedDevice, graph: Graph, file: ModelFile, tokens: np.ndarray
) -> None:
    program = compiled(device, graph, file)
    reader = Reader(program)
    reader.read(tokens[:70])
    copies, stored = [program.copy_page(p) for p in reader.pages], [program.save_page(p) for p in reader.pages]
    wanted = reader.read(tokens[70:80])
    for pages in (copies, [program.load_page(np.frombuffer(data, np.uint8)) for data in stored]):
        other = Reader(program)
        other.pages, other.length = pages, 70
        assert np.array_equal(other.read(tokens[70:80]), wanted)
    with pytest.raises(ValueError, match="bytes for a page"):
        program.load_page(np.zeros(4, np.uint8))
    # Dropped pages are used again, and as zeros: forty sessions of three pages in a pool that has a few dozen.
    held = program.device_bytes
    del reader, other, copies, pages
    for _ in range(40):
        assert not any(program.save_page(program.new_page()))
    assert program.device_bytes == held


def test_a_run_without_wanted_rows_fills_the_cache(
    device: EmulatedDevice, graph: Graph, file: ModelFile, tokens: np.ndarray
) -> None:
    program = compiled(device, graph, file)
    first, second = Reader(program), Reader(program)
    first.read(tokens[:20])
    rows = second.rows(tokens[:20])
    rows.wanted = np.zeros(0, np.int32)
    assert program.run(rows).shape == (0, 2048)
    second.length = 20
    assert np.array_equal(first.read(tokens[20:24]), second.read(tokens[20:24]))


def test_the_time_of_every_step(device: EmulatedDevice, graph: Graph, file: ModelFile, tokens: np.ndarray) -> None:
    program = compiled(device, graph, file)
    with recording(program) as times:
        program.run(Reader(program).rows(tokens[:4]))
    (measured,) = times
    reading = [step.operation for step in measured.steps if step.reads_weights]
    assert reading == [op for op in graph.operations if isinstance(op, Linear)]
    assert measured.seconds.shape == (len(measured.steps), 2) and (measured.seconds[:, 0] > 0).all()


def test_more_rows_than_compiled_for_are_refused(
    device: EmulatedDevice, graph: Graph, file: ModelFile, tokens: np.ndarray
) -> None:
    program = CudaTarget(device).compile(graph, file, Options("a16", max_rows=8, max_logits=1))
    with pytest.raises(ValueError, match="8"):
        program.run(Reader(program).rows(tokens[:9]))


def test_a_failure_ends_the_program_and_not_the_process(
    device: EmulatedDevice, graph: Graph, file: ModelFile, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(device, graph, file)

    def lost(*_: object) -> None:
        raise DeviceError("the GPU was lost")

    with monkeypatch.context() as patched:
        patched.setattr(device, "launch", lost)
        with pytest.raises(DeviceError, match="was lost"):
            Reader(program).read(tokens[:4])
    with pytest.raises(DeviceError, match="cannot run any more: the GPU was lost"):
        Reader(program).read(tokens[:4])
    assert Reader(compiled(device, graph, file)).read(tokens[:4]).shape == (4, 2048)


def refused(device: EmulatedDevice, graph: Graph, arrays: Arrays, match: str, **options: object) -> None:
    with pytest.raises(UnsupportedError, match=match):
        CudaTarget(device).compile(graph, arrays, Options("a16", **options))  # type: ignore[arg-type]
    assert not device.launches


@dataclass(frozen=True)
class Unknown(Operation):
    """An operation that no target has."""

    x: str
    out: str


def test_what_is_not_there_is_refused_by_name_when_the_graph_is_compiled(device: EmulatedDevice) -> None:
    arrays, rng = Arrays(), np.random.default_rng(0)
    graph = product(arrays, rng.standard_normal((3, 64)).astype(np.float32), weight(arrays, rng, Codec("int", 4, 32), 16, 64))
    attention = Attention(0, "x", 0, "y", 1, 1, 18, 1.0, 0, 0)
    refused(device, replace(graph, operations=(attention,)), arrays, match="heads of 18 .*--target cpu")
    wide = replace(attention, head_dim=260)
    for kv in ("int8", "int4"):
        refused(
            device, replace(graph, operations=(wide,)), arrays, match=f"{kv} for heads of 260 .*--target cpu", kv=KvCodec(kv)
        )
    refused(device, replace(graph, operations=(Unknown(0, "x", "y"),)), arrays, match="the operation Unknown .*--target cpu")
    again = (*graph.operations, Select(-1, ("y",)))
    refused(device, replace(graph, operations=again), arrays, match="second choice")
    for options, match in (({"threads": 2}, "threads"), ({"isa": "sm_75"}, "isa")):
        refused(device, graph, arrays, match=match, **options)


class WithAnArray(Codec):
    """A codec that has one array more than those that are known."""

    def parts(self, rows: int, columns: int) -> dict[str, ArraySpec]:
        return {**super().parts(rows, columns), "offset": ArraySpec("float16", (1, 1, 16), "f16")}


def test_weights_in_a_codec_without_kernels_are_refused_by_its_name(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that the table does not have, and an array that its kernels do not read, which must not be left out silently."""
    arrays, rng = Arrays(), np.random.default_rng(0)
    graph = product(arrays, rng.standard_normal((3, 64)).astype(np.float32), weight(arrays, rng, Codec("int", 4, 32), 16, 64))
    linear = graph.operations[-1]
    assert isinstance(linear, Linear)
    (stored,) = linear.linear.weights
    other = replace(linear, linear=replace(linear.linear, weights=(replace(stored, codec=WithAnArray("int", 4, 32)),)))
    refused(device, replace(graph, operations=(*graph.operations[:-1], other)), arrays, match="weights in the codec i4 g32 yet")
    monkeypatch.delitem(linear_lowering.CODECS, "int")
    refused(device, graph, arrays, match="weights in the codec i4 g32 yet; run with --target cpu")


@pytest.mark.parametrize("columns", [64, 200])
def test_a_table_in_the_file_and_a_bias(device: EmulatedDevice, columns: int) -> None:
    """An untied embedding is gathered by the host; the layer has a bias and an output at an offset."""
    arrays, rng = Arrays(), np.random.default_rng(0)
    x, bias = rng.standard_normal((30, columns)).astype(np.float32), rng.standard_normal(24).astype(np.float32)
    graph = product(arrays, x, weight(arrays, rng, Codec("int", 5, 64, False), 24, columns), bias)
    linear = graph.operations[-1]
    assert isinstance(linear, Linear) and isinstance(graph.operations[0], Embed)
    graph = replace(graph, buffers=graph.buffers | {"y": 30}, operations=(*graph.operations[:-1], replace(linear, offset=6)))
    options = Options("a8", max_rows=30, max_logits=30)
    results = []
    for target in (CudaTarget(device), load("reference")):
        program = target.compile(graph, arrays, options)  # type: ignore[arg-type]
        results.append(Reader(program).read(np.arange(30)))
    assert np.abs(results[0] - results[1])[:, 6:].max() <= 2e-6 * np.abs(results[1]).max()
    assert not results[0][:, :6].any()


def test_a_table_beside_that_of_the_stream_stays_in_the_file(device: EmulatedDevice) -> None:
    """Its rows are brought to every run, recorded or not; a table alone is looked up on the device."""
    arrays, rng = Arrays(), np.random.default_rng(0)
    codec = Codec("int", 4, 32, False)
    stream, beside = (LinearSpec(f"table {width}", (weight(arrays, rng, codec, 3000, width),)) for width in (64, 640))
    operations = (
        Embed(-1, stream, "x"),
        Embed(-1, beside, "rows"),
        Gate(-1, "x", "rows", 64, 64, None),
        Select(-1, ("x",)),
        Linear(-1, "x", identity(arrays, 64), "y"),
    )
    graph = Graph({"x": 64, "rows": 640, "y": 64}, operations, "y", (CacheSpec(1, 4, 4),))
    options = Options("a16", max_rows=20, max_logits=20)
    programs = [t.compile(graph, arrays, options) for t in (CudaTarget(device), load("reference"))]  # type: ignore[arg-type]
    for tokens in (np.arange(20) * 149, np.array([2999]), np.array([17, 16, 15])):
        found, wanted = (Reader(program).read(tokens) for program in programs)
        assert np.array_equal(found, wanted) and found.any()
    assert isinstance(programs[0], CudaProgram) and programs[0]._storage.nbytes < beside.nbytes


def test_what_is_on_the_device_leaves_the_memory_of_the_host(
    device: EmulatedDevice, graph: Graph, file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "integrated", True)
    dropped, written = set[ArrayRef](), list[int]()
    monkeypatch.setattr(ModelFile, "release", lambda self, ref, uncached=False: dropped.add(ref) if uncached else None)
    monkeypatch.setattr(storage, "PIECE_BYTES", 4096)
    write = device.write
    monkeypatch.setattr(device, "write", lambda address, data: (written.append(data.nbytes), write(address, data)))
    program = CudaTarget(device).compile(graph, file, Options("a16", max_rows=8, max_logits=1))
    weights = [ref for op in graph.operations if isinstance(op, Linear) for ref in op.linear.weights[0].arrays.values()]
    assert max(written) == 4096 and sum(written) >= sum(ref.nbytes for ref in weights)
    assert dropped >= set(weights)
    assert Reader(program).read([5]).shape == (1, 2048)


def test_room_is_that_of_the_device(
    device: EmulatedDevice, graph: Graph, file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options("a16", max_rows=TOKENS, max_logits=TOKENS)
    # Given: on a GPU other processes, and what earlier tests held, change what is free.
    total = free = 3 << 30
    monkeypatch.setattr(device, "memory", lambda: (total, free))
    room = CudaTarget(device).room(graph, file, options)
    program = CudaTarget(device).compile(graph, file, options)
    assert room.available == free
    assert program.device_bytes == room.needed
    # What is said of recordings is what a program without them does not need.
    without = CudaTarget(device).compile(graph, file, replace(options, graphs=False))
    spared = program.device_bytes - without.device_bytes
    assert room.saving == f"pass `graphs=False`, which needs {spared / (1 << 20):,.0f} MiB less" and spared > 1 << 20
    assert not CudaTarget(device).room(graph, file, replace(options, graphs=False)).saving


def test_more_numbers_than_kernels_count_are_refused(graph: Graph, file: ModelFile) -> None:
    """A launch has 65535 blocks in its second dimension, and an index is an int32, which would wrap around."""
    with pytest.raises(UnsupportedError, match="at most 65535 rows; pass a smaller `max_rows`"):
        plan.variants(graph, file, Options("a16", max_rows=65536), ["a16"])
    wide = replace(graph, buffers={**graph.buffers, graph.operations[0].writes()[0]: 1 << 16})
    with pytest.raises(UnsupportedError, match=r"no buffers of 16.0 GiB, only of up to 8; pass a smaller `max_rows`"):
        plan.variants(wide, file, Options("a16", max_rows=65535), ["a16"])
