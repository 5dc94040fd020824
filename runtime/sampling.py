"""From logits to the next token.

In this order: repetition penalty, presence and frequency penalty, DRY, logit bias, stop tokens that must not come yet,
processors, tokens that the grammar does not have, temperature, top-k, top-p, min-p, draw.  With temperature 0 the most probable
token after the grammar is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import FormatError, InputError
from edgeq.format.container import ModelFile
from edgeq.network.generation import SAMPLING
from edgeq.runtime.answers.constraint import Matcher
from edgeq.runtime.answers.repetition import Breakers, goes_round, penalties
from edgeq.runtime.answers.thinking import AfterThinking
from edgeq.runtime.arguments import instance, integer, real, wrong
from edgeq.runtime.uniforms import Uniforms
from edgeq.targets.capabilities import Draw, Largest

ArrayF64 = NDArray[np.float64]
RUN = 64
"""Scores of which only the largest is looked at first."""
NOT_FINITE = "the model gives logits that are not finite; check its file with: edgeq inspect --verify"
MAX_BIASES = 1024
"""Tokens with a bias of their own; as many as OpenAI's interface takes in practice."""
Candidates = tuple[NDArray[np.int64], ArrayF64]
"""Tokens and their probabilities, which sum to 1."""
Processor = Callable[[Sequence[int], NDArray[np.float32]], Any]
"""(tokens so far, logits float32 [vocab]) -> logits [vocab]; -inf bans a token.  It must depend on its arguments alone: with
drafts it is also called for texts that are not kept."""
RECOMMENDED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "seed": "seed",
}
"""Field of Sampling: key in the file, as Hugging Face's generation_config.json has it."""
DRAWN = ("temperature", "top_k", "top_p", "min_p")
"""Fields that say how much chance there is; a file that has one of them recommends how to draw."""
CHAT = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""How chats are drawn where the file recommends nothing: greedy small models loop, and at temperature 1 write word salad."""
CHAT_DRY = 0.8
"""DRY multiplier of chats, whatever the file recommends; as text-generation-webui and llama.cpp suggest."""


class HasFile(Protocol):
    """What has a model file: a Model."""

    file: ModelFile


@dataclass(frozen=True, repr=False)
class Sampling:
    """How tokens are drawn.  InputError if a value is of the wrong type or out of range.

    temperature        0: always the most probable token (greedy); to 100
    top_k              keep the k most probable tokens; 0: all
    top_p              keep the smallest set of most probable tokens with this mass (Holtzman et al. 2019, arXiv 1904.09751)
    min_p              keep tokens at least this share as probable as the best one (Nguyen et al. 2024, arXiv 2407.01082)
    repeat_penalty     of tokens in prompt and text (CTRL, Keskar et al. 2019, arXiv 1909.05858); 0.1 to 10, 1: none
    presence_penalty   taken from the logit of every token that the text has, the prompt not counted; -2 to 2, as OpenAI's
    frequency_penalty  the same, times how often the text has the token; -2 to 2
    dry_multiplier     of the penalty of tokens that go on with a repetition of four tokens or more (DRY,
                       runtime/answers/repetition.py); 0: none, to 100
    logit_bias         added to the logits of these tokens, by token id; -100 to 100, at most 1024
    seed               same seed, same tokens; None: a new one each time
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = 0

    def __post_init__(self) -> None:
        for key, (least, most, expected) in SAMPLING.items():
            name = next(name for name, stored in RECOMMENDED.items() if stored == key)
            value = getattr(self, name)
            if key == "top_k":
                integer(name, value, int(least), int(most), expected)
            elif key != "temperature" or real(name, value, 0, most, expected) != 0:
                real(name, value, least, most, expected)
        real("presence_penalty", self.presence_penalty, -2, 2)
        real("frequency_penalty", self.frequency_penalty, -2, 2)
        real("dry_multiplier", self.dry_multiplier, 0, 100)
        instance("logit_bias", self.logit_bias, Mapping, "a dict of biases by token id")
        if len(self.logit_bias) > MAX_BIASES:
            raise wrong("logit_bias", f"{len(self.logit_bias)} tokens", f"at most {MAX_BIASES}")
        for token, bias in self.logit_bias.items():
            integer("logit_bias", token, 0, (1 << 31) - 1, "token ids as keys")
            real("logit_bias", bias, -100, 100)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed is not None:
            integer("seed", self.seed, 0, (1 << 64) - 1, "an integer from 0 to 2**64 - 1, or None")

    def __repr__(self) -> str:
        """The values that are not the defaults."""
        given = (
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != getattr(_GREEDY, f.name)
        )
        return f"Sampling({', '.join(given)})"

    @classmethod
    def recommended(cls, model: HasFile, chat: bool = False, **values: Any) -> Sampling:
        """What the file of `model` recommends, but for `values`; greedy with seed 0 where it recommends nothing.

        chat   where the file says nothing of how to draw: temperature 0.7, top_p 0.95, min_p 0.05; and a dry_multiplier of 0.8

        The Python interface uses it where no sampling is given, and the command line for the options that are not.

        InputError: a value that cannot be used.  FormatError: a recommendation that cannot be used.
        """
        stored = model.file.metadata.generation
        found: dict[str, Any] = {
            name: stored[key] for name, key in RECOMMENDED.items() if name not in values and stored.get(key) is not None
        }
        try:
            cls(**found)
        except InputError as error:
            raise FormatError(f"{model.file.path}: its sampling defaults cannot be used: {error}") from None
        if chat:
            usual = CHAT if all(stored.get(name) is None for name in DRAWN) else {}
            found = {**usual, "dry_multiplier": CHAT_DRY, **found}
        return cls(**{**found, **values})

    @property
    def changes_logits(self) -> bool:
        """Whether the most probable token can be another one than that of the logits, also where no text repeats."""
        return bool(self.repeat_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)


_GREEDY = Sampling()


@dataclass(frozen=True)
class Rules:
    """What holds for the logits of one text beside its Sampling.

    start       tokens of the prompt, which presence, frequency and repetitions do not count
    ends        tokens that end the text: they must not come among its first `min_tokens`
    processors  applied one after another
    matcher     follows the text through the grammar that it is held to
    breakers    tokens that end a repetition; None: none does
    """

    start: int = 0
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()
    processors: tuple[Processor, ...] = ()
    matcher: Matcher | AfterThinking | None = None
    breakers: Breakers | None = None


NO_RULES = Rules()
CERTAIN = 1e4
"""Added to a logit, far above all others, it makes its token the one that comes."""


class Logprobs(NamedTuple):
    """Natural logarithms of the probabilities that the model itself gives: log-softmax of its logits, before anything of
    Sampling changes them, as OpenAI's interface has them.

    top   the most probable tokens, best first, and theirs
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def candidates(logits: NDArray[np.float32], sampling: Sampling, history: Sequence[int], rules: Rules = NO_RULES) -> Candidates:
    """Tokens that may be drawn.

    After top_k or top_p the most probable comes first, equals in order of their ids; else all are in order of their ids.

    FormatError: logits that are not finite, which sound weights do not give.  InputError: a processor's result cannot be used,
    or no token may come.
    """
    best = int(logits.argmax())
    # argmax and min both return NaN if there is one.
    if not (math.isfinite(logits[best]) and math.isfinite(logits.min())):
        raise FormatError(NOT_FINITE)
    early, repeated = len(history) - rules.start < rules.min_tokens, repetitions(sampling, history, rules)
    changes = bool(sampling.changes_logits or repeated)
    bans, unchanged = early or rules.processors or rules.matcher, not (early or rules.processors or changes)
    allowed = rules.matcher.allowed(history) if rules.matcher else None
    if sampling.temperature == 0 and unchanged and (allowed is None or allowed[best]):
        return certain(best)
    tokens = np.arange(len(logits)) if allowed is None or not unchanged else np.flatnonzero(allowed)
    # Often a grammar has few tokens: what it has not is left out before anything is computed.
    scores = logits.astype(np.float64) if len(tokens) == len(logits) else logits[tokens].astype(np.float64)
    if changes:
        _penalize(scores, sampling, history, rules.start, repeated)
    if early and rules.ends:
        scores[[token for token in rules.ends if token < len(scores)]] = -np.inf
    for processor in rules.processors:
        scores = _processed(scores, processor, history)
    if allowed is not None and not unchanged:
        scores[~allowed] = -np.inf
    if bans and (not len(scores) or scores.max() == -np.inf):
        raise InputError("no token can come here: what the grammar has, `min_tokens` or a processor bans")
    if sampling.temperature == 0:
        return certain(int(tokens[np.argmax(scores)]))
    if bans and not unchanged:
        tokens = np.flatnonzero(scores > -np.inf)
        scores = scores[tokens]
    if sampling.top_k:
        likely = np.flatnonzero(scores >= _largest(scores, min(sampling.top_k, len(scores))))
        likely = likely[np.argsort(-scores[likely], kind="stable")[: sampling.top_k]]
        tokens, scores = tokens[likely], scores[likely]
    return _probable(tokens, scores, sampling)


def repetitions(sampling: Sampling, history: Sequence[int], rules: Rules) -> dict[int, float]:
    """What tokens lose that would go on with a repetition, and below 0 what those gain that end a text which goes round."""
    if not sampling.dry_multiplier:
        return {}
    text = history[rules.start :]
    found = penalties(text, sampling.dry_multiplier, rules.breakers)
    if rules.ends and rules.breakers and goes_round(text, rules.breakers):
        found |= dict.fromkeys(rules.ends, -CERTAIN)
    return found


def needed(sampling: Sampling, history: Sequence[int] = (), rules: Rules = NO_RULES) -> int:
    """The largest logits that the draw after `history` needs; 0: all, as it changes them or has no top_k."""
    found = _needed_of_any(sampling, rules)
    return 0 if found and repetitions(sampling, history, rules) else found


def _needed_of_any(sampling: Sampling, rules: Rules) -> int:
    """As `needed`, after a history that repeats nothing."""
    if sampling.changes_logits or rules.min_tokens or rules.processors or rules.matcher:
        return 0
    return sampling.top_k if sampling.temperature else 1


def _probable(tokens: NDArray[np.int64], scores: ArrayF64, sampling: Sampling) -> Candidates:
    """Temperature, top_p and min_p, in place of `scores`; with top_k the tokens are those, in order."""
    # The maximum is taken away first, so that a tiny temperature does not overflow.  In place, here and below: with 128,000
    # tokens the system takes longer to give a new array than the sums take.
    scores -= scores.max()
    scores /= sampling.temperature
    np.exp(scores, out=scores)
    total = float(scores.sum())
    assert math.isfinite(total)
    scores /= total
    probabilities = scores
    if sampling.top_p < 1:
        # Tokens below (1 - top_p) / n weigh less than 1 - top_p together, so the set lies among the others: sort only those.
        # Half of it keeps the argument true when sums are rounded.
        likely = (probabilities >= (1 - sampling.top_p) / (2 * len(probabilities))).nonzero()[0]
        tokens, probabilities = tokens[likely], probabilities[likely]
        if not sampling.top_k:
            order = np.argsort(-probabilities, kind="stable")
            tokens, probabilities = tokens[order], probabilities[order]
        count = int(probabilities.cumsum().searchsorted(sampling.top_p)) + 1
        tokens, probabilities = tokens[:count], probabilities[:count]
    if sampling.min_p > 0:
        likely = probabilities >= sampling.min_p * probabilities.max()
        tokens, probabilities = tokens[likely], probabilities[likely]
    probabilities /= probabilities.sum()
    return tokens, probabilities


def distribution(
    logits: NDArray[np.float32],
    sampling: Sampling,
    history: Sequence[int] = (),
    rules: Rules = NO_RULES,
) -> ArrayF64:
    """Probability of each next token, float64 [vocab]; greedy gives all to one.  `history`: prompt and generated tokens."""
    tokens, probabilities = candidates(logits, sampling, history, rules)
    result = np.zeros(len(logits))
    result[tokens] = probabilities
    return result


def certain(token: int) -> Candidates:
    """One token with probability 1."""
    return np.array([token], np.int64), np.ones(1)


class Sampler:
    """Draws one token after another.  `sample`: as of Uniforms."""

    def __init__(self, sampling: Sampling, rules: Rules = NO_RULES, sample: int = 0) -> None:
        self.sampling, self.rules = sampling, rules
        self._uniforms = Uniforms(sampling.seed, sample)
        self._needed = _needed_of_any(sampling, rules)

    def needed(self, history: Sequence[int]) -> int:
        """The largest logits that the draw after `history` needs; 0: all."""
        # Between two tokens a GPU may wait for this.
        return needed(self.sampling, history, self.rules) if self.sampling.dry_multiplier else self._needed

    def candidates(self, logits: NDArray[np.float32], history: Sequence[int]) -> Candidates:
        return candidates(logits, self.sampling, history, self.rules)

    def uniform(self) -> float:
        """From 0 to, and without, 1."""
        return self._uniforms.take()

    def coming(self) -> Draw:
        """How the next two tokens are drawn, without drawing them."""
        s = self.sampling
        return Draw(s.temperature, s.top_k, s.top_p, s.min_p, self._uniforms.coming()) if s.temperature else Draw()

    def pick(self, among: Candidates) -> int:
        """One of the candidates, by their probabilities."""
        tokens, probabilities = among
        at = int(probabilities.cumsum().searchsorted(self.uniform(), side="right"))
        return int(tokens[min(at, len(tokens) - 1)])

    def draw_among(self, largest: Largest, row: int) -> int:
        """The next token, from the `needed` largest logits of that row.  FormatError: logits that are not finite."""
        if not largest.finite[row]:
            raise FormatError(NOT_FINITE)
        sampling, ids = self.sampling, largest.ids[row]
        if sampling.temperature == 0:
            # There is one, and nothing to draw.
            return int(ids[0])
        scores = largest.values[row, : sampling.top_k].astype(np.float64)
        return self.pick(_probable(ids[: sampling.top_k].astype(np.int64), scores, sampling))

    def draw(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """The next token, from logits float32 [vocab] and all tokens before it."""
        if self.sampling.temperature == 0:
            # There is one, and nothing to draw.
            return int(self.candidates(logits, history)[0][0])
        return self.pick(self.candidates(logits, history))


def logprobs(logits: NDArray[np.float32], token: int, top: int) -> Logprobs:
    """The log-probability of `token` and those of the `top` most probable tokens; of equals the smaller id comes first."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= math.log(float(np.exp(scores).sum()))
    likely = np.flatnonzero(scores >= _largest(scores, min(top, len(scores)))) if top else np.zeros(0, np.int64)
    best = likely[np.argsort(-scores[likely], kind="stable")[:top]]
    return Logprobs(token, float(scores[token]), tuple((int(t), float(scores[t])) for t in best))


def _penalize(scores: ArrayF64, sampling: Sampling, history: Sequence[int], start: int, repeated: Mapping[int, float]) -> None:
    """Penalties and biases, in place of `scores`."""
    if sampling.repeat_penalty != 1.0 and len(history):
        seen, penalty = np.unique(np.asarray(history, np.int64)), sampling.repeat_penalty
        # Dividing a negative score would make its token more probable.
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(history) > start:
        seen, counts = np.unique(np.asarray(history[start:], np.int64), return_counts=True)
        scores[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, penalty in repeated.items():
        # Tokens that end a text may lie beyond the model's vocabulary.
        if token < len(scores):
            scores[token] -= penalty
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias


def _processed(scores: ArrayF64, processor: Processor, history: Sequence[int]) -> ArrayF64:
    """InputError: the result has another shape, a number that is no logit, or no token that may come."""
    result = np.asarray(processor(tuple(history), scores.astype(np.float32)))
    if result.shape != scores.shape or result.dtype.kind != "f":
        raise InputError(f"a processor gave {result.dtype} {list(result.shape)}; expected floats [{len(scores)}]")
    highest = float(result.max())
    if not math.isfinite(highest):
        raise InputError("a processor left no token that may come, or gave a number that is no logit; only -inf bans a token")
    return result.astype(np.float64)


def _largest(scores: ArrayF64, k: int) -> float:
    """The k-th largest."""
    runs = len(scores) // RUN
    if runs > k:
        # At least k scores reach the k-th largest of the runs' maxima, so the k largest are among those that do.
        maxima = scores[: runs * RUN].reshape(RUN, runs).max(axis=0)
        scores = scores[scores >= np.partition(maxima, -k)[-k]]
    return float(np.partition(scores, -k)[-k])
