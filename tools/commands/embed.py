"""`edgeq embed`: texts become vectors.  `edgeq rerank`: documents get scores.  `edgeq act`: a robot's next actions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.network.pooling import RankingPrompt
from edgeq.runtime.network.embedding import check_dimensions, check_embeds, check_ranks, instruction_of
from edgeq.runtime.network.policy import check_acts
from edgeq.runtime.session.context_size import DEFAULT_CONTEXT
from edgeq.text.tokenizer import Tokenizer
from edgeq.tools.cli.terminal import note, progress
from edgeq.tools.commands.run import argument, load, read_bytes, utf8
from edgeq.tools.measure.report import cache_label, describe, identification

AT_ONCE = 256
"""Texts whose vectors are printed together: the first lines of a long list do not wait for its end."""
EXTRA = 64
"""Tokens that a tokenizer may put around a text."""
UNUSED: dict[str, Any] = {"requantization": None, "image_tokens": None}


def embed(
    *,
    model: Path,
    texts: tuple[str, ...],
    file: Path | None,
    prompt: str | None,
    dimensions: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """A JSON array of numbers in a line for every text, in their order, or one JSON object; the speed on standard error.

    InputError: the model continues texts, no text, a file that cannot be read, or an option out of range.
    """
    opened = ModelFile.open(model)
    # Refused here, so that nothing is compiled before.
    check_dimensions(dimensions, check_embeds(opened).vector_size(opened.metadata.config.hidden_size))
    instruction = instruction_of(opened, prompt)
    given = list(all_texts(texts, file))
    if not given:
        raise InputError("there is no text: give -p TEXT, --file FILE, or lines on standard input")
    if options["context"] is None:
        options["context"] = context_for(opened, instruction, given)
    loaded = load(model, None, options | UNUSED, embeds=True)
    started, tokens, found = perf_counter(), 0, list[list[float]]()
    with progress() as report:
        for first in range(0, len(given), AT_ONCE):
            before, some = tokens, given[first : first + AT_ONCE]

            def ran(done: int, total: int, first: int = first, before: int = before, count: int = len(some)) -> None:
                nonlocal tokens
                tokens = before + done
                report(first + count * done / total, len(given), "texts")

            vectors = loaded.embed(some, dimensions=dimensions, prompt=prompt, on_progress=ran).tolist()
            if as_json:
                found += vectors
            else:
                for vector in vectors:
                    click.echo(json.dumps(vector))
    seconds = perf_counter() - started
    if as_json:
        spent = {"texts": len(given), "tokens": tokens, "embed_s": seconds, "tokens_per_s": tokens / seconds}
        click.echo(json.dumps({"embeddings": found, **spent, "context": loaded.context, **identification(loaded)}))
        return
    note(f"model    {describe(loaded.file)}")
    note(f"runs on  {loaded.description}")
    note(f"cache    {cache_label(loaded)}, context {loaded.context:,}")
    note(f"embedded {len(given):,} text{'s' * (len(given) > 1)}, {tokens:,} tokens: {tokens / seconds:,.1f} tok/s")


def rerank(
    *,
    model: Path,
    query: str,
    documents: tuple[str, ...],
    file: Path | None,
    top_n: int | None,
    instruction: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """A line for every document, the best first, or one JSON object; the speed on standard error.

    InputError: the model is no reranker or reads no instruction, no document, a file that cannot be read, or an option out of
    range.
    """
    opened = ModelFile.open(model)
    check_ranks(opened)
    asked, given = argument(query, "-q"), list(all_texts(documents, file, "DOC"))
    if not given:
        raise InputError("there is no document: give DOC..., --file FILE, or lines on standard input")
    if options["context"] is None:
        prompt = RankingPrompt.of(opened.metadata.generation)
        beside = f"{prompt.before}{prompt.filled(asked, '', instruction)}{prompt.after}" if prompt else asked
        options["context"] = context_for(opened, beside, given)
    loaded, started, tokens = load(model, None, options | UNUSED, embeds=True), perf_counter(), 0
    with progress() as report:

        def ran(done: int, total: int) -> None:
            nonlocal tokens
            tokens = total
            report(len(given) * done / total, len(given), "documents")

        found = loaded.rerank(asked, given, top_n=top_n, instruction=instruction, on_progress=ran)
    seconds = perf_counter() - started
    if as_json:
        results = [{"index": index, "relevance_score": score, "document": {"text": given[index]}} for index, score in found]
        spent = {"documents": len(given), "tokens": tokens, "rerank_s": seconds, "tokens_per_s": tokens / seconds}
        click.echo(json.dumps({"results": results, **spent, "context": loaded.context, **identification(loaded)}))
        return
    for index, score in found:
        click.echo(f"{score:.6f}\t{index}\t{json.dumps(given[index], ensure_ascii=False)}")
    note(f"model    {describe(loaded.file)}")
    note(f"runs on  {loaded.description}")
    note(f"ranked   {len(given):,} document{'s' * (len(given) > 1)}, {tokens:,} tokens: {tokens / seconds:,.1f} tok/s")


def act(
    *,
    model: Path,
    images: tuple[Path, ...],
    prompt: str,
    state: str,
    steps: int | None,
    seed: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """A JSON array of numbers in a line for every action, or one JSON object; the speed on standard error.

    InputError: the model is no policy, the state is no list of numbers, or an option out of range.
    """
    check_acts(ModelFile.open(model).metadata.config)
    try:
        given = json.loads(state)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, list):
        raise InputError(f"--state is {state[:80]!r}; expected a JSON list of numbers")
    loaded = load(model, None, options | UNUSED, sees=True, embeds=True)
    started = perf_counter()
    found = loaded.act([str(path) for path in images], argument(prompt, "-p"), given, seed=seed, steps=steps)
    seconds = perf_counter() - started
    if as_json:
        made = {"actions": found.tolist(), "act_s": seconds, "context": loaded.context}
        click.echo(json.dumps({**made, **identification(loaded)}))
        return
    for action in found.tolist():
        click.echo(json.dumps(action))
    note(f"model    {describe(loaded.file)}")
    note(f"runs on  {loaded.description}")
    note(f"acted    {len(found):,} actions in {seconds:.2f} s")


def all_texts(texts: Sequence[str], file: Path | None, option: str = "-p") -> Iterator[str]:
    """The texts of `option`, of the lines of --file, or of those of standard input.  InputError: more than one of them."""
    if texts and file is not None:
        raise InputError(f"both {option} and --file are given; pass one of them")
    if texts:
        yield from (argument(text, option) for text in texts)
    elif file is not None:
        for number, line in enumerate(utf8(read_bytes(file), str(file)).splitlines(), 1):
            yield text_of(line, f"{file}: line {number}")
    elif not sys.stdin.isatty():
        yield from utf8(sys.stdin.buffer.read(), "standard input").splitlines()


def text_of(line: str, where: str) -> str:
    """The text of a line of JSON: a string, or an object's "text"."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f'{where}: not JSON: {error}; expected "..." or {{"text": "..."}}') from None
    text = found.get("text") if isinstance(found, dict) else found
    if not isinstance(text, str):
        raise InputError(f'{where}: expected "..." or {{"text": "..."}}')
    return text


def context_for(file: ModelFile, instruction: str, texts: Sequence[str]) -> int | None:
    """Positions for the longest text, where that is above what a session has by itself; None: that is enough.

    No text has more tokens than bytes, so most need not be counted.
    """
    longest = max(texts, key=lambda text: len(text.encode("utf-8", "replace")))
    if len((instruction + longest).encode("utf-8", "replace")) + EXTRA <= DEFAULT_CONTEXT:
        return None
    reader, limit = Tokenizer.from_file(file), file.metadata.config.max_position_embeddings
    wanted = min(limit, max(len(reader.encode(instruction + text)) for text in texts))
    return wanted if wanted > DEFAULT_CONTEXT else None
