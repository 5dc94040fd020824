"""Several texts decoded together: one reading of the weights serves them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from edgeq.errors import InputError
from edgeq.runtime.decode import Stream, decode_step
from edgeq.runtime.model import Model
from edgeq.runtime.sampling import Sampler, Sampling
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.runtime.stats import Speculation
from edgeq.runtime.stopping import Ending, FinishReason


@dataclass
class Answer:
    """One text of a batch.  `index`: of its prompt; `tokens` ends with the stop token, if one came."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class BatchMeasurement:
    """Seconds and tokens of all texts together; prompts run between the cycles of the texts that are already decoding."""

    prefill_s: float = 0.0
    prompt_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    speculation: Speculation = field(default_factory=Speculation)

    @property
    def decode_rate(self) -> float:
        """Tokens per second of all texts together, after the first of each."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass
class _Seat:
    answer: Answer
    stream: Stream
    ending: Ending


class Batch:
    """Answers prompts in their order, at most `size` at a time; the next prompt starts when an answer is finished.

    Model.load's `max_logits` must be at least `size`, and size x (gamma + 1) for drafts of gamma tokens.
    """

    def __init__(
        self,
        model: Model,
        size: int,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        draft: DraftSource = "off",
        gamma: int | None = None,
    ) -> None:
        """InputError: `size` is more than the model was loaded for, or an argument out of range."""
        most = min(model.program.options.max_logits, model.program.options.max_rows)
        if not 1 <= size <= most:
            raise InputError(f"a batch of {size}; this model was loaded for 1 to {most}: load it with a larger max_logits")
        # Made once to refuse wrong values before the first text.
        Ending(model.text, max_tokens, stop)
        self._model, self._size, self._most = model, size, max_tokens
        self._sampling, self._stop = sampling or Sampling(), stop
        speculator = model.speculator(draft, gamma)
        self._step = speculator.step if speculator else decode_step
        self.measurement = BatchMeasurement(speculation=speculator.statistics if speculator else Speculation())

    def run(self, prompts: Sequence[Sequence[int]], on_tokens: Callable[[int], None] = lambda tokens: None) -> Iterator[Answer]:
        """Answers as they are finished.  `prompts` are tokens; `on_tokens` is called with the number of tokens of each cycle.

        InputError: a prompt is empty or longer than the context.
        """
        for prompt in prompts:
            self._model.check_prompt(prompt)
        waiting = deque(enumerate(prompts))
        seats: list[_Seat] = []
        while waiting or seats:
            while waiting and len(seats) < self._size:
                seats.append(self._begin(*waiting.popleft()))
            if going := [seat for seat in seats if seat.answer.finish_reason is None]:
                before = perf_counter()
                emitted = self._step([seat.stream for seat in going], [seat.ending.room for seat in going])
                self.measurement.decode_s += perf_counter() - before
                self.measurement.decode_tokens += sum(map(len, emitted))
                on_tokens(sum(map(len, emitted)))
                for seat, tokens in zip(going, emitted, strict=True):
                    self._take(seat, tokens)
            yield from (seat.answer for seat in seats if seat.answer.finish_reason)
            seats = [seat for seat in seats if seat.answer.finish_reason is None]

    def _begin(self, index: int, prompt: Sequence[int]) -> _Seat:
        """Run a prompt and draw its first token."""
        stream = Stream(self._model.session(), Sampler(self._sampling), list(prompt))
        before = perf_counter()
        logits = stream.session.prefill(prompt)
        self.measurement.prefill_s += perf_counter() - before
        self.measurement.prompt_tokens += len(prompt)
        seat = _Seat(Answer(index), stream, Ending(self._model.text, self._most, self._stop))
        stream.tokens.append(stream.sampler.draw(logits, stream.tokens))
        self._take(seat, stream.tokens[-1:])
        return seat

    def _take(self, seat: _Seat, tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens):
            seat.answer.tokens.append(token)
            full = i + 1 == len(tokens) and not seat.stream.session.left
            seat.answer.text += seat.ending.push(token, full)
            if seat.ending.reason:
                seat.answer.finish_reason = seat.ending.reason
                return
