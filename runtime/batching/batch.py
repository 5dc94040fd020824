"""Several texts decoded together: one reading of the weights serves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from edgeq.errors import InputError
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.answers.response_format import ResponseFormat
from edgeq.runtime.answers.stopping import FinishReason
from edgeq.runtime.arguments import callback, instance, integer, wrong
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.model import Model
from edgeq.runtime.network.embedding import check_continues
from edgeq.runtime.request import Request, check_sampling
from edgeq.runtime.sampling import Logprobs, Processor, Sampling
from edgeq.runtime.session.context_size import check_length
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.runtime.stats import Speculation

MAX_SAMPLES = 128


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
    """Seconds and tokens of all texts together.

    prefill_s   of the runs with tokens of prompts; what other texts decoded in them is not in decode_tokens
    """

    prefill_s: float = 0.0
    prompt_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    speculation: Speculation = field(default_factory=Speculation)

    @property
    def decode_rate(self) -> float:
        """Tokens per second of all texts together, while no prompt was read."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0


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
        response_format: ResponseFormat | None = None,
    ) -> None:
        """InputError: `size` is more than the model was loaded for, an argument of the wrong type or out of range, or a grammar
        that cannot be used.  UnsupportedError: llguidance is not installed.
        """
        instance("model", model, Model, "a Model")
        check_continues(model.file)
        most = min(model.program.options.max_logits, model.program.options.max_rows)
        if integer("size", size, 1, 1 << 31, f"an integer from 1 to {most}") > most:
            raise InputError(f"a batch of {size}; this model was loaded for 1 to {most}: load it with `max_logits={size}`")
        self._request = Request(
            sampling, max_tokens, stop, stop_tokens, min_tokens, ignore_eos, logprobs, processors, draft, gamma, response_format
        ).compiled(model.constraints.compile, model.text)
        self._request.check(model.config.vocab_size)
        self._model, self._size = model, size
        self._speculator = model.speculator(draft, gamma)
        self.measurement = BatchMeasurement(speculation=self._speculator.statistics if self._speculator else Speculation())

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
        integer("n", n, 1, MAX_SAMPLES)
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
        jobs = [Job(prompt, self._request, drawn, n) for prompt, drawn in zip(read, sampling, strict=True)]
        return self._run(jobs, on_tokens)

    def _run(self, jobs: Sequence[Job], on_tokens: Callable[[int], None]) -> Iterator[Answer]:
        scheduler, m = Scheduler(self._model, self._size, speculator=self._speculator), self.measurement
        indices = {scheduler.submit(job): index for index, job in enumerate(jobs)}
        answers: dict[tuple[int, int], Answer] = {}
        while scheduler.busy:
            updates, last = scheduler.step(), scheduler.last
            m.prompt_tokens += last.prompt_tokens
            if last.prompt_tokens:
                m.prefill_s += last.seconds
            else:
                m.decode_s += last.seconds
                m.decode_tokens += last.decode_tokens
            on_tokens(sum(len(update.pieces) for update in updates))
            for update in updates:
                if update.error:
                    raise update.error
                key = indices[update.ticket], update.sample
                answer = answers.setdefault(key, Answer(*key))
                answer.tokens += [piece.token for piece in update.pieces]
                answer.text += "".join(piece.text for piece in update.pieces)
                answer.logprobs += update.logprobs
                answer.finish_reason = update.reason
                if update.reason:
                    yield answers.pop(key)
