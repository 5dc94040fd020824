"""What a checkpoint has to offer to be converted, whatever its files are.

`edgeq.converters.importers` has the sources of this version.  Names, shapes and what is computed from tensors are those of
`Checkpoint`, which is the same for all sources: a source finds, checks and reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import AnyArray, Codec

StoredArrays = Mapping[str, AnyArray]
"""Rows of a quantized weight, by the names of `Codec.parts` and not yet packed: q uint8 [rows, columns], and what else the
codec has (scale f16, zero u8 ...) as [rows, values of a row]."""


class StoredTensor(Protocol):
    """A tensor of a source.

    dtype   of its values, as safetensors spells it; of integers with scales the floats that hold their products
    codec   of weights that are quantized already, whose integers a method can ask for; None: the values are floats
    """

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def codec(self) -> Codec | None: ...

    def read(self, first: int, count: int, name: str) -> NDArray[np.float32]:
        """`count` values, row-major, after the `first` ones; `name`: for messages.

        CheckpointError: they are no longer there.
        """
        ...


class QuantizedTensor(StoredTensor, Protocol):
    """A tensor with a `codec`: besides what its integers mean (`read`) it has them as they are.

    order   i32 [columns]: column j of the integers is that of input channel order[j]; None: as the channels are
    """

    @property
    def order(self) -> NDArray[np.int32] | None: ...

    def quantized(self, first: int, count: int, name: str) -> StoredArrays:
        """`count` rows after the `first` ones, the leading dimensions of more than two taken as one; `name`: for messages.

        CheckpointError: they are no longer there.
        """
        ...


class CheckpointSource(Protocol):
    """An opened checkpoint: configuration, texts, tensors, and the files that they come from.

    name     for the provenance: a hub id or the folder's own name, no path of this machine
    place    where it is, for messages
    config   as transformers' config.json has it; what a source resolves itself, such as how its weights are quantized, is left
             out
    texts    a folder with the other text files, as transformers lays them: tokenizer.json, tokenizer_config.json, ...
    texts_complete   whether tokenizer.json is all there is: the source wrote it, and transformers adds nothing to it
    quantized   whether weights are integers with scales already; it then is converted as stored where nothing else is asked
    notes    what the user should know of how `tensors` were read, a line each
    origin   for the provenance: format and types of the files, where they are not those of transformers; JSON
    """

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def texts(self) -> Path: ...

    @property
    def texts_complete(self) -> bool: ...

    @property
    def quantized(self) -> bool: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def origin(self) -> Mapping[str, object]: ...

    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by their names in the checkpoint: fetched where they were not, and checked; no weight is read.

        CheckpointError: something is missing or damaged.
        """
        ...

    def files(self) -> Sequence[Path]:
        """The files whose change would change the result."""
        ...
