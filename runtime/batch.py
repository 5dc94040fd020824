"""Several texts decoded together: one reading of the weights serves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from edgeq.errors import InputError
from edgeq.prompt import Prompt
from edgeq.runtime.arguments import callback, instance, integer, wrong
from edgeq.runtime.decode import Stream, decode_step
from edgeq.runtime.model import Model
from edgeq.runtime.request import Request, check_sampling
from edgeq.runtime.sampling import Logprobs, Processor, Sampling
from edgeq.runtime.session import check_length
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.runtime.stats import Speculation
from edgeq.runtime.stopping import Ending, FinishReason

MOST_SAMPLES = 128


@dataclass
class Answer:
    """One text of a batch.

    index    of its prompt;  sample: which of the texts of that prompt
    tokens   end with the stop token, if one came;  logprobs: theirs, where they were asked for
    """

    index: int
    sample: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
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

    `size` is at most Model.load's `max_logits`: 32 unless another number was given.  Drafts of gamma tokens take the place of
    gamma further texts and get shorter where there is none.  The other arguments are those of Model.generate.
    """

    def __init__(
        self,
        model: Model,
        size: int,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        processors: Sequence[Processor] = (),
        draft: DraftSource = "off",
        gamma: int | None = None,
    ) -> None:
        """InputError: `size` is more than the model was loaded for, or an argument of the wrong type or out of range."""
        instance("model", model, Model, "a Model")
        most = min(model.program.options.max_logits, model.program.options.max_rows)
        if integer("size", size, 1, 1 << 31, f"an integer from 1 to {most}") > most:
            raise InputError(f"a batch of {size}; this model was loaded for 1 to {most}: load it with `max_logits={size}`")
        self._request = Request(
            sampling, max_tokens, stop, stop_tokens, min_tokens, ignore_eos, logprobs, processors, draft, gamma
        )
        self._request.check(model.config.vocab_size)
        self._model, self._size = model, size
        speculator = model.speculator(draft, gamma)
        self._step = speculator.step if speculator else decode_step
        self.measurement = BatchMeasurement(speculation=speculator.statistics if speculator else Speculation())

    def run(
        self,
        prompts: Sequence[str | Sequence[int] | Prompt],
        on_tokens: Callable[[int], None] = lambda tokens: None,
        *,
        n: int = 1,
        sampling: Sequence[Sampling] | None = None,
    ) -> Iterator[Answer]:
        """Answers as they are finished.

        prompts    text, tokens, or with pictures what Model.prompt and Model.chat_prompt give, in any mixture
        on_tokens  called with the number of tokens of each cycle
        n          texts of each prompt, at most 128.  The prompt is run once; the first text is that of its seed, the others
                   have seeds of their own that follow from it
        sampling   one for each prompt, instead of that of the batch.  Each prompt gets the text that it gets alone

        InputError, at the call: a prompt is empty or longer than the context, or an argument of the wrong type or out of range.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise wrong("prompts", prompts, "a list of prompts, each a string or a list of token ids")
        callback("on_tokens", on_tokens)
        integer("n", n, 1, MOST_SAMPLES)
        read = [self._model.prompt(prompt) for prompt in prompts]
        for prompt in read:
            check_length(len(prompt.tokens), self._model.context, visual=prompt.visual_tokens)
        if sampling is None:
            sampling = [self._request.sampling or Sampling.recommended(self._model)] * len(read)
        instance("sampling", sampling, (list, tuple), "a list with a Sampling for each prompt")
        for each in sampling:
            instance("sampling", each, Sampling, "a list with a Sampling for each prompt")
            check_sampling(each, self._model.config.vocab_size)
        if len(sampling) != len(read):
            raise InputError(f"`sampling` has {len(sampling)} entries for {len(read)} prompts; expected one for each")
        return self._run(self._begin(list(zip(read, sampling, strict=True)), n), on_tokens)

    def _run(self, begun: Iterator[_Seat], on_tokens: Callable[[int], None]) -> Iterator[Answer]:
        seats: list[_Seat] = []
        while True:
            while len(seats) < self._size and (seat := next(begun, None)):
                seats.append(seat)
            if not seats:
                return
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

    def _begin(self, prompts: Sequence[tuple[Prompt, Sampling]], n: int) -> Iterator[_Seat]:
        """Seats with the first token of each text, which are made as they are asked for."""
        for index, (prompt, sampling) in enumerate(prompts):
            session = self._model.session()
            before = perf_counter()
            logits = session.prefill(prompt)
            self.measurement.prefill_s += perf_counter() - before
            self.measurement.prompt_tokens += len(prompt.tokens)
            for sample in range(n):
                mine = session if sample == n - 1 else session.fork()
                sampler = self._request.sampler(sampling, self._model.text, len(prompt.tokens), sample)
                stream = Stream(mine, sampler, list(prompt.tokens), top=self._request.logprobs)
                seat = _Seat(Answer(index, sample), stream, self._request.ending(self._model.text))
                stream.draw(logits)
                self._take(seat, stream.tokens[-1:])
                yield seat

    def _take(self, seat: _Seat, tokens: Sequence[int]) -> None:
        drawn = seat.stream.logprobs[-len(tokens) :]
        for i, token in enumerate(tokens):
            seat.answer.tokens.append(token)
            seat.answer.logprobs += drawn[i : i + 1]
            full = i + 1 == len(tokens) and not seat.stream.session.left
            seat.answer.text += seat.ending.push(token, full)
            if seat.ending.reason:
                seat.answer.finish_reason = seat.ending.reason
                seat.stream.session.close()
                return
