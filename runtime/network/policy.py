"""A policy: what a decoder has read of pictures and a text, and the state of a robot, become actions (π0: Black et al. 2024,
arXiv 2410.24164).

The decoder runs once, for its keys and values.  The expert, a second list of operations over the same cache layers, runs over
a row for the state, which sees those and itself, and then, in every step of Euler's method from noise at time 1 to actions at
time 0, over a row for each action, which see all of them, the state, and each other.  The keys and values of the state are the
same in every step; those of actions are overwritten by the next one.

Where its layers have masters, the first step of each call is what a prompt is to test-time requantization
(runtime/session/requantize.py): it runs with the masters, the squares of what its rows read are summed, and the other steps run
with the weights that are rounded for these sums.  Nothing of an earlier call is used, so that the same observation and noise
give the same actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.format.metadata import Metadata
from edgeq.network.config import ModelConfig
from edgeq.network.policy_stack import MAX_STEPS, PolicyStack
from edgeq.pictures.prompt import Prompt, with_pictures
from edgeq.runtime.arguments import integer, wrong
from edgeq.runtime.network.block_parts import norm
from edgeq.runtime.network.decoder import attention_block, buffer_widths, decoder, mlp_block
from edgeq.runtime.network.pictures import ImageSource, Pictures
from edgeq.runtime.sampling import NOT_FINITE
from edgeq.runtime.session.context_size import check_length
from edgeq.runtime.session.requantize import Requantization, SessionRequantizer
from edgeq.runtime.session.session import Session
from edgeq.targets.capabilities import Requantizable
from edgeq.targets.graph import Activate, CacheWrite, Graph, InjectVectors, Linear, Operation, Select
from edgeq.targets.rows import Rows
from edgeq.targets.target import OnProgress, Options, Program, Target, no_progress
from edgeq.text.tokenizer import Tokenizer

Actions = NDArray[np.float32]


def reading_decoder(metadata: Metadata, context: int = 0) -> Graph:
    """The graph of a policy's decoder up to its last keys and values, of which nothing but these is needed."""
    graph = decoder(metadata, context, all_rows=True)
    buffers = {name: width for name, width in graph.buffers.items() if name != graph.result}
    return replace(graph, buffers=buffers, operations=until_last_keys(graph.operations), result="x")


def until_last_keys(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Up to the last keys and values; the residual stream, as it is there, is the result."""
    last = max(i for i, o in enumerate(operations) if isinstance(o, CacheWrite))
    return *operations[: last + 1], Select(-1, ("x",))


def of_state(metadata: Metadata, expert: PolicyStack, context: int, beside: Graph) -> Graph:
    """The graph of the row that brings the state: its keys and values."""
    operations = (
        InjectVectors(-1, "state"),
        Linear(-1, "state", metadata.linears[f"{expert.prefix}state_in"], "x"),
        *layers(metadata, expert, context),
    )
    buffers = buffer_widths(expert) | {"state": expert.state_size}
    return replace(beside, buffers=buffers, operations=until_last_keys(operations), result="x")


def of_actions(metadata: Metadata, expert: PolicyStack, context: int, beside: Graph) -> Graph:
    """The graph of the rows that bring an action each, and the sines and cosines of the time: how they change with it."""
    linears, p, hidden = metadata.linears, expert.prefix, expert.hidden_size
    operations = (
        InjectVectors(-1, "action"),
        InjectVectors(-1, "time", expert.action_size),
        Linear(-1, "action", linears[f"{p}action_in"], "x"),
        Linear(-1, "x", linears[f"{p}time_action"], "joined"),
        Linear(-1, "time", linears[f"{p}time_in"], "joined", add=True),
        Activate(-1, "joined", hidden, "mixed", "silu", gated=False),
        Linear(-1, "mixed", linears[f"{p}time_out"], "x"),
        *layers(metadata, expert, context),
        norm(metadata, expert, -1, "x", f"{p}norm", "normed"),
        Select(-1, ("normed",)),
        Linear(-1, "normed", linears[f"{p}action_out"], "velocity"),
    )
    wide = dict.fromkeys(("time", "joined", "mixed"), hidden) | dict.fromkeys(("action", "velocity"), expert.action_size)
    return replace(beside, buffers=buffer_widths(expert) | wide, operations=operations, result="velocity")


def expert_graphs(metadata: Metadata, context: int, beside: Graph) -> tuple[Graph, Graph]:
    """The graph of the row that brings the state and that of the rows that bring actions, over the cache of `beside`."""
    expert = check_acts(metadata.config)
    return of_state(metadata, expert, context, beside), of_actions(metadata, expert, context, beside)


def expert_options(options: Options, expert: PolicyStack) -> Options:
    """What an expert is compiled for beside a program of these options: a run has a row for each action."""
    return replace(options, max_rows=expert.actions, max_logits=expert.actions, cache_bytes=0)


def layers(metadata: Metadata, expert: PolicyStack, context: int) -> Iterator[Operation]:
    for layer in range(expert.num_hidden_layers):
        yield from attention_block(metadata, expert, layer, context, cache=layer, span=0)
        yield from mlp_block(metadata, expert, layer)


def check_acts(config: ModelConfig) -> PolicyStack:
    """InputError: the model makes no actions."""
    if config.policy is None:
        raise InputError(f"this model ({config.model_type}) makes no actions: it is no policy; use edgeq run or Model.generate")
    return config.policy


class Policy:
    """The compiled expert of a file, beside the program of its decoder."""

    def __init__(
        self,
        file: ModelFile,
        target: Target,
        program: Program,
        graph: Graph,
        context: int,
        *,
        requantization: Requantization | None = None,
        on_progress: OnProgress = no_progress,
    ) -> None:
        """requantization   of the expert's layers, where they have masters; None: they run with the weights of the file"""
        self.expert, self._context = check_acts(file.metadata.config), context
        options = expert_options(program.options, self.expert)
        of_the_state, of_the_actions = expert_graphs(file.metadata, context, graph)
        self._state = target.compile(of_the_state, file, options, on_progress, beside=program)
        # Its layers have the weights of those that the state passes.
        self._actions = target.compile(of_the_actions, file, options, on_progress, beside=self._state)
        self._requantizer: SessionRequantizer | None = None
        names = (layer.name for layer in file.metadata.linears.values() if layer.master)
        if requantization and any(name.startswith(self.expert.prefix) for name in names):
            # The lock of the model is held while it is used.
            self._requantizer = SessionRequantizer(cast(Requantizable, self._actions), requantization, Lock())

    def act(self, session: Session, prompt: Prompt, state: Actions, noise: Actions, steps: int) -> Actions:
        """The actions float32 [actions, action_size] after `prompt`, which an empty `session` reads.

        state   float32 [state_size];  noise: float32 [actions, action_size]
        """
        count, length = self.expert.actions, len(prompt.tokens)
        check_length(length + 1 + count, self._context, visual=prompt.visual_tokens)
        session.prefill(prompt)
        with session.lock:
            session.reserve(1 + count)
            self.read_state(session, length, state)
            actions = noise.copy()
            for step in range(steps):
                first = step == 0
                actions -= self.velocity(session, length + 1, actions, 1 - step / steps, summing=first) / np.float32(steps)
                if first and steps > 1 and self._requantizer:
                    self._requantizer.update()
        if not np.isfinite(actions).all():
            raise InputError(NOT_FINITE.replace("logits", "actions"))
        return actions

    def read_state(self, session: Session, slot: int, state: Actions) -> None:
        """Run the row of the state, with the masters where weights are requantized: it comes before what they are made for."""
        rows = self._rows(session, slot, state[None])
        if self._requantizer is None:
            self._state.run(rows)
        else:
            program = cast(Requantizable, self._state)
            program.run_summing(rows, program.new_sums())

    def velocity(self, session: Session, first: int, actions: Actions, time: float, *, summing: bool = False) -> Actions:
        """How `actions` at `time`, whose rows begin at slot `first`, after that of the state, change with it.

        summing   begin new sums with what these rows read; else the weights are those requantized for the last ones
        """
        turned = np.broadcast_to(self.expert.angles(time), (len(actions), self.expert.hidden_size))
        rows = self._rows(session, first, np.concatenate([actions, turned], axis=1))
        if self._requantizer is None:
            return self._actions.run(rows)
        if summing:
            self._requantizer.reset()
        return self._requantizer.run(rows, None, summing)

    def _rows(self, session: Session, first: int, vectors: NDArray[np.float32]) -> Rows:
        """Rows from slot `first` on that bring `vectors`, and see each other and all before them."""
        count = len(vectors)
        slots = np.arange(first, first + count, dtype=np.int32)
        spans = np.stack([np.zeros(count, np.int32), np.full(count, first + count, np.int32)])[None]
        return Rows(
            tokens=np.zeros(count, np.int32),
            positions=slots[None],
            slots=slots,
            sessions=np.zeros(count, np.int32),
            pages=[session.pages],
            wanted=np.arange(count, dtype=np.int32),
            vectors=np.ascontiguousarray(vectors, np.float32),
            vector_of=np.arange(count, dtype=np.int32),
            spans=spans,
        )


def prompt_of(text: str, images: Sequence[ImageSource], pictures: Pictures, tokenizer: Tokenizer) -> Prompt:
    """The pictures of all cameras, then the beginning of a text, `text` and a line end.

    InputError: no picture, or one that cannot be read or is not as wide as high: a policy was trained on such.
    """
    found = pictures.read_all(images)
    if not found or not isinstance(text, str):
        raise wrong("images" if not found else "text", images if not found else text, "a picture of each camera, and a text")
    for picture in found:
        if picture.size[0] != picture.size[1]:
            raise InputError(f"a picture of {picture.name} pixels; a policy takes pictures as wide as high: cut or pad it")
    image = pictures.vision.image_token_id
    tokens = [*tokenizer.encode_part(tokenizer.special_tokens.get("bos_token", "")), *tokenizer.encode_plain(f"{text}\n")]
    if image in tokens:
        raise wrong("text", text, "one without the padding token")
    return with_pictures([*[image] * len(found), *tokens], found, pictures.vision, lambda text: [])


def checked_steps(steps: int | None, expert: PolicyStack) -> int:
    return expert.steps if steps is None else integer("steps", steps, 1, MAX_STEPS)


def state_of(given: Any, expert: PolicyStack) -> Actions:
    """What the policy reads of a state, float32 [state_size]; a shorter one goes on with zeros, as such policies were trained.

    InputError: not finite numbers, more of them than the policy reads, or not as many as the file has statistics of.
    """
    known, size = len(expert.state_mean), expert.state_size
    wanted = f"{known} finite numbers, as many as the file has statistics of" if known else f"1 to {size} finite numbers"
    try:
        found = np.asarray(given, np.float32)
    except (TypeError, ValueError):
        raise wrong("state", given, wanted) from None
    if found.ndim != 1 or not 0 < len(found) <= size or len(found) != (known or len(found)) or not np.isfinite(found).all():
        raise wrong("state", given, wanted)
    with np.errstate(over="ignore"):
        read = expert.read_state(found)
    return np.concatenate([read, np.zeros(size - len(read), np.float32)])
