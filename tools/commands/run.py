"""`edgeq run`: continue a prompt, streaming; the speed at the end."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from edgeq.errors import DeviceError, InputError
from edgeq.format.container import ModelFile
from edgeq.pictures.image import Picture
from edgeq.pictures.prompt import tokens_of
from edgeq.runtime import Generation, Model, Piece, Sampling
from edgeq.runtime.network.embedding import check_continues
from edgeq.runtime.network.pictures import MAX_TOKENS
from edgeq.runtime.network.vision import vision_of
from edgeq.runtime.request import Request
from edgeq.runtime.session.context_size import DEFAULT_CONTEXT
from edgeq.runtime.speculative.speculator import DraftSource, layer_for
from edgeq.runtime.stats import Measurement, Speculation
from edgeq.system import machine
from edgeq.text.chat_template import ChatTemplate
from edgeq.text.tokenizer import Tokenizer
from edgeq.tools.cli.params import RANDOM
from edgeq.tools.cli.terminal import compilation, note, progress, write, write_aside
from edgeq.tools.measure.generation_records import records
from edgeq.tools.measure.report import cache_label, describe, identification, read_bandwidth

LOAD = ("target", "isa", "mode", "threads", "threads_prefill", "kv", "context", "requantization", "image_tokens", "graphs")
SAMPLING = {"temperature": "temp"} | {
    name: name
    for name in ("top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "seed")
}
"""Field of Sampling: the option of the command line."""
NO_EFFECT = {"top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0} | {
    "dry_multiplier": 0
}
"""Field of Sampling: the value with which it does nothing."""
SHORT_PROMPT = 1024
"""Tokens that a template may add to a prompt before anybody counts them: a prompt with fewer bytes than the usual context has
places, less these, fits whatever its tokens are."""


def run(
    *,
    model: Path,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    system: str | None,
    chat_template: Path | None,
    as_json: bool,
    as_lines: bool,
    tokens: int,
    stop: tuple[str, ...],
    draft: DraftSource,
    gamma: int | None,
    images: tuple[Path, ...],
    json_schema: Path | None,
    grammar: Path | None,
    **options: Any,
) -> None:
    """Text goes to standard output as it is generated, then a summary to standard error; or one JSON object and nothing else.

    as_lines   a JSON object for every token, as it comes, then the object of `as_json`
    images     with some the chat template is used

    InputError: no prompt, a file that cannot be read, an option out of range.
    """
    chat = chat or bool(images)
    if not chat and (system is not None or chat_template is not None):
        raise InputError("--system and --chat-template go with --chat")
    given = given_sampling(options)
    held = response_format(json_schema, grammar)
    stop = tuple(argument(each, "--stop") for each in stop)
    # Kernels may have to be compiled before the model says so.
    Request(max_tokens=tokens, stop=stop).check(vocab_size=0)
    text = prompt_text(prompt, file)
    messages = [{"role": "system", "content": argument(system, "--system")}] if system is not None else []
    messages.append({"role": "user", "content": text})
    template = read_template(chat_template)
    if options["context"] is None:
        visual = most_visual(model, len(images), options["image_tokens"])
        options["context"] = context_for(model, text, messages if chat else None, template, tokens + visual)
    loaded = load(model, template, options, sees=bool(images), draft=draft)
    pictures = [loaded.read_image(path) for path in images]
    sampling, label = sampling_of(loaded, given, chat)
    settings: dict[str, Any] = {
        "max_tokens": tokens,
        "sampling": sampling,
        "stop": stop,
        "draft": draft,
        "gamma": gamma,
        "response_format": held,
    }
    with progress() as report:

        def prefilled(done: int, total: int) -> None:
            report(done, total, "prompt")

        if chat:
            generation = loaded.chat(messages, images=pictures, on_progress=prefilled, **settings)
        else:
            generation = loaded.generate(text, on_progress=prefilled, **settings)
        pieces = generation.pieces()
        # The bar has to be gone before text is written.
        first = next(pieces)
    for line in (line for picture in pictures for line in picture.notes):
        note(line)
    if not (as_json or as_lines):
        note(label)
        if grammar is not None:
            note(f"grammar read as {'GBNF' if held and held['syntax'] == 'gbnf' else 'Lark'}")
        try:
            screen = Screen()
            screen.show(first)
            for piece in pieces:
                screen.show(piece)
        except DeviceError:
            # Its message begins a line.
            write("\n")
            raise
        write("\n")
        for line in summary(loaded, generation):
            note(line)
        return
    if as_lines:
        click.echo(json.dumps(first._asdict()))
        for piece in pieces:
            click.echo(json.dumps(piece._asdict()))
    click.echo(json.dumps(as_object(loaded, generation, text, sampling, draft) | shown(images, pictures, loaded)))


class Screen:
    """Shows an answer as it comes: on standard output, and on standard error what is thought before it."""

    def __init__(self) -> None:
        self._thinks = False

    def show(self, piece: Piece) -> None:
        if self._thinks and not piece.thought:
            write_aside("\n\n")
        self._thinks = piece.thought
        (write_aside if piece.thought else write)(piece.text)


def most_visual(model: Path, images: int, image_tokens: int | None) -> int:
    """The most tokens that so many pictures can have, those beside them included: a token has a character at least."""
    if not images:
        return 0
    vision = ModelFile.open(model).metadata.config.vision
    return images * (min(vision.most_tokens, image_tokens or MAX_TOKENS) + vision.most_text) if vision else 0


def shown(paths: Sequence[Path], pictures: Sequence[Picture], model: Model) -> dict[str, Any]:
    """What --json says of each picture, where the model sees: its size in the file, and as the model sees it."""
    if model.config.vision is None:
        return {}
    vision = model.config.vision
    lines = [
        {
            "path": str(path),
            "width": picture.size[0],
            "height": picture.size[1],
            "seen_width": picture.grid[2] * vision.patch_size * max(1, picture.tiling[1]),
            "seen_height": picture.grid[1] * vision.patch_size * max(1, picture.tiling[0]),
            "tokens": tokens_of(picture, vision),
            "read_s": picture.read_s,
            "notes": list(picture.notes),
        }
        for path, picture in zip(paths, pictures, strict=True)
    ]
    return {"images": lines}


def context_for(model: Path, text: str, messages: list[dict[str, str]] | None, template: str | None, tokens: int) -> int | None:
    """Positions for a prompt and `tokens` more, where that is above what a session has by itself; None: that is enough.

    No prompt has more tokens than bytes, so most need not be counted.
    """
    given = text if messages is None else "".join(message["content"] for message in messages)
    if len(given.encode("utf-8", "replace")) + max(0, tokens) + SHORT_PROMPT <= DEFAULT_CONTEXT:
        return None
    file = ModelFile.open(model)
    reader, blob = Tokenizer.from_file(file), file.blob("chat_template")
    if messages is None:
        count = len(reader.encode(text))
    elif template is None and blob is None:
        return None
    else:
        rendered = template if template is not None else (blob or b"").decode("utf-8", "replace")
        count = len(ChatTemplate(rendered, reader, file.metadata.config.vision is not None).encode(messages))
    wanted = min(count + max(0, tokens), file.metadata.config.max_position_embeddings)
    return wanted if wanted > DEFAULT_CONTEXT else None


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The prompt from -p, -f or a pipe (also `-f -`).  One line end at the end of a file or a pipe is dropped."""
    if prompt is not None and file is not None:
        raise InputError("both -p and -f are given; pass one of them")
    if prompt is not None:
        return argument(prompt, "-p")
    if file is None or str(file) == "-":
        # On a terminal `-f -` waits for the text, as other programs do; without -f the user more likely forgot the prompt.
        if sys.stdin is None or (file is None and sys.stdin.isatty()):
            raise InputError("no prompt: pass -p TEXT or -f FILE, or pipe it in")
        data, name = sys.stdin.buffer.read(), "standard input"
    else:
        data, name = read_bytes(file), str(file)
    return utf8(data, name).removesuffix("\n").removesuffix("\r")


def argument(text: str, option: str) -> str:
    """The text of an option as it was typed: in a locale without UTF-8 Python has its bytes in an encoding of its own."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return utf8(os.fsencode(text), option)
    return text


def response_format(json_schema: Path | None, grammar: Path | None) -> dict[str, Any] | None:
    """What --json-schema or --grammar hold the text to, as Model.generate takes it.

    InputError: both, or a file that cannot be read.
    """
    if json_schema is not None and grammar is not None:
        raise InputError("--json-schema and --grammar exclude each other")
    if json_schema is not None:
        try:
            schema = json.loads(utf8(read_bytes(json_schema), str(json_schema)))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{json_schema}: not JSON: {error}") from None
        return {"type": "json_schema", "json_schema": {"schema": schema}}
    if grammar is not None:
        rules = utf8(read_bytes(grammar), str(grammar))
        gbnf = grammar.suffix == ".gbnf" or "::=" in rules
        return {"type": "grammar", "grammar": rules, "syntax": "gbnf" if gbnf else "lark"}
    return None


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None


def utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{name}: not UTF-8 text; convert it to UTF-8") from None


def read_template(chat_template: Path | None) -> str | None:
    return None if chat_template is None else utf8(read_bytes(chat_template), str(chat_template))


def load(
    model: Path,
    chat_template: str | None,
    options: dict[str, Any],
    sees: bool = False,
    embeds: bool = False,
    draft: DraftSource = "off",
) -> Model:
    """The model, loaded with those of `options` that Model.load takes; `sees`: with its vision tower compiled; `embeds`: it may
    be one that embeds texts; `draft`: where its drafts will come from.

    InputError: it has no tower, or embeds texts.
    """
    file = ModelFile.open(model)
    if not embeds:
        check_continues(file)
    if sees:
        vision_of(file.metadata)
    cores = machine.cpu().cores
    most = max(options["threads"], options["threads_prefill"])
    if most > cores:
        note(f"{most} threads on {cores} core{'s' * (cores > 1)}: they wait for each other; -t auto is faster")
    with compilation() as report:
        given = {name: options[name] for name in LOAD} | {"draft_layer": layer_for(draft)}
        adapter = options.get("adapter")
        loaded = Model.load(model, chat_template=chat_template, adapter=adapter, on_progress=report, **given)
        if sees:
            loaded.prepare_images(report)
        return loaded


def given_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The values of Sampling that the options give, checked before a model is loaded, which may compile kernels for minutes.

    The seed of `--seed random` is drawn here, so that it can be shown and given again.

    InputError: an option out of range.
    """
    given = {name: options[option] for name, option in SAMPLING.items() if options[option] is not None}
    if given.get("seed") == RANDOM:
        given["seed"] = secrets.randbits(32)
    Sampling(**given)
    return given


def sampling_of(model: Model, given: dict[str, Any], chat: bool) -> tuple[Sampling, str]:
    """The values that were given, for the others what the file recommends, or what is usual in chats (Sampling.recommended);
    and a line about it."""
    sampling, others = Sampling.recommended(model, chat, **given), set(SAMPLING) - set(given)
    recommended = Sampling.recommended(model)
    of_file = any(getattr(recommended, name) != getattr(Sampling(), name) for name in others)
    return sampling, sampling_label(sampling) + (" (the file's)" if of_file and not set(given) - {"seed"} else "")


def sampling_label(sampling: Sampling) -> str:
    """`sampling 0.9, top-p 0.95, seed 0`, or `sampling greedy`."""
    parts = [f"{sampling.temperature:g}" if sampling.temperature else "greedy"]
    for name, nothing in NO_EFFECT.items():
        value = getattr(sampling, name)
        if value != nothing and (sampling.temperature or name not in ("top_k", "top_p", "min_p")):
            parts.append(f"{name.replace('_', '-')} {value:g}")
    if sampling.temperature:
        parts.append(f"seed {sampling.seed}")
    return f"sampling {', '.join(parts)}"


def as_object(model: Model, generation: Generation, prompt: str, sampling: Sampling, draft: DraftSource) -> dict[str, Any]:
    """What --json prints: the text, what the generation counted, and its records as `edgeq profile` has them."""
    return {
        "prompt": prompt,
        "text": generation.text(),
        **({"thoughts": generation.thoughts} if generation.thoughts else {}),
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "sampling": asdict(sampling),
        **identification(model),
        "context": model.context,
        "generation": generation.measurement.as_dict(),
        "measurements": [record.fields() for record in records(model, generation.measurement, draft)],
    }


def summary(model: Model, generation: Generation) -> list[str]:
    """The lines about model and speed that end a run."""
    m = generation.measurement
    lines = [
        "",
        f"model    {describe(model.file)}",
        f"runs on  {model.description}",
        f"cache    {cache_label(model)}, context {model.context:,}",
        f"prefill  {m.prefill_rate:,.1f} tok/s ({m.prompt_tokens - m.cached_tokens} tokens), TTFT {1000 * m.ttft_s:,.0f} ms",
    ]
    if m.images:
        tower = f"tower {1000 * m.vision_s:,.0f} ms" if m.vision_s else "from the cache"
        lines.append(f"images   {m.images} ({m.visual_tokens} tokens), read in {1000 * m.read_s:,.0f} ms, {tower}")
    if m.decode_steps:
        decode = f"decode   {m.decode_rate:,.1f} tok/s ({m.generated_tokens} tokens, ended by {generation.finish_reason})"
        share, bandwidth = "", read_bandwidth(model, reached=m.decode_bytes_per_s)
        if bandwidth:
            percent = 100 * m.decode_bytes_per_s / bandwidth
            share = f", {percent:.0f} % of the {bandwidth / 1e9:.1f} GB/s that this machine reads"
        lines.append(f"{decode}, {m.decode_bytes_per_s / 1e9:.2f} GB/s{share}")
    if any(m.speculation.drafted):
        lines.append(f"drafts   {drafting(m.speculation)}")
    if model.requantization and m.decode_steps:
        lines.append(f"weights  {requantized(m, model.requantization.min_tokens)}")
    return lines


def requantized(m: Measurement, needed: int) -> str:
    """Which weights the text was decoded with; seconds and bytes of their requantization."""
    if not m.requantized_tokens:
        return f"the file's own: {needed} tokens are needed to requantize them for a prompt"
    made = f"made for {m.requantized_tokens} tokens in {m.requantize_s:.2f} s: {m.copy_bytes / 1e6:,.0f} MB"
    held = f"{m.anonymous_bytes / 1e6:,.0f} MB without mapped files, {m.peak_bytes / 1e6:,.0f} MB at its peak"
    return f"{made}; the process holds {held}"


def drafting(s: Speculation) -> str:
    """One line about drafts: acceptance, tokens per cycle, measured costs and the speed-up that they predict."""
    costs = ", ".join(f"{name} {value:.2f}" for name, value in (("c", s.c), ("v", s.v), ("β", s.beta)) if value is not None)
    accepted = f"{sum(s.accepted)} of {sum(s.drafted)} accepted, {s.tokens_per_cycle:.2f} tokens a cycle"
    # Forced by a grammar alone, nothing is predicted.
    return "; ".join([accepted, costs, f"predicted {s.predicted:.2f} times as fast"] if costs else [accepted])
