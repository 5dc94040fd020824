"""edgeq as a competitor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from edgeq import __version__
from edgeq.format.codec import ROWS, Codec, pack_integers
from edgeq.format.manifest import array_shapes, fused_shapes
from edgeq.format.metadata import Metadata
from edgeq.format.records import LinearSpec, Mode, Weight
from edgeq.network.config import ModelConfig
from edgeq.tools.lab.peers.peer import Stored, Times, Variant
from edgeq.tools.lab.peers.weights import BITS, head_slabs, head_step, matrix, step


def _variant(group: int, head: int, mode: Mode) -> Variant:
    return Variant(f"edgeq-{mode}-g{group}-h{head}", "edgeq", f"edgeq-g{group}-h{head}", group, head, mode)


def _on_gpu(group: int, head: int, mode: Mode) -> Variant:
    return Variant(f"edgeq-cuda-{mode}-g{group}-h{head}", "edgeq", f"edgeq-g{group}-h{head}", group, head, mode, "cuda")


VARIANTS = (
    _variant(128, 8, "a8"),
    _variant(128, 8, "a16"),
    _variant(128, 4, "a8"),
    _variant(32, 8, "a8"),
    _variant(32, 6, "a8"),
    _variant(32, 4, "a8"),
    Variant("edgeq-as-published-a8", "edgeq", "edgeq-as-published", 0, 0, "a8", published=True),
    Variant("edgeq-as-published-a16", "edgeq", "edgeq-as-published", 0, 0, "a16", published=True),
    _on_gpu(128, 8, "a16"),
    _on_gpu(128, 8, "a8"),
    _on_gpu(128, 4, "a16"),
    _on_gpu(128, 6, "a16"),
)
NAME = "model.edgeq"


def version() -> str:
    for name in ("runtime", "targets.cpu"):
        import_module(f"edgeq.{name}")
    return __version__


def build(config: ModelConfig, variant: Variant, folder: Path) -> Stored:
    writer = import_module("edgeq.format.writer").Writer(folder / NAME)
    linears: dict[str, LinearSpec] = {}

    def add(name: str, codec: Codec, rows: int, columns: int, parts: Iterator[Any], value: float) -> None:
        shapes = codec.parts(rows, columns)
        q = writer.stream((pack_integers(part, codec.bits) for part in parts), "u8", shapes["q"].shape)
        scale = writer.array(np.full(shapes["scale"].shape, value, np.float16), "f16")
        linears[name] = LinearSpec(name, (Weight(codec, rows, columns, {"q": q, "scale": scale}),))

    codec = Codec("int", BITS, variant.group)
    for layer in range(config.num_hidden_layers):
        for fused, parts in fused_shapes(config, layer):
            columns = next(iter(parts.values()))[1]
            if any(rows % ROWS for rows, _ in parts.values()):
                raise ValueError(f"{fused}: output channels of its parts are no multiple of {ROWS}")
            integers = (matrix(name, rows, columns) for name, (rows, _) in parts.items())
            add(fused, codec, sum(rows for rows, _ in parts.values()), columns, integers, step(columns))
    bits = variant.head_bits
    slabs = head_slabs(config, bits)
    add("head", Codec("int", bits, variant.group), config.vocab_size, config.hidden_size, slabs, head_step(bits))
    arrays = {name: writer.array(np.ones(shape, np.float16), "f16") for name, shape in array_shapes(config).items()}
    generation: dict[str, object] = {"eos_token_ids": [], "bos_token_id": None, "add_bos": False, "special_tokens": {}}
    blobs = {"tokenizer.json": writer.append([_tokenizer()])}
    file = writer.finish(Metadata(config, generation, {"source": "random weights"}, "a16", linears, arrays, blobs))
    sizes = file.metadata.bytes_per_token()
    return Stored(sizes["weights"], sizes["head"])


def take(model: Path, folder: Path) -> Stored:
    path = import_module("edgeq.tools.commands.from_gguf").converted(model)
    (folder / NAME).symlink_to(path)
    sizes = import_module("edgeq.format.container").ModelFile.open(path).metadata.bytes_per_token()
    return Stored(sizes["weights"], sizes["head"])


def _tokenizer() -> bytes:
    """The smallest tokenizer that loads: everything here is token ids, and no peer loads a tokenizer."""
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    empty = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return json.dumps({"version": "1.0", "added_tokens": [], **dict.fromkeys(empty), "model": model}).encode()


def load(config: ModelConfig, variant: Variant, folder: Path, threads: int, context: int) -> Edgeq:
    return Edgeq(folder / NAME, variant, threads, context)


class Edgeq:
    """A loaded model file; see `Runner`.

    read_bandwidth   of the GPU, measured before the runs
    """

    def __init__(self, path: Path, variant: Variant, threads: int, context: int) -> None:
        model, on_gpu = import_module("edgeq.runtime").Model, variant.target == "cuda"
        options = {} if on_gpu else {"threads": threads, "threads_prefill": threads, "isa": variant.isa}
        self._model = model.load(path, target=variant.target, mode=variant.mode, context=context, **options)
        self.settings = self._model.description
        self.read_bandwidth = self._model.program.read_bandwidth(refresh=True) if on_gpu else None

    def run(self, prompt: Sequence[int], steps: int) -> Times:
        session = self._model.session()
        began = perf_counter()
        tokens = [int(session.prefill(prompt).argmax())]
        first = perf_counter()
        for _ in range(steps):
            tokens.append(int(session.decode(tokens[-1]).argmax()))
        return Times(first - began, perf_counter() - first, tokens)
