"""The beginning of a generation: what can be checked before anything runs."""

from __future__ import annotations

from typing import Protocol

from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.pictures.prompt import Prompt
from edgeq.runtime.answers.constraint import Constraints
from edgeq.runtime.arguments import callback, instance
from edgeq.runtime.decode import PlainStepper, Stepper, Stream
from edgeq.runtime.generation import Generation
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import Sampling
from edgeq.runtime.session.context_size import check_length
from edgeq.runtime.session.session import OnPrompt, Session
from edgeq.runtime.speculative.speculator import DraftSource, Speculator
from edgeq.runtime.stats import Measurement
from edgeq.text.tokenizer import Tokenizer


class GenerationHost(Protocol):
    """What starting a generation asks of a Model."""

    file: ModelFile
    config: ModelConfig
    constraints: Constraints
    context: int
    load_s: float

    @property
    def text(self) -> Tokenizer: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def position_bytes(self) -> int: ...

    def session(self) -> Session: ...

    def speculator(self, draft: DraftSource, gamma: int | None) -> Speculator | None: ...


def start(
    model: GenerationHost,
    prompt: Prompt,
    request: Request,
    session: Session | None,
    on_progress: OnPrompt | None,
    started: float,
) -> Generation:
    """A generation that was asked for at `started`.  InputError: an argument of Model.generate that cannot be had."""
    request = request.compiled(model.constraints.compile, model.text)
    request.check(model.config.vocab_size)
    check_length(len(prompt.tokens), model.context, visual=prompt.visual_tokens)
    instance("session", session, (Session, type(None)), "a Session, or None")
    callback("on_progress", on_progress)
    stepper: Stepper = model.speculator(request.draft, request.gamma) or PlainStepper()
    measurement = Measurement.of(prompt, model.load_s, model.weight_bytes, model.position_bytes, stepper.statistics)
    sampling = request.sampling or Sampling.recommended(model)
    sampler = request.sampler(sampling, model.text, len(prompt.tokens), model.context)
    stream = Stream(session or model.session(), sampler, list(prompt.tokens), top=request.logprobs, keeps=session is not None)
    ending = request.ending(model.text)
    calls, read = request.reader(model.text, prompt.tokens, sampler.sampling), model.config.positions_read
    return Generation(
        stream,
        prompt,
        ending,
        stepper,
        measurement=measurement,
        positions_read=read,
        started=started,
        on_progress=on_progress,
        reader=calls,
    )
