"""The Python API: load a file, generate text."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, Literal, cast
from weakref import WeakSet

from edgeq.errors import InputError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.records import KvKind, Mode
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.answers.constraint import Constraints
from edgeq.runtime.answers.response_format import ResponseFormat
from edgeq.runtime.arguments import callback, flag, instance
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.runtime.generation import Generation
from edgeq.runtime.load_options import MAX_LOGITS, LoadArguments
from edgeq.runtime.network.adapted import adapted, opened
from edgeq.runtime.network.compiled import DraftLayer, compiled
from edgeq.runtime.network.draft_layer import drafted_logits, no_layer
from edgeq.runtime.network.embedding import check_continues
from edgeq.runtime.network.pictures import ImageSource, Pictures, check_image_tokens
from edgeq.runtime.network.policy import Policy
from edgeq.runtime.network.text_reader import TextReader
from edgeq.runtime.network.vision import Tower
from edgeq.runtime.prompt_reader import PromptReader
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Processor, Sampling
from edgeq.runtime.session.prefill_rate import PrefillRate
from edgeq.runtime.session.requantize import NEVER, Requantization, SessionRequantizer, chosen
from edgeq.runtime.session.runs import RowOrder
from edgeq.runtime.session.session import OnPrompt, Session
from edgeq.runtime.session.session_file import Origin
from edgeq.runtime.session.whole_text import WholeTexts
from edgeq.runtime.speculative.speculator import DraftSource, Speculator, checked_draft
from edgeq.runtime.start import start
from edgeq.targets import TargetChoice, pick
from edgeq.targets.capabilities import Requantizable
from edgeq.targets.rows import PAGE
from edgeq.targets.target import OnProgress, Options, Program, no_progress
from edgeq.text.chat_template import ChatTemplate, Message
from edgeq.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class Model(TextReader):
    """A model file, compiled for a target.

    `close`, or the end of a `with` block, closes its sessions, ends its threads and drops its memory.

    target        the name of the target
    context       positions a session holds
    drafting      the compiled layer that drafts, over the same pages and states; None: it does not run
    description   what runs where, and why other targets do not
    load_s        seconds that opening and compiling took
    requantization  when and how weights are requantized; None: never, as the file has no masters or it was not asked for
    """

    def __init__(
        self,
        file: ModelFile,
        choice: TargetChoice,
        options: Options,
        *,
        context: int | None = None,
        chat_template: str | None = None,
        requantization: Requantization | None = None,
        image_tokens: int | None = None,
        row_order: RowOrder = "sequence",
        draft_layer: DraftLayer = False,
        on_progress: OnProgress = no_progress,
    ) -> None:
        started = perf_counter()
        self.file, self.config = file, file.metadata.config
        self.target, self._choice = choice.target.name, cast("TargetChoice | None", choice)
        self._chat_template, self.requantization = chat_template, chosen(requantization, file)
        check_image_tokens(self.config, image_tokens)
        made = compiled(
            file, choice.target, options, context, requantizes=self.requantization is not None, draft_layer=draft_layer,
            on_progress=on_progress,
        )  # fmt: skip
        self.graph, self.context, self.drafting = made.graph, made.context, made.drafting
        self._program: Program | None = made.program
        if self.requantization and not isinstance(self.program, Requantizable):
            raise UnsupportedError(f"target {choice.target.name} cannot requantize weights; run with `requantization=never`")
        beside = partial(Policy, file, choice.target, self.program, self.graph, self.context, on_progress=on_progress)
        self.policy = beside(requantization=self.requantization) if self.config.policy else None
        self.description = self.program.description + "".join(f"; not on {name}: {reason}" for name, reason in choice.refused)
        self.description += f"; without the layer that drafts: {made.left_out}" if made.left_out else ""
        self._lock, self._row_order, self.prefill_rate = Lock(), row_order, PrefillRate(self.program.tile)
        tower = partial(Tower, file, choice.target, options)
        self.pictures = Pictures(self.config, self.context, image_tokens, tower) if self.config.vision else None
        self._origin, self._sessions = Origin.of(file, choice.target.name, options, self.graph), WeakSet[Session]()
        self.constraints = Constraints(lambda: self.text, self.config.vocab_size)
        self.load_s = perf_counter() - started

    @property
    def program(self) -> Program:
        """The compiled graph.  InputError: the model is closed."""
        if self._program is None:
            raise InputError("the model is closed; load it again")
        return self._program

    @program.setter
    def program(self, program: Program) -> None:
        self._program = program

    def close(self) -> None:
        """Close all sessions, wait for a run of another thread, end the threads, drop the memory; nothing can run any more."""
        for session in list(self._sessions):
            session.close()
        with self._lock:
            self._program = self.drafting = self._choice = self.policy = None
            if self.pictures:
                self.pictures.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.description if self._program else "closed"
        return f"<Model {self.file.path.name}: {state}; context {self.context}>"

    @cached_property
    def text(self) -> Tokenizer:
        """The tokenizer, read when it is first used: a vocabulary of 128,000 takes a fifth of a second.

        UnsupportedError: the file has none.  FormatError: damaged.
        """
        return Tokenizer.from_file(self.file)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, None if there is none.  Read when it is first used: without it a file can still generate.

        UnsupportedError: jinja2 cannot read it.
        """
        return ChatTemplate.of(self.file, self._chat_template, lambda: self.text)

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
        max_logits: int = MAX_LOGITS,
        max_rows: int = 0,
        chat_template: str | None = None,
        requantization: Requantization | None = None,
        image_tokens: int | None = None,
        row_order: RowOrder = "sequence",
        adapter: str | os.PathLike[str] | None = None,
        graphs: bool = True,
        draft_layer: DraftLayer = False,
        on_progress: OnProgress = no_progress,
    ) -> Model:
        """Open `path` and compile it.  The logger "edgeq" is told what was compiled, and what the model runs on.

        target       "cpu", "cuda" or "reference"; None: the first that this machine can use
        isa          instruction set of the target; None: the best
        mode         "a16" (float activations), "a8" or "a4" (integer); None: what the file was made for
        threads      for decode, threads_prefill for prompts; 0: the target chooses
        kv           "f16", "int8" or "int4": how keys and values are cached; None or "file": what the file was made for
        context      positions of a session; None: min(what the model was trained with, 4096, what fits in memory)
        max_logits   rows whose logits one run can give (Session.all_logits), hence texts that a Batch decodes together
        max_rows     rows of one run: the prefill chunk; 0: the target chooses
        chat_template   jinja2 text instead of the file's
        requantization  when and how weights are requantized from the file's masters; None: after every prompt if it has any
        image_tokens  the most tokens that a picture gets; None: as many as the file allows, at most 1,280 and half the context
        row_order    "sequence", or "modality": rows of pictures come first in every run; changes no result
        adapter      folder of a LoRA adapter as PEFT saves it, whose factors become low-rank parts of the layers
        graphs       a GPU records the launches of a token once and starts them together; False: one by one
        draft_layer  run the layer that drafts too, where the file has one: every token takes a little more time and memory;
                     "auto": unless the target lacks something of it, which `description` then says
        on_progress  called with (kernels compiled, in all, label)

        InputError: no such file, or an argument of the wrong type or out of range.  FormatError: damaged.  UnsupportedError:
        something that the file needs or you ask for is not there.  ResourceError: the context does not fit in memory.
        """
        started = perf_counter()
        instance("path", path, (str, os.PathLike), "a path")
        threaded = threads, threads_prefill, kv, max_logits, max_rows
        asked = LoadArguments(target, isa, mode, *threaded, requantization, context, chat_template, row_order, graphs)
        asked.check()
        callback("on_progress", on_progress)
        if draft_layer != "auto":
            flag("draft_layer", draft_layer)
        file = opened(path, adapter)
        choice = pick(target, file)
        model = cls(
            file, choice, asked.options(file), context=context, chat_template=chat_template, requantization=requantization,
            image_tokens=image_tokens, row_order=row_order, draft_layer=draft_layer, on_progress=on_progress,
        )  # fmt: skip
        model.load_s = perf_counter() - started
        _log.info("%s: %s; context %d; loaded in %.2f s", file.path.name, model.description, model.context, model.load_s)
        return model

    def with_adapter(self, folder: str | os.PathLike[str], on_progress: OnProgress = no_progress) -> Model:
        """A model of its own over the same mapped file, with a LoRA adapter; sessions of both run together, in a run for each.

        Errors as of `adapter` in `load`.  UnsupportedError: the target would hold the weights twice.
        """
        options, choice = self.program.options, self._choice
        if not (choice and choice.target.shares_weights):
            raise UnsupportedError(f"target {self.target} would hold the weights of every adapter; merge them: --merge-lora")
        given: dict[str, Any] = {"context": self.context, "chat_template": self._chat_template, "row_order": self._row_order}
        given |= {"requantization": self.requantization or NEVER, "image_tokens": self.pictures and self.pictures.most_tokens}
        given["draft_layer"] = self.drafts
        return Model(adapted(self.file, folder), choice, options, on_progress=on_progress, **given)

    @property
    def drafts(self) -> bool:
        """Whether the layer that drafts runs."""
        return self.drafting is not None

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
        """A speculator that drafts from `draft`; None for "off".

        InputError: an unknown source, one that the model does not have, or a gamma out of range.
        """
        why = None if self.drafts else no_layer(self.file)
        found = checked_draft(draft, gamma, self.program.options.mode, self.file.metadata.default_mode, why)
        if found and (mode := found.prepares):
            # It may replace the threads, on which another session may be running.
            with self._lock:
                self.program.prepare(mode)
        return found

    @property
    def prompts(self) -> PromptReader:
        return PromptReader(self.file, self.pictures, lambda: self.text, lambda: self.template)

    def prepare_images(self, on_progress: OnProgress = no_progress) -> None:
        """Compile the vision tower now and not when the first picture comes.

        InputError: the model reads text alone.  ResourceError: it does not fit in memory.
        """
        self.prompts.seeing().prepare(on_progress)

    def read_image(self, source: ImageSource) -> Picture:
        """A picture within the limits of this model, to be given more than once without being read again.

        InputError: not a picture that can be read, or the model reads text alone.  UnsupportedError: Pillow is not installed.
        """
        return self.prompts.seeing().read(source)

    def prompt(self, prompt: str | Sequence[int] | Prompt, images: Sequence[ImageSource] = ()) -> Prompt:
        """What `generate` and `Batch.run` make of a prompt, which is text or tokens; of a Prompt nothing.

        InputError: it is neither, or empty, or a token is not in the vocabulary; an image cannot be read, or the prompt has not
        one image token for each.
        """
        return self.prompts.prompt(prompt, images)

    def chat_prompt(self, messages: Sequence[Message], images: Sequence[ImageSource] = (), **variables: Any) -> Prompt:
        """What `chat` makes of messages; errors as there."""
        return self.prompts.chat(messages, images, variables)

    def session(self) -> Session:
        """An empty session; its cache grows as it is filled.  Where the model embeds texts it gives states, not logits."""
        requantizer = None
        if self.requantization:
            requantizer = SessionRequantizer(cast(Requantizable, self.program), self.requantization, self._lock)
        session = Session(
            self.program, self.config.vocab_size, self.context, self._lock, prefill_rate=self.prefill_rate, origin=self._origin,
            requantizer=requantizer, registry=self._sessions, pictures=self.pictures, whole=WholeTexts.of(self.config),
            drafting=partial(drafted_logits, self.drafting, self.config) if self.drafting else None,
        )  # fmt: skip
        session.row_order = self._row_order
        return session

    def prompt_store(self, folder: str | os.PathLike[str], most_bytes: int) -> PromptStore:
        """Prompts in a folder, for a Scheduler.  InputError: the folder cannot be used, or is not this user's alone."""
        return PromptStore(Path(folder), most_bytes, self._origin, self.program, self._lock)

    def generate(
        self,
        prompt: str | Sequence[int] | Prompt,
        *,
        images: Sequence[ImageSource] = (),
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        processors: Sequence[Processor] = (),
        session: Session | None = None,
        on_progress: OnPrompt | None = None,
        draft: DraftSource = "off",
        gamma: int | None = None,
        response_format: ResponseFormat | None = None,
    ) -> Generation:
        """Continue `prompt`, text or tokens.  Iterate over the result, or take all of it with `Generation.text`.

        images      pictures that the model sees, one for each image token of the prompt: paths, bytes of files, PIL images
        sampling    how tokens are drawn; None: as the file recommends, else greedy (Sampling.recommended)
        stop        at most 16 strings that end the text and are not part of it
        stop_tokens  at most 64 token ids that end the text beside those of the file
        min_tokens  so many tokens come before one that ends the text, and before stop strings are looked for
        ignore_eos  the stop tokens of the file are drawn like others and do not end the text
        logprobs    record in Generation.logprobs the log-probability of every token, and those of the so many most probable
                    ones, at most 20; None: record nothing
        processors  functions (tokens so far, logits float32 [vocab]) -> logits, applied after penalties and biases and before
                    temperature; -inf bans a token.  What one gives must depend on its arguments alone
        session     one to continue: the beginning that it shares with `prompt` is kept and not run again
        on_progress  called after each chunk of the prompt with (tokens done, total tokens)
        draft       where drafts of the next tokens come from: "qspec" (the same weights in a cheaper mode), "lookup" (the text
                    so far), "mtp" (the file's layer that drafts, loaded with `draft_layer`), "both" of the first two, or "auto"
                    (all).  Greedy text is the same as without drafts; sampled text has the same distribution
        gamma       draft length, 1 to 7; None: the length with the best measured speed-up, 0 included
        response_format  what the text is held to: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema":
                    {...}}} or {"type": "grammar", "grammar": "...", "syntax": "lark" or "gbnf"}; None: any text.  It needs
                    llguidance.  A text that ends by `max_tokens` is the beginning of one that fits

        InputError, at the call: the prompt is empty or longer than the context, an argument is of the wrong type or out of
        range, or the schema or grammar has what is not supported.
        """
        started = perf_counter()
        given = sampling, max_tokens, stop, stop_tokens, min_tokens, ignore_eos, logprobs, processors, draft, gamma
        check_continues(self.file)
        return start(self, self.prompt(prompt, images), Request(*given, response_format), session, on_progress, started)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        images: Sequence[ImageSource] = (),
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        processors: Sequence[Processor] = (),
        session: Session | None = None,
        on_progress: OnPrompt | None = None,
        draft: DraftSource = "off",
        gamma: int | None = None,
        response_format: ResponseFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        thinking_budget: int | None = None,
        **variables: Any,
    ) -> Generation:
        """The assistant's answer to `messages`; `variables` go to the chat template, the rest is as in `generate`.

        images   in the order of the messages' {"type": "image"} parts; without such parts they come before the last question
        tools    functions that the answer may call, as OpenAI's interface has them: {"type": "function", "function": {"name",
                 "description", "parameters"}}.  Generation.message has the calls.  Their arguments fit the JSON Schemas
        tool_choice  "auto", "required", "none", or {"type": "function", "function": {"name": ...}} for one that is called
        parallel_tool_calls  an answer may have several calls, where the model's format has them
        thinking_budget  tokens that may be thought before the answer, which alone is held to formats and tools; None: any
                 number, but half of the tokens that may come where it is held to one.  Generation.thoughts has them

        UnsupportedError: the file has no chat template, or it has no format for calls that is known here.
        """
        started = perf_counter()
        given = sampling, max_tokens, stop, stop_tokens, min_tokens, ignore_eos, logprobs, processors, draft, gamma
        check_continues(self.file)
        use = self.prompts.tool_use(tools, tool_choice, parallel_tool_calls)
        prompt = self.prompts.chat(messages, images, variables, use)
        thinking = self.prompts.thinking(prompt, thinking_budget)
        return start(self, prompt, Request(*given, response_format, use, None, thinking), session, on_progress, started)
