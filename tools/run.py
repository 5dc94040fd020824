"""`edgeq run`: continue a prompt, streaming; the speed at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from edgeq.errors import FormatError, InputError
from edgeq.runtime import Generation, Model, Sampling
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.runtime.stats import Measurement, Speculation
from edgeq.tools.report import cache_label, describe, read_bandwidth
from edgeq.tools.terminal import compilation, note, progress, write

LOAD = ("target", "isa", "mode", "threads", "threads_prefill", "kv", "context", "requantization")
# Field of Sampling: (option of the command line, key in the file, as Hugging Face's generation_config.json has it).
SAMPLING = {
    "temperature": ("temp", "temperature"),
    "top_k": ("top_k", "top_k"),
    "top_p": ("top_p", "top_p"),
    "min_p": ("min_p", "min_p"),
    "repeat_penalty": ("repeat_penalty", "repetition_penalty"),
    "seed": ("seed", "seed"),
}


def run(
    *,
    model: Path,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    system: str | None,
    chat_template: Path | None,
    as_json: bool,
    tokens: int,
    stop: tuple[str, ...],
    draft: DraftSource,
    gamma: int | None,
    **options: Any,
) -> None:
    """Text goes to standard output as it is generated, then a summary to standard error; or one JSON object and nothing else.

    InputError: no prompt, a file that cannot be read, an option out of range.
    """
    if not chat and (system is not None or chat_template is not None):
        raise InputError("--system and --chat-template go with --chat")
    text = prompt_text(prompt, file)
    loaded = load(model, chat_template, options)
    settings: dict[str, Any] = {
        "max_tokens": tokens,
        "sampling": sampling_of(loaded, options),
        "stop": stop,
        "draft": draft,
        "gamma": gamma,
    }
    with progress() as report:

        def prefilled(done: int, total: int) -> None:
            report(done, total, "prompt")

        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": text})
            generation = loaded.chat(messages, on_progress=prefilled, **settings)
        else:
            generation = loaded.generate(text, on_progress=prefilled, **settings)
        # The bar has to be gone before text is written.
        first = next(generation, "")
    if as_json:
        click.echo(json.dumps(as_object(loaded, generation, first + "".join(generation))))
        return
    write(first)
    for piece in generation:
        write(piece)
    write("\n")
    for line in summary(loaded, generation):
        note(line)


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The prompt from -p, -f or a pipe (also `-f -`).  One line end at the end of a file or a pipe is dropped."""
    if prompt is not None and file is not None:
        raise InputError("both -p and -f are given; pass one of them")
    if prompt is not None:
        return prompt
    if file is None or str(file) == "-":
        # On a terminal `-f -` waits for the text, as other programs do; without -f the user more likely forgot the prompt.
        if sys.stdin is None or (file is None and sys.stdin.isatty()):
            raise InputError("no prompt: pass -p TEXT or -f FILE, or pipe it in")
        data, name = sys.stdin.buffer.read(), "standard input"
    else:
        data, name = read_bytes(file), str(file)
    return utf8(data, name).removesuffix("\n").removesuffix("\r")


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


def load(model: Path, chat_template: Path | None, options: dict[str, Any]) -> Model:
    template = None if chat_template is None else utf8(read_bytes(chat_template), str(chat_template))
    with compilation() as report:
        return Model.load(model, chat_template=template, on_progress=report, **{name: options[name] for name in LOAD})


def sampling_of(model: Model, options: dict[str, Any]) -> Sampling:
    """The options that were given; for the others what the file recommends, else greedy with seed 0.

    FormatError: recommendations that are not numbers.
    """
    recommended = model.file.metadata.generation
    chosen: dict[str, Any] = {}
    for name, (option, key) in SAMPLING.items():
        value = options[option] if options[option] is not None else recommended.get(key)
        if value is not None:
            chosen[name] = value
    try:
        return Sampling(**chosen)
    except TypeError:
        raise FormatError(f"{model.file.path}: its sampling defaults are not numbers; pass --temp, --top-k and so on") from None


def as_object(model: Model, generation: Generation, text: str) -> dict[str, Any]:
    """What --json prints; rates in tokens or bytes per second."""
    measurement = generation.measurement
    bandwidth = read_bandwidth(model, reached=measurement.decode_bytes_per_s)
    return {
        "text": text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "model": describe(model.file),
        "identity": model.file.identity,
        "runs_on": model.description,
        "threads": model.program.threads,
        "mode": model.program.options.mode,
        "kv": model.program.options.kv.name,
        "kv_bytes_per_position": model.position_bytes,
        "context": model.context,
        "measurement": measurement.as_dict(),
        "read_bandwidth": bandwidth,
        "bandwidth_share": measurement.decode_bytes_per_s / bandwidth if bandwidth else None,
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
    accepted = f"{sum(s.accepted)} of {sum(s.drafted)} accepted"
    return f"{accepted}, {s.tokens_per_cycle:.2f} tokens a cycle; {costs}; predicted {s.predicted:.2f} times as fast"
