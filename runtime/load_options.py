"""How Model.load is to run a file: its arguments, checked before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.format.records import KV_KINDS, MODES, KvCodec, KvKind, Mode
from edgeq.runtime.arguments import flag, instance, integer, wrong
from edgeq.runtime.session.requantize import Requantization, chosen
from edgeq.runtime.session.runs import RowOrder
from edgeq.targets.host import CHUNK_ROWS
from edgeq.targets.target import Options

MAX_LOGITS = 32
"""Texts that one run decodes, or 4 with drafts of 7 tokens; each takes 4 bytes of memory for every token of the vocabulary."""


@dataclass(frozen=True)
class LoadArguments:
    """The arguments of Model.load that say what a file runs on, as they are explained there."""

    target: str | None
    isa: str | None
    mode: Mode | None
    threads: int
    threads_prefill: int
    kv: KvKind | Literal["file"] | None
    max_logits: int
    max_rows: int
    requantization: Requantization | None
    context: int | None
    chat_template: str | None
    row_order: RowOrder
    graphs: bool

    def check(self) -> None:
        """InputError: of the wrong type or out of range."""
        if self.mode not in (None, *MODES):
            raise InputError(f"mode {self.mode!r} is not known; supported: {', '.join(MODES)}")
        if self.kv not in (None, "file", *KV_KINDS):
            raise InputError(f"kv {self.kv!r} is not known; supported: file, {', '.join(KV_KINDS)}")
        for name, text in {"target": self.target, "isa": self.isa, "chat_template": self.chat_template}.items():
            instance(name, text, (str, type(None)), "a string, or None")
        for name, threads_of in {"threads": self.threads, "threads_prefill": self.threads_prefill}.items():
            integer(name, threads_of, 0, 1024, "0 (the target chooses) to 1024")
        integer("max_logits", self.max_logits, 1, 65536)
        integer("max_rows", self.max_rows, 0, 65536, "0 (the target chooses) to 65536")
        instance("requantization", self.requantization, (Requantization, type(None)), "a Requantization, or None")
        if self.context is not None:
            integer("context", self.context, -(1 << 62), 1 << 62, "a number of positions, or None")
        if self.row_order not in get_args(RowOrder):
            raise wrong("row_order", self.row_order, " or ".join(get_args(RowOrder)))
        flag("graphs", self.graphs)

    def options(self, file: ModelFile) -> Options:
        """What is told to the target."""
        pooling = file.metadata.config.pooling
        # The mean of a text takes the states of all rows, which are as narrow as the stream.
        results = self.max_rows or CHUNK_ROWS if pooling and pooling.kind == "mean" else self.max_logits
        return Options(
            mode=self.mode or file.metadata.default_mode,
            threads=self.threads,
            isa=self.isa,
            max_rows=self.max_rows,
            max_logits=results,
            threads_prefill=self.threads_prefill,
            kv=file.metadata.kv if self.kv is None or self.kv == "file" else KvCodec(self.kv),
            requantize=chosen(self.requantization, file) is not None,
            graphs=self.graphs,
        )
