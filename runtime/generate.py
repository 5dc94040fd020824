"""The Python API: load a file, generate text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, Literal, NamedTuple

from edgeq import targets
from edgeq.container import ModelFile
from edgeq.errors import InputError, UnsupportedError
from edgeq.linear import KvCodec, Mode
from edgeq.runtime.chat import OTHER_TEMPLATE, ChatTemplate, Message
from edgeq.runtime.measure import Measurement
from edgeq.runtime.memory import choose_context
from edgeq.runtime.model import decoder
from edgeq.runtime.sampling import Sampler, Sampling
from edgeq.runtime.session import Progress, Session
from edgeq.runtime.text import StopStrings, Text, TextStream
from edgeq.targets.operations import PAGE

FinishReason = Literal["stop", "length", "context"]


class Piece(NamedTuple):
    """A token and the text that it made complete, often none."""

    text: str
    token: int


class Generation(Iterator[str]):
    """Text as it is generated; runs when it is iterated.

    tokens          tokens drawn so far, a stop token included
    measurement     what it cost so far
    finish_reason   None while it runs; "stop": a stop token or string came; "length": max_tokens; "context": it is full
    """

    def __init__(self, run: Callable[[Generation], Iterator[Piece]], measurement: Measurement) -> None:
        self.tokens: list[int] = []
        self.measurement = measurement
        self.finish_reason: FinishReason | None = None
        self._pieces = run(self)

    def pieces(self) -> Iterator[Piece]:
        """Every token with its text, for callers that want both; the same run as iterating over the text."""
        return self._pieces

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        """The next text that is not empty."""
        return next(piece.text for piece in self._pieces if piece.text)


class Model:
    """A model file, compiled for a target.

    context       positions a session holds
    description   what runs where, and why other targets do not
    load_s        seconds that opening and compiling took
    """

    def __init__(
        self,
        file: ModelFile,
        choice: targets.Choice,
        options: targets.Options,
        *,
        context: int | None = None,
        chat_template: str | None = None,
        report: targets.Report = targets.silent,
    ) -> None:
        started = perf_counter()
        self.file = file
        self.config = file.metadata.config
        self.text = Text.from_file(file)
        self._chat_template = chat_template
        self.graph = decoder(file.metadata)
        self.context = choose_context(self.graph, file.metadata, options, context)
        self.program = choice.target.compile(self.graph, file, options, report)
        refused = "".join(f"; not on {name}: {reason}" for name, reason in choice.refused)
        self.description = self.program.description + refused
        self._turn = Lock()
        self.load_s = perf_counter() - started

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, None if there is none.  Read when it is first used: without it a file can still generate.

        UnsupportedError: jinja2 cannot read it.
        """
        blob = self.file.blob("chat_template") if self._chat_template is None else self._chat_template.encode()
        try:
            return None if blob is None else ChatTemplate(blob.decode("utf-8"), self.text)
        except UnicodeDecodeError:
            raise UnsupportedError(f"{self.file.path}: the chat template is not UTF-8; {OTHER_TEMPLATE}") from None

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        target: str | None = None,
        isa: str | None = None,
        mode: Mode | None = None,
        threads: int = 0,
        threads_prefill: int = 0,
        kv: KvCodec = "f16",
        context: int | None = None,
        max_logits: int = 1,
        max_rows: int = 256,
        chat_template: str | None = None,
        report: targets.Report = targets.silent,
    ) -> Model:
        """Open `path` and compile it.

        target       "cpu" or "reference"; None: the first that this machine can use
        isa          instruction set of the target; None: the best
        mode         "a16" (float activations) or "a8" (integer); None: what the file was made for
        threads      for decode, threads_prefill for prompts; 0: the target chooses
        kv           "f16" or "int8": how keys and values are cached
        context      positions of a session; None: min(what the model was trained with, 4096, what fits in memory)
        max_logits   rows whose logits one run can give (Session.all_logits)
        max_rows     rows of one run: the prefill chunk
        chat_template   jinja2 text instead of the file's
        report       hears how far the compilation of kernels is: the first time on a machine it takes seconds

        InputError: no such file, or an argument out of range.  FormatError: damaged.  UnsupportedError: something that the file
        needs or you ask for is not there.  ResourceError: the context does not fit in memory.
        """
        started = perf_counter()
        if mode not in (None, "a16", "a8"):
            raise InputError(f"mode {mode!r} is not known; supported: a16, a8")
        if kv not in ("f16", "int8"):
            raise InputError(f"kv {kv!r} is not known; supported: f16, int8")
        counts = {"threads": threads, "threads_prefill": threads_prefill, "max_logits": max_logits, "max_rows": max_rows}
        for name, value in counts.items():
            least = 0 if name.startswith("threads") else 1
            if not least <= value <= 65536:
                raise InputError(f"{name} is {value}; expected {least} to 65536")
        file = ModelFile.open(Path(path))
        choice = targets.pick(target)
        options = targets.Options(
            mode=mode or file.metadata.default_mode,
            threads=threads,
            isa=isa,
            max_rows=max_rows,
            max_logits=max_logits,
            threads_prefill=threads_prefill,
            kv=kv,
        )
        model = cls(file, choice, options, context=context, chat_template=chat_template, report=report)
        model.load_s = perf_counter() - started
        return model

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and head that a run of one row reads."""
        sizes = self.file.metadata.bytes_per_token()
        return sizes["weights"] + sizes["head"]

    @property
    def position_bytes(self) -> int:
        """Bytes of the cache for one position, all layers."""
        return self.graph.page_bytes(self.program.options.kv) // PAGE

    def session(self) -> Session:
        """An empty session; its cache grows as it is filled."""
        return Session(self.program, self.config.vocab_size, self.context, self._turn)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        session: Session | None = None,
        progress: Progress | None = None,
    ) -> Generation:
        """Continue `prompt`, text or tokens.  Iterate over the result.

        sampling   None: greedy
        stop       at most 16 strings that end the text and are not part of it
        session    one to go on with: of what it holds the common beginning with `prompt` is kept and not run again
        progress   hears how far the prompt is

        InputError: the prompt is empty or longer than the context, or an argument is out of range.
        """
        started = perf_counter()
        tokens = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._start(tokens, started, max_tokens, sampling or Sampling(), stop, session or self.session(), progress)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        session: Session | None = None,
        progress: Progress | None = None,
        **variables: Any,
    ) -> Generation:
        """The assistant's answer to `messages`; `variables` go to the chat template, the rest is as in `generate`.

        UnsupportedError: the file has no chat template.
        """
        started = perf_counter()
        if self.template is None:
            raise UnsupportedError(f"{self.file.path}: the file has no chat template; pass one with --chat-template FILE")
        tokens = self.template.encode(messages, **variables)
        return self._start(tokens, started, max_tokens, sampling or Sampling(), stop, session or self.session(), progress)

    def _start(
        self,
        prompt: list[int],
        started: float,
        max_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        session: Session,
        progress: Progress | None,
    ) -> Generation:
        """Check what can be checked before anything runs."""
        if max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}; expected at least 1")
        if not prompt:
            raise InputError("the prompt is empty; give at least one character")
        if len(prompt) > self.context:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, the context {self.context} positions; "
                "shorten the prompt or pass a larger context with -c"
            )
        measurement = Measurement(self.load_s, self.weight_bytes, self.position_bytes, len(prompt))
        stops, sampler = StopStrings(stop), Sampler(sampling)

        def run(generation: Generation) -> Iterator[Piece]:
            return self._pieces(generation, prompt, started, max_tokens, sampler, stops, session, progress)

        return Generation(run, measurement)

    def _pieces(
        self,
        generation: Generation,
        prompt: list[int],
        started: float,
        max_tokens: int,
        sampler: Sampler,
        stops: StopStrings,
        session: Session,
        progress: Progress | None,
    ) -> Iterator[Piece]:
        """The loop: run the prompt, then draw a token and run it until something ends the text."""
        m, stream, history = generation.measurement, TextStream(self.text), list(prompt)
        m.cached_tokens = session.keep_prefix(prompt)
        before = perf_counter()
        logits = session.prefill(prompt[m.cached_tokens :], progress)
        m.prefill_s = perf_counter() - before
        token = sampler.draw(logits, history)
        m.ttft_s = perf_counter() - started
        while True:
            history.append(token)
            generation.tokens.append(token)
            m.generated_tokens += 1
            ended = token in self.text.eos
            text = "" if ended else stops.push(stream.push(token))
            generation.finish_reason = self._reason(ended or stops.found, m.generated_tokens >= max_tokens, session)
            if generation.finish_reason is not None:
                yield Piece(text + stops.finish(), token)
                return
            yield Piece(text, token)
            before = perf_counter()
            logits = session.decode(token)
            token = sampler.draw(logits, history)
            m.decode_s += perf_counter() - before
            m.decode_steps += 1
            m.context_positions += self.config.positions_read(len(session.tokens))

    @staticmethod
    def _reason(stopped: bool, long_enough: bool, session: Session) -> FinishReason | None:
        if stopped:
            return "stop"
        if long_enough:
            return "length"
        return None if session.left else "context"
