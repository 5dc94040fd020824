"""What is compiled of a file: its decoder, and what runs beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from edgeq.errors import UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.network.draft_layer import drafting_decoder, drafting_layer, layer_options
from edgeq.runtime.network.policy import expert_graphs, expert_options, reading_decoder
from edgeq.runtime.network.vision import tower_beside
from edgeq.runtime.session.context_size import cache_bytes, choose_context, whole_texts
from edgeq.targets.graph import Graph
from edgeq.targets.requantization import shared_inputs
from edgeq.targets.target import Beside, OnProgress, Options, Program, Target, no_progress

DraftLayer = bool | Literal["auto"]
"""Whether the layer that drafts runs, where a file has one; "auto": unless the target lacks something of it."""


@dataclass(frozen=True)
class CompiledModel:
    """graph     of the decoder, for `context` positions
    program   of it;  drafting: of the layer that drafts, over the same pages and states; None: it does not run
    left_out  why the layer that drafts is not there though the file has it and it was asked for; empty: nothing was left out
    """

    graph: Graph
    context: int
    program: Program
    drafting: Program | None = None
    left_out: str = ""


def compiled(
    file: ModelFile,
    target: Target,
    options: Options,
    context: int | None,
    *,
    requantizes: bool = False,
    draft_layer: DraftLayer = False,
    on_progress: OnProgress = no_progress,
) -> CompiledModel:
    """Errors as of Model.load.

    context      None: min(what the model was made for, 4096, what fits)
    requantizes  weights will be requantized
    """
    draws = partial(_compiled, file, target, options, context, requantizes, on_progress=on_progress)
    if not (draft_layer and file.metadata.config.draft_layers):
        return draws(False)
    try:
        return draws(True)
    except UnsupportedError as error:
        if draft_layer != "auto":
            raise
        return replace(draws(False), left_out=str(error))


def _compiled(
    file: ModelFile,
    target: Target,
    options: Options,
    context: int | None,
    requantizes: bool,
    drafts: bool,
    *,
    on_progress: OnProgress,
) -> CompiledModel:
    metadata = file.metadata
    network = drafting_decoder if drafts else reading_decoder if metadata.config.policy else decoder
    # Its buffers do not depend on the context, only rotary frequencies do.
    graph = network(metadata)
    options, context = whole_texts(metadata.config, options, context)
    if requantizes:
        # Refused here, so that no target compiles first.
        shared_inputs(graph)
    room = target.room(graph, file, options, beside(file, options, graph, drafts))
    limit = metadata.config.max_position_embeddings
    chosen = choose_context(room, partial(cache_bytes, graph, options), limit, context)
    graph = network(metadata, chosen)
    options = replace(options, cache_bytes=cache_bytes(graph, options, chosen))
    program = target.compile(graph, file, options, on_progress)
    if not drafts:
        return CompiledModel(graph, chosen, program)
    layer = drafting_layer(metadata, chosen, graph)
    return CompiledModel(
        graph, chosen, program, target.compile(layer, file, layer_options(program.options), on_progress, beside=program)
    )


def beside(file: ModelFile, options: Options, graph: Graph, drafts: bool) -> list[Beside]:
    """The programs that will surely run beside a decoder of this graph and these options, each with its weights once.

    A policy always sees; the tower of another model is compiled, and its memory asked for, when the first picture comes.
    """
    metadata, found = file.metadata, list[Beside]()
    if drafts:
        found.append(Beside(drafting_layer(metadata, 0, graph), layer_options(options), metadata.draft_bytes()))
    if expert := metadata.config.policy:
        sizes = metadata.policy_bytes(), 0
        given = expert_options(options, expert)
        found += [Beside(each, given, size) for each, size in zip(expert_graphs(metadata, 0, graph), sizes, strict=True)]
        if metadata.config.vision:
            found.append(tower_beside(file, options))
    return found
