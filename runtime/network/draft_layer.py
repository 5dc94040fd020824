"""The layer that drafts tokens (multi-token prediction): how it runs beside a decoder, and alone to draft.

Of the token at slot t and the decoder's state h of the slot before, after the last norm, it makes the logits of the token after
it:  x = embedding(norm(table[token])) + hidden(norm(h)), a layer of the decoder's kind with a cache layer of its own, a norm,
the decoder's head (DeepSeek-V3, arXiv 2412.19437, section 2.2).  What its own norm gives stands for h when it drafts on.  Of a
large vocabulary it reads the head's rows of the tokens that texts have most, and drafts no others: what it gives is verified.

Beside the decoder only its keys and values are computed, of all rows; h of the last one is kept in a state, so that sessions go
on from there, rewind, fork and are saved as those of any model.  Slot 0, whose token has no state before it, is seen by no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeq.format.container import ModelFile
from edgeq.format.metadata import Metadata
from edgeq.network.config import ModelConfig
from edgeq.network.draft_stack import DraftStack
from edgeq.runtime.network.block_parts import norm
from edgeq.runtime.network.decoder import attention_block, buffer_widths, cache_of, decoder, embedding, mlp_block
from edgeq.targets.family_operations import RowBefore
from edgeq.targets.graph import CacheWrite, Graph, HeadNorm, Linear, Operation, RmsNorm, RopeRotate, Select
from edgeq.targets.rows import Rows
from edgeq.targets.states import StateSpec
from edgeq.targets.target import Options, Program

BEFORE, TOKEN = "hidden before", "token"
"""The buffers of the decoder's state of the slot before, and of the token's embedding after its norm."""
NEVER = float(np.finfo(np.float32).min)
"""The logit of a token that is not drafted: finite, since an infinite one tells of unsound weights, and of probability 0."""


def draft_stack(metadata: Metadata) -> DraftStack:
    draft = metadata.config.draft
    assert draft is not None
    return draft


def drafting_decoder(metadata: Metadata, context: int = 0) -> Graph:
    """The graph of a decoder, beside which the layer that drafts writes its keys and values."""
    graph, draft, width = decoder(metadata, context, all_rows=True), draft_stack(metadata), metadata.config.hidden_size
    at = next(i for i, o in enumerate(graph.operations) if isinstance(o, Select))
    _, last_norm, head, *cap = graph.operations[at:]
    assert isinstance(last_norm, RmsNorm) and isinstance(head, Linear)
    # The embedding is there once: a table that stays in the file is read before the run.
    begin = len([*embedding(metadata)])
    operations: list[Operation] = [*graph.operations[:begin], embedding_norm(metadata, draft), *graph.operations[begin:at]]
    operations += [replace(last_norm, out="hidden"), RowBefore(-1, "hidden", width, BEFORE, len(graph.states))]
    operations += joined(metadata, draft)
    operations += keys_and_values(attention_block(metadata, draft, 0, context, cache=len(graph.cache)))
    operations += [Select(-1, ("hidden",)), replace(head, x="hidden"), *cap]
    return replace(
        graph,
        buffers=graph.buffers | {"hidden": width, BEFORE: width, TOKEN: width},
        operations=tuple(operations),
        cache=(*graph.cache, cache_of(draft, 0)),
        states=(*graph.states, StateSpec("tail", (1, width))),
    )


def drafting_layer(metadata: Metadata, context: int, beside: Graph) -> Graph:
    """The graph of the layer alone, over pages and states of `beside`; its rows have a span: from slot 1 to their own."""
    draft, width, state = draft_stack(metadata), metadata.config.hidden_size, len(beside.states) - 1
    at = next(i for i, o in enumerate(beside.operations) if isinstance(o, Select))
    _, head, *cap = beside.operations[at:]
    assert isinstance(head, Linear)
    operations: list[Operation] = [*embedding(metadata), embedding_norm(metadata, draft)]
    operations += [RowBefore(-1, BEFORE, width, BEFORE, state, keeps=False), *joined(metadata, draft)]
    operations += attention_block(metadata, draft, 0, context, cache=len(beside.cache) - 1, span=0)
    operations += mlp_block(metadata, draft, 0)
    operations.append(norm(metadata, draft, -1, "x", f"{draft.prefix}norm", "normed"))
    # What was before is not read any more.
    operations.append(RowBefore(-1, "normed", width, BEFORE, state))
    operations += [Select(-1, ("normed",)), *heads(metadata, replace(head, x="normed")), *cap]
    drafted = sum(end - begin for begin, end in runs(metadata.config))
    buffers = buffer_widths(draft) | {BEFORE: width, TOKEN: width, "logits": drafted}
    return replace(beside, buffers=buffers, operations=tuple(operations))


def runs(config: ModelConfig) -> list[tuple[int, int]]:
    """Begin and end of the runs of tokens that are drafted, whose logits follow one after another."""
    bounds = config.draft_tokens or (0, config.vocab_size)
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def heads(metadata: Metadata, head: Linear) -> Iterator[Linear]:
    """The rows of the head of the tokens that are drafted."""
    if not metadata.config.draft_tokens:
        yield head
        return
    at = 0
    for begin, end in runs(metadata.config):
        yield replace(head, linear=head.linear.part(begin, end), offset=at)
        at += end - begin


def drafted_logits(program: Program, config: ModelConfig, rows: Rows) -> NDArray[np.float32]:
    """A copy of what the layer gives for rows: float32 [rows, vocabulary], NEVER where a token is not drafted."""
    logits = program.run(rows)
    if not config.draft_tokens:
        return logits.copy()
    found, at = np.full((len(logits), config.vocab_size), NEVER, np.float32), 0
    for begin, end in runs(config):
        found[:, begin:end] = logits[:, at : at + end - begin]
        at += end - begin
    return found


def embedding_norm(metadata: Metadata, draft: DraftStack) -> Operation:
    """token = norm(table[token]), from x."""
    return norm(metadata, draft, 0, "x", f"{draft.prefix}embedding_norm", TOKEN)


def joined(metadata: Metadata, draft: DraftStack) -> Iterator[Operation]:
    """x = embedding(norm(table[token])) + hidden(norm(the state before))."""
    linears, p = metadata.linears, draft.prefix
    yield Linear(0, TOKEN, linears[f"{p}embedding"], "x")
    yield norm(metadata, draft, 0, BEFORE, f"{p}hidden_norm", "normed")
    yield Linear(0, "normed", linears[f"{p}hidden"], "x", add=True)


def keys_and_values(block: Iterator[Operation]) -> Iterator[Operation]:
    """What a block of attention does until its keys and values are in the cache, but for its queries, which begin a row."""
    for operation in block:
        if isinstance(operation, (HeadNorm, RopeRotate)) and operation.offset == 0:
            continue
        yield operation
        if isinstance(operation, CacheWrite):
            return


def layer_options(options: Options) -> Options:
    """What the layer alone is compiled for beside a program of these options: a run has a row of every session that drafts."""
    return replace(options, max_rows=options.max_logits, cache_bytes=0, graphs=False)


def no_layer(file: ModelFile) -> str:
    """Why a model of `file` that was loaded without its layer that drafts cannot draft by it."""
    if file.metadata.config.draft_layers:
        return "the model runs without its layer that drafts; load it with `draft_layer=True`"
    return (
        f"{file.path.name} has no layer that drafts (multi-token prediction: mtp.* in checkpoints of Qwen3.5); "
        "choose `draft=lookup`"
    )
