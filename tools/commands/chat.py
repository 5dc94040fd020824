"""`edgeq chat`: a conversation whose cache is kept between turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from edgeq.errors import DeviceError, InputError, ResourceError, UnsupportedError
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import tokens_of
from edgeq.runtime import Generation, Measurement, Model
from edgeq.runtime.request import Request
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.text.chat_template import parts
from edgeq.tools.cli.entry import in_options
from edgeq.tools.cli.history import line_editing
from edgeq.tools.cli.params import RANDOM
from edgeq.tools.cli.terminal import compilation, note, progress, write
from edgeq.tools.commands.run import Screen, argument, given_sampling, load, read_bytes, read_template, sampling_of, utf8
from edgeq.tools.measure.generation_records import records
from edgeq.tools.measure.report import cache_label, describe

HELP = """/clear forgets the conversation, /exit ends it, /help shows this; Ctrl-C stops an answer
/regenerate answers the last question again, /system TEXT sets the system message, /stats shows the cost of the last answer
/save FILE and /load FILE keep the conversation as JSON; a line that ends with \\ goes on in the next one
/image FILE puts a picture before the next question, for a model that sees"""
HINT = "(/exit, Ctrl-D or Ctrl-C again ends the conversation)"
MAX_CONVERSATION_BYTES = 16 << 20
"""Bytes of a file that /load reads."""
ROLES = ("system", "user", "assistant")
Content = str | list[dict[str, str]]
"""Text, or parts: pictures by path and digest, then the text."""
Message = dict[str, Any]


def chat(
    *,
    model: Path,
    system: str | None,
    chat_template: Path | None,
    tokens: int,
    stop: tuple[str, ...],
    draft: DraftSource,
    gamma: int | None,
    history: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Lines from standard input are messages, answers go to standard output, everything else to standard error.

    as_json   an answer is a JSON object in a line of its own, with the records of what it cost

    UnsupportedError: the model has no chat template and none is passed.
    """
    if options["seed"] is None:
        # The same question twice should not give the same answer.
        options["seed"] = RANDOM
    given = given_sampling(options)
    loaded = load(model, read_template(chat_template), options, draft=draft)
    if loaded.template is None:
        raise UnsupportedError(f"{model}: no chat template in the file; pass one with --chat-template FILE, or use edgeq run")
    sampling, label = sampling_of(loaded, given, chat=True)
    stops = [argument(each, "--stop") for each in stop]
    # Wrong values are refused before the first question.
    loaded.speculator(draft, gamma)
    Request(sampling, tokens, stops).check(loaded.config.vocab_size)
    system = None if system is None else argument(system, "--system")
    settings = {"max_tokens": tokens, "sampling": sampling, "stop": stops, "draft": draft, "gamma": gamma}
    conversation = Conversation(loaded, system, tokens, settings, as_json)
    note(f"{describe(loaded.file)}; {loaded.description}; cache {cache_label(loaded)}; context {loaded.context}; {label}")
    note(HELP)
    with line_editing(history and sys.stdin is not None and sys.stdin.isatty()):
        for line in lines():
            if line == "/exit":
                return
            if line.startswith("/"):
                command(conversation, *line.partition(" ")[::2])
            elif line:
                answer(conversation, line)


def command(conversation: Conversation, name: str, value: str) -> None:
    """A line that begins with a slash; what it cannot do is noted, and the conversation stays as it is."""
    try:
        if name == "/help":
            note(HELP)
        elif name == "/clear":
            conversation.clear()
        elif name == "/regenerate":
            answer(conversation, conversation.last_question())
        elif name == "/system":
            conversation.set_system(value)
        elif name == "/stats":
            for line in costs(conversation.last):
                note(line)
        elif name == "/image":
            note(conversation.show(value.strip()))
        elif name == "/save":
            conversation.save(Path(value.strip()))
        elif name == "/load":
            conversation.load(Path(value.strip()))
            note(f"{len(conversation.turns)} messages")
        else:
            note(f"unknown command {name}; {HELP}")
    except (InputError, UnsupportedError, ResourceError) as error:
        note(in_options(str(error)))


def costs(m: Measurement | None) -> list[str]:
    """Lines about the last answer."""
    if m is None:
        return ["there is no answer yet"]
    prompt = f"{m.prompt_tokens} tokens, {m.cached_tokens} of them from the cache"
    seen = [f"images   {m.images} ({m.visual_tokens} tokens), tower {1000 * m.vision_s:,.0f} ms"] if m.images else []
    return [
        *seen,
        f"prefill  {m.prefill_rate:,.1f} tok/s ({prompt}), TTFT {1000 * m.ttft_s:,.0f} ms",
        f"decode   {m.decode_rate:,.1f} tok/s ({m.generated_tokens} tokens), {m.decode_bytes_per_s / 1e9:.2f} GB/s",
    ]


def lines() -> Iterator[str]:
    """Messages that the user types, stripped, until the input ends; lines that end with a backslash are joined.

    On a terminal an interrupt drops the line, and a second one after it raises KeyboardInterrupt.
    """
    pending: list[str] = []
    for line in typed(pending):
        if line.endswith("\\"):
            pending.append(line[:-1])
            continue
        yield "\n".join([*pending, line]).strip()
        pending.clear()
    if pending:
        yield "\n".join(pending).strip()


def typed(pending: list[str]) -> Iterator[str]:
    """Single lines.  `pending`: those of a message that is not finished, which an interrupt drops."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        yield from (line.decode("utf-8", "replace").strip() for line in sys.stdin.buffer)
        return
    interrupted = False
    while True:
        try:
            line = input("... " if pending else "> ")
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            pending.clear()
            note(f"\n{HINT}")
            continue
        interrupted = False
        yield line.strip()


def answer(conversation: Conversation, question: Content) -> None:
    """Stream one answer.  Ctrl-C ends it; what was generated stays in the conversation."""
    said, generation, screen = list[str](), None, Screen()
    try:
        with progress() as report:
            generation = conversation.ask(question, lambda done, total: report(done, total, "prompt"))
            # The bar has to be gone before text is written.
            coming = generation.pieces()
            first = next(coming)
        for piece in chain([first], coming):
            said += [] if piece.thought else [piece.text]
            if not conversation.as_json:
                screen.show(piece)
    except InputError as error:
        note(in_options(str(error)))
        return
    except DeviceError:
        # The device is lost for the next questions too.  The message begins a line.
        write("\n" if generation is not None and generation.tokens and not conversation.as_json else "")
        raise
    except KeyboardInterrupt:
        note(" (stopped)")
    if not conversation.as_json:
        write("\n")
    elif generation is not None:
        write(json.dumps(conversation.described("".join(said), generation)) + "\n")
    conversation.answered("".join(said))
    m = conversation.last
    if m is not None and m.decode_tokens:
        note(f"[{m.decode_rate:,.1f} tok/s]")
    if generation is not None and generation.finish_reason == "context":
        note("the context is full: the answer ends here; the oldest turns are dropped before the next one")


def is_content(value: Any) -> bool:
    """Whether a conversation can hold this: text, or pictures and text."""
    if isinstance(value, str):
        return True
    keys = {"image": {"type", "path", "digest"}, "text": {"type", "text"}}
    return isinstance(value, list) and all(
        isinstance(part, dict)
        and set(part) == keys.get(str(part.get("type")))
        and all(isinstance(entry, str) for entry in part.values())
        for part in value
    )


class Conversation:
    """Messages, and the session that holds their keys and values.

    system    system message, which always stays
    tokens    of an answer at most
    settings  further arguments of Model.chat
    as_json   answers are printed as JSON
    last      what the last answer cost
    """

    def __init__(self, model: Model, system: str | None, tokens: int, settings: dict[str, Any], as_json: bool = False) -> None:
        self._model, self.as_json = model, as_json
        self._tokens = tokens
        self._settings = settings
        self.last: Measurement | None = None
        self._asked = 0
        self.set_system(system or "")
        self.clear()

    def set_system(self, text: str) -> None:
        """From the next question on; empty: none."""
        self._system = [{"role": "system", "content": text}] if text else []

    def clear(self) -> None:
        """Forget all turns."""
        self.turns: list[Message] = []
        self._shown: list[dict[str, str]] = []
        self._pictures: dict[str, Picture] = {}
        self._session = self._model.session()

    def show(self, path: str) -> str:
        """Put a picture before the next question; a line about it.

        InputError, UnsupportedError: it cannot be read, or the model reads text alone.
        """
        picture = self._model.read_image(path)
        with compilation() as report:
            self._model.prepare_images(report)
        assert self._model.config.vision is not None
        self._shown.append({"type": "image", "path": path, "digest": picture.digest.hex()})
        self._pictures[picture.digest.hex()] = picture
        tokens = tokens_of(picture, self._model.config.vision)
        width, height = picture.size
        return "\n".join([f"{path}: {width} x {height} pixels, {tokens} tokens", *picture.notes])

    def ask(self, question: Content, on_progress: Any = None) -> Generation:
        """The answer as a stream.

        InputError: the question alone is too long for the context; the conversation is unchanged.
        """
        if isinstance(question, str) and self._shown:
            question = [*self._shown, {"type": "text", "text": question}]
        turns = self._fitting([*self.turns, {"role": "user", "content": question}])
        messages, sampling = [*self._system, *turns], self._settings["sampling"]
        # A question that is asked again gets another answer, and a conversation with the same seed the same ones.
        each = self._settings | {"sampling": replace(sampling, seed=(sampling.seed + self._asked) % (1 << 64))}
        pictures = self._seen(turns)
        generation = self._model.chat(messages, images=pictures, session=self._session, on_progress=on_progress, **each)
        self._asked += 1
        self.turns, self.last = turns, generation.measurement
        self._shown = []
        return generation

    def described(self, text: str, generation: Generation) -> dict[str, Any]:
        """An answer as fields of JSON; no `finish_reason`: it was stopped."""
        cost = generation.measurement
        made = [record.fields() for record in records(self._model, cost, self._settings["draft"])]
        thoughts = {"thoughts": generation.thoughts} if generation.thoughts else {}
        ended = {"text": text, **thoughts, "finish_reason": generation.finish_reason}
        return {**ended, "generation": cost.as_dict(), "measurements": made}

    def answered(self, text: str) -> None:
        """Append the answer to the turns."""
        self.turns.append({"role": "assistant", "content": text})

    def _seen(self, turns: list[Message]) -> list[Picture]:
        return [self._pictures[part["digest"]] for turn in turns for part in parts(turn) if part["type"] == "image"]

    def last_question(self) -> Content:
        """The last question, which is taken back with its answer.  InputError: there is none."""
        asked = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if not asked:
            raise InputError("there is no question yet")
        question: Content = self.turns[asked[-1]]["content"]
        self.turns = self.turns[: asked[-1]]
        return question

    def save(self, path: Path) -> None:
        """Write the messages.  InputError: the file is there already, or cannot be written."""
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump([*self._system, *self.turns], file, ensure_ascii=False, indent=1)
        except OSError as error:
            raise InputError(f"{path}: cannot write it: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Take over the messages that `save` wrote.  InputError: a file that cannot be read, or is something else."""
        data = read_bytes(path)
        if len(data) > MAX_CONVERSATION_BYTES:
            raise InputError(f"{path}: {len(data)} bytes; at most {MAX_CONVERSATION_BYTES} are read")
        try:
            messages = json.loads(utf8(data, str(path)))
        except (ValueError, RecursionError):
            messages = None
        roles = [m.get("role") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
        sound = isinstance(messages, list) and len(roles) == len(messages) and set(roles) <= set(ROLES)
        contents = [m.get("content") for m in messages] if sound else []
        if not sound or not all(map(is_content, contents)) or "system" in roles[1:]:
            raise InputError(f"{path}: not a conversation that /save wrote")
        pictures = {}
        for part in (part for message in messages for part in parts(message) if part["type"] == "image"):
            picture = self._model.read_image(part["path"])
            if picture.digest.hex() != part["digest"]:
                raise InputError(f"{path}: the picture {part['path']} is not the one that the conversation was about")
            pictures[part["digest"]] = picture
        self.clear()
        self._pictures = pictures
        self.set_system(messages[0]["content"] if roles[:1] == ["system"] else "")
        self.turns = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "system"]

    def _fitting(self, turns: list[Message]) -> list[Message]:
        """`turns` without the oldest questions and answers, so that room for `tokens` or a quarter of the context, the
        smaller of the two, is left.

        InputError: the last question alone does not fit.
        """
        assert self._model.template is not None
        room = self._model.context - min(self._tokens, self._model.context // 4)
        while True:
            length = len(self._model.chat_prompt([*self._system, *turns], self._seen(turns)).tokens)
            if length <= room:
                return turns
            if len(turns) == 1:
                raise InputError(
                    f"the message has {length} tokens with what the template adds; {room} fit in the context of "
                    f"{self._model.context}: shorten it or start with a larger -c"
                )
            left = " ".join(" ".join(part.get("text", part.get("path", "")) for part in parts(turns[0])).split())
            note(f"the context of {self._model.context} is full: the oldest turn leaves ({left[:60]!r})")
            turns = turns[2:]
