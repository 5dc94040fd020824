"""`edgeq chat`: a conversation whose cache is kept between turns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeq.errors import InputError, UnsupportedError
from edgeq.runtime import Generation, Model
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.runtime.stopping import Ending
from edgeq.tools.report import cache_label, describe
from edgeq.tools.run import load, sampling_of
from edgeq.tools.terminal import note, write

HELP = "/clear forgets the conversation, /exit ends it, /help shows this; Ctrl-C stops an answer"
Message = dict[str, str]


def chat(
    *,
    model: Path,
    system: str | None,
    chat_template: Path | None,
    tokens: int,
    stop: tuple[str, ...],
    draft: DraftSource,
    gamma: int | None,
    **options: Any,
) -> None:
    """Lines from standard input are messages, answers go to standard output, everything else to standard error.

    UnsupportedError: the model has no chat template and none is passed.
    """
    loaded = load(model, chat_template, options)
    if loaded.template is None:
        raise UnsupportedError(f"{model}: no chat template in the file; pass one with --chat-template FILE, or use edgeq run")
    # Wrong values are refused before the first question.
    loaded.speculator(draft, gamma)
    Ending(loaded.text, tokens, stop)
    settings = {"max_tokens": tokens, "sampling": sampling_of(loaded, options), "stop": stop, "draft": draft, "gamma": gamma}
    conversation = Conversation(loaded, system, tokens, settings)
    note(f"{describe(loaded.file)}; {loaded.description}; cache {cache_label(loaded)}; context {loaded.context}")
    note(HELP)
    for line in lines():
        if line == "/exit":
            return
        if line == "/help":
            note(HELP)
        elif line == "/clear":
            conversation.clear()
        elif line.startswith("/"):
            note(f"unknown command {line.split()[0]}; {HELP}")
        elif line:
            answer(conversation, line)


def lines() -> Iterator[str]:
    """Lines that the user types, stripped, until the input ends."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        yield from (line.decode("utf-8", "replace").strip() for line in sys.stdin.buffer)
        return
    # With this module, where it exists, input() has line editing.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            note("")
            return


def answer(conversation: Conversation, question: str) -> None:
    """Stream one answer.  Ctrl-C ends it; what was generated stays in the conversation."""
    try:
        generation = conversation.ask(question)
    except InputError as error:
        note(f"{error}")
        return
    pieces: list[str] = []
    try:
        for piece in generation:
            pieces.append(piece)
            write(piece)
    except KeyboardInterrupt:
        note(" (stopped)")
    write("\n")
    conversation.answered("".join(pieces))
    if generation.finish_reason == "context":
        note("the context is full: the answer ends here; the oldest turns are dropped before the next one")


class Conversation:
    """Messages, and the session that holds their keys and values.

    system    system message, which always stays
    tokens    of an answer at most
    settings  further arguments of Model.chat
    """

    def __init__(self, model: Model, system: str | None, tokens: int, settings: dict[str, Any]) -> None:
        self._model = model
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._tokens = tokens
        self._settings = settings
        self.clear()

    def clear(self) -> None:
        """Forget all turns."""
        self.turns: list[Message] = []
        self._session = self._model.session()

    def ask(self, question: str) -> Generation:
        """The answer as a stream.

        InputError: the question alone is too long for the context; the conversation is unchanged.
        """
        turns = self._fitting([*self.turns, {"role": "user", "content": question}])
        generation = self._model.chat([*self._system, *turns], session=self._session, **self._settings)
        self.turns = turns
        return generation

    def answered(self, text: str) -> None:
        """Append the answer to the turns."""
        self.turns.append({"role": "assistant", "content": text})

    def _fitting(self, turns: list[Message]) -> list[Message]:
        """`turns` without the oldest questions and answers, so that room for `tokens` or a quarter of the context, the
        smaller of the two, is left.

        InputError: the last question alone does not fit.
        """
        assert self._model.template is not None
        room = self._model.context - min(self._tokens, self._model.context // 4)
        while True:
            length = len(self._model.template.encode([*self._system, *turns]))
            if length <= room:
                return turns
            if len(turns) == 1:
                raise InputError(
                    f"the message has {length} tokens with what the template adds; {room} fit in the context of "
                    f"{self._model.context}: shorten it or start with a larger -c"
                )
            left = " ".join(turns[0]["content"].split())
            note(f"the context of {self._model.context} is full: the oldest turn leaves ({left[:60]!r})")
            turns = turns[2:]
