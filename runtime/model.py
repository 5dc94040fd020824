"""The Python API: load a file, generate text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, Literal, cast

from edgeq.container import ModelFile
from edgeq.errors import InputError, UnsupportedError
from edgeq.records import KV_KINDS, MODES, KvCodec, KvKind, Mode
from edgeq.runtime.chat_template import OTHER_TEMPLATE, ChatTemplate, Message
from edgeq.runtime.context_size import choose_context
from edgeq.runtime.decode import Stream, decode_step
from edgeq.runtime.decoder import decoder
from edgeq.runtime.generation import Generation
from edgeq.runtime.requantize import Requantization, Requantizer, chosen
from edgeq.runtime.sampling import Sampler, Sampling
from edgeq.runtime.session import OnPrompt, PrefillRate, Session, check_length
from edgeq.runtime.speculative.speculator import DRAFT_SOURCES, DraftSource, Speculator
from edgeq.runtime.stats import LONGEST_DRAFT, Measurement, Speculation
from edgeq.runtime.stopping import Ending
from edgeq.runtime.tokenizer import Text
from edgeq.targets import Choice, pick
from edgeq.targets.requantization import shared_inputs
from edgeq.targets.rows import PAGE
from edgeq.targets.target import OnProgress, Options, Requantizable, no_progress


class Model:
    """A model file, compiled for a target.

    context       positions a session holds
    description   what runs where, and why other targets do not
    load_s        seconds that opening and compiling took
    requantization  when and how weights are requantized; None: never, as the file has no masters or it was not asked for
    """

    def __init__(
        self,
        file: ModelFile,
        choice: Choice,
        options: Options,
        *,
        context: int | None = None,
        chat_template: str | None = None,
        requantization: Requantization | None = None,
        on_progress: OnProgress = no_progress,
    ) -> None:
        started = perf_counter()
        self.file = file
        self.config = file.metadata.config
        self._chat_template = chat_template
        self.requantization = chosen(requantization, file)
        # Its buffers do not depend on the context, only rotary frequencies do.
        graph = decoder(file.metadata)
        if self.requantization:
            # Refused here, so that no target compiles first.
            shared_inputs(graph)
        room = choice.target.room(graph, file, options)
        self.context = choose_context(room, graph.page_bytes(options.kv), self.config.max_position_embeddings, context)
        self.graph = decoder(file.metadata, self.context)
        self.program = choice.target.compile(self.graph, file, options, on_progress)
        if self.requantization and not isinstance(self.program, Requantizable):
            raise UnsupportedError(f"target {choice.target.name} cannot requantize weights; run with --requantize never")
        refused = "".join(f"; not on {name}: {reason}" for name, reason in choice.refused)
        self.description = self.program.description + refused
        self._lock = Lock()
        self._prefill_rate = PrefillRate(self.program.tile)
        self.load_s = perf_counter() - started

    @cached_property
    def text(self) -> Text:
        """The tokenizer, read when it is first used: a vocabulary of 128,000 takes a fifth of a second.

        UnsupportedError: the file has none.  FormatError: damaged.
        """
        return Text.from_file(self.file)

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
        kv: KvKind | Literal["file"] | None = None,
        context: int | None = None,
        max_logits: int = LONGEST_DRAFT + 1,
        max_rows: int = 0,
        chat_template: str | None = None,
        requantization: Requantization | None = None,
        on_progress: OnProgress = no_progress,
    ) -> Model:
        """Open `path` and compile it.

        target       "cpu" or "reference"; None: the first that this machine can use
        isa          instruction set of the target; None: the best
        mode         "a16" (float activations), "a8" or "a4" (integer); None: what the file was made for
        threads      for decode, threads_prefill for prompts; 0: the target chooses
        kv           "f16", "int8" or "int4": how keys and values are cached; None or "file": what the file was made for
        context      positions of a session; None: min(what the model was trained with, 4096, what fits in memory)
        max_logits   rows whose logits one run can give (Session.all_logits)
        max_rows     rows of one run: the prefill chunk; 0: the target chooses
        chat_template   jinja2 text instead of the file's
        requantization  when and how weights are requantized from the file's masters; None: after every prompt if it has any
        on_progress  called as kernels are compiled, which takes seconds the first time on a machine

        InputError: no such file, or an argument out of range.  FormatError: damaged.  UnsupportedError: something that the file
        needs or you ask for is not there.  ResourceError: the context does not fit in memory.
        """
        started = perf_counter()
        if mode not in (None, *MODES):
            raise InputError(f"mode {mode!r} is not known; supported: {', '.join(MODES)}")
        if kv not in (None, "file", *KV_KINDS):
            raise InputError(f"kv {kv!r} is not known; supported: file, {', '.join(KV_KINDS)}")
        counts = {"threads": threads, "threads_prefill": threads_prefill, "max_logits": max_logits, "max_rows": max_rows}
        for name, value in counts.items():
            least, most = (0, 1024) if name.startswith("threads") else (int(name == "max_logits"), 65536)
            if not least <= value <= most:
                raise InputError(f"{name} is {value}; expected {least} to {most}")
        file = ModelFile.open(Path(path))
        choice = pick(target, file)
        options = Options(
            mode=mode or file.metadata.default_mode,
            threads=threads,
            isa=isa,
            max_rows=max_rows,
            max_logits=max_logits,
            threads_prefill=threads_prefill,
            kv=file.metadata.kv if kv is None or kv == "file" else KvCodec(kv),
            requantize=chosen(requantization, file) is not None,
        )
        model = cls(
            file,
            choice,
            options,
            context=context,
            chat_template=chat_template,
            requantization=requantization,
            on_progress=on_progress,
        )
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

    def speculator(self, draft: DraftSource, gamma: int | None) -> Speculator | None:
        """A speculator that drafts from `draft`; None for "off".  InputError: an unknown source, or a gamma out of range."""
        if draft not in DRAFT_SOURCES:
            raise InputError(f"draft {draft!r} is not known; supported: {', '.join(DRAFT_SOURCES)}")
        if gamma is not None and not 1 <= gamma <= LONGEST_DRAFT:
            raise InputError(f"gamma is {gamma}; expected 1 to {LONGEST_DRAFT}")
        if draft == "off":
            return None
        exact = self.program.options.mode
        cheaper = MODES[MODES.index(exact) + 1 :]
        if draft == "qspec" and not cheaper:
            raise InputError(f"mode {exact} has no cheaper one to draft in; pass --mode a16 or a8, or --draft lookup")
        # Where activations of 4 bits are what the file was made for, they are the better draft.
        made_for = self.file.metadata.default_mode
        mode = made_for if made_for in cheaper else cheaper[0] if cheaper else exact
        source = "lookup" if draft in ("both", "auto") and not cheaper else draft
        if source in ("qspec", "both", "auto"):
            # It may replace the threads, on which another session may be running.
            with self._lock:
                self.program.prepare(mode)
        return Speculator(source, gamma, mode)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """InputError: a prompt that is empty, or longer than the context."""
        if not prompt:
            raise InputError("the prompt is empty; give at least one character")
        check_length(len(prompt), self.context)

    def session(self) -> Session:
        """An empty session; its cache grows as it is filled."""
        requantizer = None
        if self.requantization:
            requantizer = Requantizer(cast(Requantizable, self.program), self.requantization, self._lock)
        return Session(self.program, self.config.vocab_size, self.context, self._lock, self._prefill_rate, requantizer)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        session: Session | None = None,
        on_progress: OnPrompt | None = None,
        draft: DraftSource = "off",
        gamma: int | None = None,
    ) -> Generation:
        """Continue `prompt`, text or tokens.  Iterate over the result.

        sampling   None: greedy
        stop       at most 16 strings that end the text and are not part of it
        session    one to continue: the beginning that it shares with `prompt` is kept and not run again
        on_progress  called after each chunk of the prompt with (tokens done, total tokens)
        draft      where drafts of the next tokens come from: "qspec" (the same weights in a cheaper mode), "lookup" (the text
                   so far), "both" or "auto" (both).  Greedy text is the same as without drafts; sampled text has the same
                   distribution
        gamma      draft length, 1 to 7; None: the length with the best measured speed-up, 0 included

        InputError: the prompt is empty or longer than the context, or an argument is out of range.
        """
        started = perf_counter()
        tokens = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._start(tokens, started, session, on_progress, max_tokens, sampling, stop, draft, gamma)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        session: Session | None = None,
        on_progress: OnPrompt | None = None,
        draft: DraftSource = "off",
        gamma: int | None = None,
        **variables: Any,
    ) -> Generation:
        """The assistant's answer to `messages`; `variables` go to the chat template, the rest is as in `generate`.

        UnsupportedError: the file has no chat template.
        """
        started = perf_counter()
        if self.template is None:
            raise UnsupportedError(f"{self.file.path}: the file has no chat template; pass one with --chat-template FILE")
        tokens = self.template.encode(messages, **variables)
        return self._start(tokens, started, session, on_progress, max_tokens, sampling, stop, draft, gamma)

    def _start(
        self,
        prompt: list[int],
        started: float,
        session: Session | None,
        on_progress: OnPrompt | None,
        max_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[str],
        draft: DraftSource,
        gamma: int | None,
    ) -> Generation:
        """Check what can be checked before anything runs."""
        self.check_prompt(prompt)
        speculator = self.speculator(draft, gamma)
        measurement = Measurement(
            self.load_s,
            self.weight_bytes,
            self.position_bytes,
            len(prompt),
            speculation=speculator.statistics if speculator else Speculation(),
        )
        stream = Stream(session or self.session(), Sampler(sampling or Sampling()), prompt)
        ending = Ending(self.text, max_tokens, stop)
        step = speculator.step if speculator else decode_step
        return Generation(stream, ending, step, measurement, self.config.positions_read, started, on_progress)
