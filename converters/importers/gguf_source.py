"""A GGUF file, or the parts of a split one, as a checkpoint: nothing is read but headers, until weights are asked for."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from edgeq.converters.checkpoint.source import StoredTensor
from edgeq.converters.importers.gguf_architectures import Architecture, architecture
from edgeq.converters.importers.gguf_config import config_of, pooling_of
from edgeq.converters.importers.gguf_file import GgufFile, read_gguf
from edgeq.converters.importers.gguf_keys import DRAFT_LAYERS, EMBEDDING, FREQUENCIES, HEAD, Settings
from edgeq.converters.importers.gguf_tensors import GgufLayout, GgufTensor, bytes_of
from edgeq.converters.importers.gguf_texts import TOKENIZER, write_pooling, write_texts
from edgeq.converters.importers.gguf_towers import TOWERS, read_tower
from edgeq.converters.importers.gguf_types import BLOCK_TYPES, FLOAT_TYPES, type_name
from edgeq.errors import CheckpointError, UnsupportedError

MAX_PARTS = 1024
PREPROCESSOR = "preprocessor_config.json"
MAX_FACTORS = 4096
"""Pairs of a head; published models have at most 128."""
FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
DRAFTS = "mtp.fc.weight"
"""What every layer that drafts tokens has."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_LAYER = re.compile(r"blk\.(\d{1,4})\.([a-z0-9_.]+?)(?:\.(weight|bias|scale))?")


@dataclass(frozen=True)
class GgufSource:
    """An opened file.

    texts   a folder that is gone when the source is
    made_of   all files that it consists of, its tower's too, and the tokenizer that was given with it
    types   how many tensors there are of each
    """

    name: str
    place: str
    config: Mapping[str, Any]
    texts: Path
    made_of: tuple[Path, ...]
    stored_tensors: Mapping[str, StoredTensor]
    types: Mapping[str, int]

    @classmethod
    def open(cls, path: Path, tokenizer: Path | None = None, mmproj: Path | None = None) -> GgufSource:
        """Read all headers, and write what a tokenizer is made of into a temporary folder.

        tokenizer   a folder with a tokenizer.json that is taken in place of the file's
        mmproj      the GGUF file of the vision tower; None: of a model that has one, the language model alone is read

        CheckpointError: damaged, a part missing, a tensor missing or too many, a tokenizer that is not the file's.
        UnsupportedError: an architecture, types of tensors, all at once, a tokenizer or a setting of the network.
        """
        network, place = _network(path, mmproj), str(path)
        texts, parts = Path(mkdtemp(prefix="edgeq-gguf-")), [file.path for file in network.files]
        given = [] if tokenizer is None else [tokenizer / TOKENIZER]
        name, made_of = _PART.sub(r"\1.gguf", path.name), (*parts, *given)
        source = cls(name, place, network.config, texts, made_of, network.tensors, dict(sorted(network.types.items())))
        weakref.finalize(source, shutil.rmtree, texts, ignore_errors=True)
        try:
            write_texts(network.files[0].metadata, texts, tokenizer, network.picture)
            if network.pooling is not None:
                write_pooling(network.pooling, texts)
            if network.preprocessor:
                (texts / PREPROCESSOR).write_text(json.dumps(network.preprocessor), encoding="utf-8")
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{place}: {error}") from None
        return source

    @property
    def texts_complete(self) -> bool:
        return True

    @property
    def quantized(self) -> bool:
        return any(tensor.codec for tensor in self.stored_tensors.values())

    @property
    def origin(self) -> dict[str, object]:
        return {"format": "gguf", "types": dict(self.types)}

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the file is left out."""
        count, own = self.config.get(DRAFT_LAYERS, 0), self.config.get("mtp_use_dedicated_embeddings")
        if not count or (count == 1 and not own and DRAFTS in self.stored_tensors):
            return ()
        return (f"left out: layers that draft tokens, {count} of them; edgeq runs one, if it has no table of its own",)

    def tensors(self) -> Mapping[str, StoredTensor]:
        return self.stored_tensors

    def files(self) -> list[Path]:
        return [*self.made_of]


@dataclass(frozen=True)
class _Network:
    """What is in the files of a language model and then of its tower, as transformers calls it.

    types         how many tensors there are of each
    preprocessor  keys of preprocessor_config.json; none without a tower
    pooling       how a text becomes a vector; None: the file does not say so
    picture       as in TowerKind
    """

    files: list[GgufFile]
    types: Mapping[str, int]
    config: Settings
    tensors: Mapping[str, StoredTensor]
    preprocessor: Settings
    pooling: str | None
    picture: str = ""


def _network(path: Path, mmproj: Path | None) -> _Network:
    """All but the texts; errors as `GgufSource.open`."""
    files, place = _parts(path), str(path)
    metadata = files[0].metadata
    kind, keys = architecture(metadata, place, {name: tensor.shape for file in files for name, tensor in file.tensors.items()})
    stored = _stored(files, place)
    keys.factors = _small(stored)
    config, pooling = config_of(kind, keys), pooling_of(kind, keys)
    keys.check_all_read()
    tensors = _renamed(stored, kind, config, place)
    types = Counter(type_name(tensor.type) for tensor in stored.values())
    if mmproj is None:
        return _Network(files, types, config, tensors, {}, pooling)
    own = _parts(mmproj)
    of_tower = _stored(own, str(mmproj))
    types.update(type_name(tensor.type) for tensor in of_tower.values())
    tower = read_tower(own[0].metadata, of_tower, str(mmproj), keys, config)
    together = {**tensors, **tower.tensors}
    return _Network([*files, *own], types, tower.config, together, tower.preprocessor, pooling, tower.picture)


def takes_tower(path: Path) -> bool:
    """Whether there are towers for the language model in a GGUF file; errors as `read_gguf`."""
    name = read_gguf(path).metadata.get("general.architecture")
    return any(name in kind.decoders for kind in TOWERS.values())


def check_tower(path: Path, mmproj: Path) -> None:
    """Refuse a tower that does not run with the language model at `path`; errors as `GgufSource.open`."""
    _network(path, mmproj)


def _parts(path: Path) -> list[GgufFile]:
    """The file, or all parts of the one that it is a part of.  CheckpointError: one is missing or belongs elsewhere."""
    first = read_gguf(path)
    count = first.metadata.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise CheckpointError(f"{path}: split.count is {count!r:.40}; expected at most {MAX_PARTS}")
    if count < 2:
        return [first]
    named = _PART.fullmatch(path.name)
    if not named or int(named[3]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts, which are found by their names: give it the name that it had, "
            f"...-00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of its {count} parts are missing: {', '.join(missing)[:200]}; download them"
        )
    files = [read_gguf(each) for each in paths]
    for number, file in enumerate(files):
        at = file.metadata.get("split.no"), file.metadata.get("split.count")
        if at != (number, count):
            raise CheckpointError(f"{file.path}: says that it is part {at[0]} of {at[1]}, not {number} of {count}")
    return files


def _stored(files: list[GgufFile], place: str) -> dict[str, GgufTensor]:
    """The tensors by their names in the files.

    UnsupportedError: types without a codec.  CheckpointError: a tensor outside of its file, over another one or there twice.
    """
    refused: dict[str, list[str]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if tensor.type not in BLOCK_TYPES and tensor.type not in FLOAT_TYPES:
                refused.setdefault(type_name(tensor.type), []).append(name)
    if refused:
        listed = "; ".join(
            f"{kind}: {len(names)} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" for kind, names in refused.items()
        )
        supported = ", ".join([*FLOAT_TYPES.values(), *(block.name for block in BLOCK_TYPES.values())])
        raise UnsupportedError(
            f"{place}: tensors of types that are not supported: {listed:.600}; supported: {supported}.  Take a file of such a "
            "type, Q4_K_M or Q8_0 for example, or convert the original checkpoint"
        )
    found: dict[str, GgufTensor] = {}
    for file in files:
        at = 0
        for name, tensor in sorted(file.tensors.items(), key=lambda item: item[1].offset):
            nbytes = bytes_of(tensor.shape, tensor.type)
            if nbytes is None:
                raise CheckpointError(
                    f"{file.path}: {name} has the shape {tensor.shape}, no rows of whole blocks of {type_name(tensor.type)}; "
                    "the file is damaged: download it again"
                )
            if tensor.offset < at:
                raise CheckpointError(f"{file.path}: {name} lies over another tensor; the file is damaged: download it again")
            at = tensor.offset + nbytes
            if at > file.size:
                raise CheckpointError(
                    f"{file.path}: truncated: {name} ends at byte {at}, the file at {file.size}; download it again"
                )
            if name in found:
                raise CheckpointError(f"{file.path}: {name} is in another part, too; the parts do not belong together")
            found[name] = GgufTensor(file.path, tensor.shape, tensor.type, tensor.offset)
    return found


def _small(stored: dict[str, GgufTensor]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Factors of rotary embeddings, which a configuration holds: taken out of `stored` and read."""
    found = {}
    for name in (FREQUENCIES, *FACTORS):
        tensor = stored.pop(name, None)
        if tensor is None:
            continue
        if len(tensor.shape) > 1 or tensor.rows > MAX_FACTORS or tensor.block:
            raise CheckpointError(f"{tensor.path}: {name} is no vector of at most {MAX_FACTORS} numbers")
        found[name] = tensor.read(0, tensor.rows, name)
    return found


def _renamed(
    stored: Mapping[str, GgufTensor], kind: Architecture, config: Mapping[str, Any], place: str
) -> dict[str, GgufTensor]:
    """Tensors under transformers' names, experts one by one.  UnsupportedError: one that has no place."""
    head_sizes = {"attn_q": config["head_dim"], "attn_k": config["head_dim"]} if kind.interleaved else {}
    layouts, found = kind.layouts(dict(config)), dict[str, GgufTensor]()
    for name, tensor in stored.items():
        if name in kind.ends:
            gain = kind.gain if name not in (EMBEDDING, HEAD) else 0.0
            whole = GgufTensor(tensor.path, tensor.shape, tensor.type, tensor.offset, added=-gain)
            row = name in kind.rows and len(tensor.shape) == 1
            found[kind.ends[name]] = whole.part(0, (1, tensor.rows)) if row else whole
            continue
        at = _LAYER.fullmatch(name)
        part, end = (at[2], at[3] or "weight") if at else ("", "")
        prefix, own = _owner(kind, config, int(at[1]) if at else 0)
        module = kind.tensors.get(part)
        size = head_sizes.get(part, 0)
        if size and tensor.rows % size:
            raise CheckpointError(f"{place}: {name} has {tensor.rows} rows, no whole heads of {size}")
        gain = kind.gain if "norm" in part and part not in kind.ungained else 0.0
        layout = layouts.get(part, GgufLayout())
        for moved, count, what in ((layout.rows, tensor.rows, "rows"), (layout.columns, tensor.columns, "columns")):
            if moved is not None and moved.size != count:
                raise CheckpointError(f"{place}: {name} has {count} {what}, where the metadata say {moved.size}")
        whole = GgufTensor(tensor.path, tensor.shape, tensor.type, tensor.offset, size, -gain, layout)
        if (whole_name := kind.tensors.get(f"{part}.{end}")) is not None:
            found[f"{prefix}{whole_name}"] = whole
        elif part in own:
            found[f"{own[part]}.{end}"] = whole
        elif module is None:
            raise UnsupportedError(f"{place}: tensor {name:.80} has no place in a {kind.family}; edgeq has nothing for it")
        elif "{}" in module and len(tensor.shape) == 3:
            experts, rows, columns = tensor.shape
            for expert in range(experts):
                found[f"{prefix}{module.format(expert)}.{end}"] = whole.part(expert * rows, (rows, columns))
        elif "{}" in module and len(tensor.shape) == 2 and not tensor.block:
            for expert in range(tensor.rows):
                found[f"{prefix}{module.format(expert)}.{end}"] = whole.part(expert, (tensor.columns,))
        elif part == "ffn_gate_inp_shexp":
            found[f"{prefix}{module}.{end}"] = whole.part(0, (1, tensor.rows * tensor.columns))
        else:
            found[f"{prefix}{module}.{end}"] = whole
    return found


def _owner(kind: Architecture, config: Mapping[str, Any], layer: int) -> tuple[str, Mapping[str, str]]:
    """What the names of the tensors of a layer begin with, and the tensors that only those have which draft tokens."""
    draft = layer - config["num_hidden_layers"]
    if kind.drafts and 0 <= draft < config.get(DRAFT_LAYERS, 0):
        return f"mtp.layers.{draft}.", kind.drafts
    return f"{kind.layers}{layer}.", {}
