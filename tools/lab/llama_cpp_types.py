"""A Llama checkpoint in the types of llama.cpp, measured as `edgeq compare` measures a file.

    python -m edgeq.tools.lab.llama_cpp_types SRC --type Q4_K_M --text code

llama.cpp's own quantizer makes the file, with an importance matrix (mean squares of every linear layer's inputs) of the text
that edgeq calibrates with.  Its weights are read back, and the checkpoint's network runs with them in float32: what is measured
is the rounding of the weights alone, not a runtime.  Needs llama-cpp-python and gguf, which edgeq does not depend on.

Most types of llama.cpp hold blocks of 256 weights of a row.  Where rows are no multiple of that, it takes a larger type in
their place.  `IQ2_M-folded` is IQ2_M with so many rows laid behind one another that they are: what the type itself loses.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.terminal import Report, progress
from edgeq.tools.commands.compare import score, summarize
from edgeq.tools.lab.peers.for_llama_cpp import PARTS, finish, interleaved, new_file
from edgeq.tools.quality import corpus
from edgeq.tools.quality.predictions import Collect, Predictions
from edgeq.tools.quality.scorers import CheckpointScorer, Windows, collected
from edgeq.tools.quality.windows import cut, read_documents

if TYPE_CHECKING:
    from edgeq.converters.calibration.logits import Network

PACKAGES = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
HEAD = "token_embd.weight"
FOLDED = "-folded"
BLOCK = 256
"""Weights of a row in a block of llama.cpp's larger types, and of all that begin with IQ but IQ4_NL."""


def missing() -> list[str]:
    """The packages needed that are not installed, as pip calls them."""
    absent = []
    for module, package in PACKAGES.items():
        try:
            import_module(module)
        except ImportError:
            absent.append(package)
    return absent


def names(network: Network) -> dict[str, tuple[str, int]]:
    """Name in the GGUF file -> the checkpoint's, and the heads whose channels are interleaved there; 0: none.

    InputError: not a Llama of the kind whose GGUF file is written here.
    """
    c, found = network.config, dict[str, tuple[str, int]]()
    plain = network.family.architecture in ("LlamaForCausalLM", "MistralForCausalLM") and c.rope.kind == "default"
    if not plain or any(c.sliding_windows):
        raise InputError(
            f"{network.checkpoint.name}: a {network.family.architecture} with {c.rope.kind} positions; "
            "llama.cpp's types are measured on Llama with default rotary positions"
        )
    heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}
    norms = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
    for layer in range(c.num_hidden_layers):
        for part, tensor in network.family.layer_tensors(layer).items():
            found[f"blk.{layer}.{(PARTS | norms)[part]}.weight"] = tensor, heads.get(part, 0)
    found["output_norm.weight"] = "model.norm.weight", 0
    found[HEAD] = "model.embed_tokens.weight", 0
    if not c.tie_word_embeddings:
        found["output.weight"] = "lm_head.weight", 0
    return found


def importance(network: Network, report: Report) -> dict[str, NDArray[np.float32]]:
    """Mean square of each input channel over the built-in calibration text, by name in the GGUF file."""
    import torch

    from edgeq.converters.calibration.dataset import MAX_ROWS, ROW_TOKENS, calibration
    from edgeq.converters.calibration.forward import BlockForward
    from edgeq.converters.calibration.staged import quantized_linears
    from edgeq.converters.calibration.torch_decoder import Norm
    from edgeq.converters.checkpoint.tokenizer import read_text

    config, checkpoint = network.config, network.checkpoint
    length = min(ROW_TOKENS, config.max_position_embeddings)
    rows = calibration(None, read_text(checkpoint.source, config.vocab_size), length, MAX_ROWS).rows
    forward = BlockForward(checkpoint, network.family, config, rows)
    found: dict[str, NDArray[np.float32]] = {}
    gguf_names = {tensor: name for name, (tensor, _) in names(network).items()}
    for index in range(config.num_hidden_layers):
        report(index, config.num_hidden_layers, f"importance of layer {index + 1} of {config.num_hidden_layers}")
        layer = forward.load(index)
        sums: dict[str, NDArray[np.float64]] = {}

        def observer(path: str, sums: dict[str, NDArray[np.float64]] = sums) -> Any:
            def observe(x: torch.Tensor) -> None:
                sums[path] = sums.get(path, 0) + x.flatten(0, -2).double().square().sum(0).numpy()

            return observe

        paths = list(quantized_linears(layer))
        forward.watch(index, layer, {path: observer(path) for path in paths})
        forward.advance(index, layer)
        forward.unload(layer)
        for path in paths:
            found[gguf_names[f"model.layers.{index}.{path}.weight"]] = (sums[path] / rows.numel()).astype(np.float32)
    norm = Norm(config, config.hidden_size)
    norm.load_state_dict({"weight": torch.from_numpy(checkpoint.whole("model.norm.weight"))})
    with torch.no_grad():
        squares = sum(norm(row).double().square().sum(0) for row in forward.hidden) / rows.numel()
    assert isinstance(squares, torch.Tensor)
    head = HEAD if config.tie_word_embeddings else "output.weight"
    return found | {head: squares.numpy().astype(np.float32)}


def rows_per_block(columns: int) -> int:
    """The rows of so many columns that have to lie behind one another for a multiple of BLOCK."""
    return BLOCK // math.gcd(columns, BLOCK)


def write_floats(network: Network, path: Path, folded: bool) -> None:
    """The checkpoint as a GGUF file in float32; `folded`: with `rows_per_block` rows of a matrix as one.

    InputError: the rows of a matrix cannot be folded.
    """
    writer = new_file(network.config, path)
    for name, (tensor, heads) in names(network).items():
        values = network.checkpoint.whole(tensor)
        values = interleaved(values, heads) if heads else values
        if folded and values.ndim == 2:
            count = rows_per_block(values.shape[1])
            if len(values) % count:
                raise InputError(
                    f"{tensor}: {len(values)} rows of {values.shape[1]} columns; {FOLDED} lays {count} rows behind one another "
                    f"and needs a multiple of {count} rows: take the type without {FOLDED}"
                )
            values = values.reshape(len(values) // count, -1)
        writer.add_tensor(name, values)
    finish(writer)


def folded_inputs(weights: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """An importance matrix for the rows of a folded file."""
    return {name: np.tile(values, rows_per_block(values.size)) for name, values in weights.items()}


def quantize(source: Path, target: Path, kind: str, weights: dict[str, NDArray[np.float32]]) -> None:
    """Run llama.cpp's quantizer with the importance matrix `weights`.  InputError: a type it does not have, or it failed."""
    library = import_module("llama_cpp")
    ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}", None)
    if ftype is None:
        known = sorted(name.removeprefix("LLAMA_FTYPE_MOSTLY_") for name in dir(library) if "_FTYPE_MOSTLY_" in name)
        raise InputError(f"llama.cpp has no type {kind!r}; supported: {', '.join(known)}")

    def ignore(level: int, text: bytes, data: object) -> None:
        """Its progress is many lines; what fails is the value it returns."""

    silent = library.llama_log_callback(ignore)
    library.llama_log_set(silent, ctypes.c_void_p(0))
    params = library.llama_model_quantize_default_params()
    params.ftype = ftype
    # An entry without a name ends the list.
    entries = (library.llama_model_imatrix_data * (len(weights) + 1))()
    arrays = [(name.encode(), np.ascontiguousarray(values)) for name, values in weights.items()]
    for entry, (name, values) in zip(entries, arrays, strict=False):
        entry.name, entry.size = name, values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params.imatrix = entries
    result = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if result:
        raise InputError(f"llama.cpp cannot quantize it as {kind} (code {result})")


class ReadBack:
    """The weights of a GGUF file in float32, under the checkpoint's names: an `edgeq.converters.checkpoint.slabs.Tensors`.

    columns  of the matrices, by their names in the file
    """

    def __init__(self, network: Network, path: Path, columns: Mapping[str, int]) -> None:
        self._gguf = import_module("gguf")
        self._tensors = {tensor.name: tensor for tensor in self._gguf.GGUFReader(str(path)).tensors}
        self._places = {tensor: (name, heads) for name, (tensor, heads) in names(network).items()}
        self._embedding, self._columns = self._places["model.embed_tokens.weight"][0], columns

    def sizes(self) -> Iterator[tuple[str, str, int, int]]:
        """Name, type, bytes and number of weights of every tensor."""
        for name, tensor in self._tensors.items():
            yield name, tensor.tensor_type.name, int(tensor.n_bytes), int(tensor.n_elements)

    def _dequantized(self, name: str) -> NDArray[np.float32]:
        tensor = self._tensors[name]
        # Floats come as views of the mapped file, which torch does not take.
        return np.array(self._gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)

    @cached_property
    def _table(self) -> NDArray[np.float32]:
        return self._dequantized(self._embedding)

    def whole(self, name: str) -> NDArray[np.float32]:
        place, heads = self._places[name]
        values = self._table if place == self._embedding else self._dequantized(place)
        if place in self._columns:
            values = values.reshape(-1, self._columns[place])
        # The order of `interleaved`, undone.
        return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape) if heads else values

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self.whole(name)[start:stop]


class ReadBackScorer:
    """The network of a checkpoint with the weights of `tensors`."""

    def __init__(self, name: str, network: Network, tensors: ReadBack) -> None:
        self.name, self._network, self._tensors = name, network, tensors
        self.vocab_size, self.longest = network.config.vocab_size, network.config.max_position_embeddings

    def run(self, windows: Windows, collect: Collect, report: Report) -> None:
        from edgeq.converters.calibration.logits import stream_logits

        stream_logits(self._network, windows, collect, report, self._tensors)

    def predictions(self, windows: Windows, report: Report) -> Predictions:
        return collected(self, windows, report)


def measure(source: str, kinds: Sequence[str], texts: Sequence[str], window: int, limit: int) -> list[dict[str, Any]]:
    """Rows of the table of `edgeq.tools.lab.quality`, one for each type.

    InputError: packages are missing, a model that is not supported, a type that llama.cpp does not have.
    """
    if absent := missing():
        raise InputError(f"this needs {' and '.join(absent)}, not installed: pip install {' '.join(absent)}")
    from edgeq.converters.checkpoint.tokenizer import read_text
    from edgeq.text.tokenizer import Tokenizer

    scorer = CheckpointScorer(source)
    network = scorer.network
    assets = read_text(network.checkpoint.source, network.config.vocab_size)
    encode = Tokenizer(assets.blobs["tokenizer.json"], assets.generation).encode
    documents = {text: read_documents(text) for text in texts}
    windows = {text: cut(documents[text], encode, min(window, scorer.longest), limit) for text in texts}
    rows = []
    with TemporaryDirectory() as folder, progress() as report:
        quantized = Path(folder, "quantized.gguf")
        weights = importance(network, report)
        columns = {name: values.size for name, values in weights.items()} | {HEAD: network.config.hidden_size}
        references = {text: scorer.predictions(windows[text], report) for text in texts}
        for kind in kinds:
            folded = kind.endswith(FOLDED)
            floats = Path(folder, f"f32{FOLDED if folded else ''}.gguf")
            if not floats.exists():
                write_floats(network, floats, folded)
            quantize(floats, quantized, kind.removesuffix(FOLDED), folded_inputs(weights) if folded else weights)
            tensors = ReadBack(network, quantized, columns)
            row = row_of(kind, network, tensors) | {"file_bytes": quantized.stat().st_size, "texts": {}}
            for text in texts:
                scores = [score(ReadBackScorer(kind, network, tensors), references[text], windows[text], report, "", {})]
                found = summarize(scorer.name, references[text], scores, windows[text])
                about = {"text": text, "text_sha256": corpus.digest(documents[text]), "window": windows[text].shape[1]}
                row["texts"][text] = found | about
            rows.append(row)
    return rows


def row_of(kind: str, network: Network, tensors: ReadBack) -> dict[str, Any]:
    """What the table says of a file apart from what it lost."""
    head = HEAD if network.config.tie_word_embeddings else "output.weight"
    sizes = list(tensors.sizes())
    layers = [(nbytes, count) for name, type, nbytes, count in sizes if name.startswith("blk.") and type != "F32"]
    return {
        "recipe": f"llama.cpp {kind}",
        # A token reads one row of an embedding that is not the head.
        "read_bytes": sum(nbytes for name, _, nbytes, _ in sizes if name == head or name != HEAD),
        "bits_per_weight": 8 * sum(nbytes for nbytes, _ in layers) / sum(count for _, count in layers),
        "head": next(type for name, type, _, _ in sizes if name == head),
        "mode": "floats",
        "kv": "floats",
    }


@click.command(cls=Command)
@click.argument("source", metavar="SRC")
@click.option(
    "--type", "kinds", multiple=True, required=True, metavar="NAME", help="A type of llama.cpp, such as Q4_K_M or IQ2_M-folded."
)
@click.option("--text", "texts", multiple=True, default=("code",), show_default=True, help="Text, as in edgeq compare.")
@click.option("--window", type=click.IntRange(2), default=512, show_default=True, help="Tokens per window.")
@click.option("--limit", type=click.IntRange(2), default=32768, show_default=True, help="Use at most so many tokens of a text.")
def main(source: str, kinds: tuple[str, ...], texts: tuple[str, ...], window: int, limit: int) -> None:
    """Quantize SRC with llama.cpp, read the weights back and print as JSON what was lost."""
    click.echo(json.dumps({"rows": measure(source, kinds, texts, window, limit)}, indent=1))


if __name__ == "__main__":
    main()
