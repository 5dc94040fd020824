"""Texts held to a grammar: which tokens may come next, by llguidance.

A grammar is a JSON Schema or a grammar in llguidance's Lark syntax, and may come from a stranger: sizes are counted before
anything is compiled, and what llguidance refuses, or needs too long for, is found out in a child process.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError, UnsupportedError
from edgeq.system.confinement import ConfinementLimits, LimitError, StallError, confined
from edgeq.text.tokenizer import Tokenizer

T = TypeVar("T")

MAX_SCHEMA_CHARACTERS = 64 << 10
"""Characters of a JSON Schema, written compactly, or of a grammar."""
MAX_GRAMMAR_CHARACTERS = 1 << 20
"""Characters of all that is compiled for one text: the schemas of all its tools."""
MAX_SCHEMA_DEPTH = 64
MAX_PROPERTIES = 500
"""Properties of one object: llguidance takes 0.3 ms for a mask with 200 optional ones, and 1.8 s to compile 5,000."""
TRIAL_LIMITS = ConfinementLimits(memory=512 << 20, seconds=3, nice=10)
"""What a trial may take; a usual schema takes 2 ms.  The memory is an address space, which llguidance reserves generously."""
MAX_COMPILED = 32
MAX_REFUSED = 1024
"""Whose reasons are kept: what was refused after three seconds is not tried again."""
AHEAD_FROM = 16_384
"""Tokens of a vocabulary from which on a mask takes longer than handing it to another thread."""
_THREAD = ThreadPoolExecutor(1, "edgeq-grammar")
LEXER_FUEL, STEP_FUEL = 200_000, 50_000
"""llguidance's units of work: with its own defaults a mask of nested repetitions takes 12 ms, with these 3."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
"""Between the parts of a JSON text.  Without a limit a model can go on with spaces until the text is full."""
OPTIONS = "x-guidance"
APART = "\x02"
"""A character that no token has beside others: what a tokenizer puts before a text comes before it."""


def schema_text(schema: Any, lenient: bool = False) -> str:
    """A JSON Schema as llguidance reads it; `lenient`: keywords and formats that it does not know are ignored.

    InputError: no JSON Schema, or too large, too deep, or with too many properties in one object.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InputError(f"the schema is {str(schema)[:80]}; expected a JSON object")
    try:
        text = json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the schema is not JSON: {str(error)[:200]}") from None
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise InputError(f"the schema has {len(text)} characters; at most {MAX_SCHEMA_CHARACTERS} are possible")
    if OPTIONS in schema:
        raise InputError(f"the schema has {OPTIONS}, which is no keyword of JSON Schema; leave it out")
    for level, properties in shape(schema):
        if level > MAX_SCHEMA_DEPTH:
            raise InputError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
        if properties > MAX_PROPERTIES:
            raise InputError(f"an object of the schema has {properties} members; at most {MAX_PROPERTIES} are possible")
    options = {"whitespace_pattern": WHITESPACE} | ({"lenient": True} if lenient else {})
    return json.dumps({**schema, OPTIONS: options}, separators=(",", ":"))


def shape(value: Any) -> Iterator[tuple[int, int]]:
    """Depth of each level of what was JSON, and the most members of one of its objects; no deeper than a schema may be, and
    one level more."""
    level, values = 1, [value]
    while values and level <= MAX_SCHEMA_DEPTH + 1:
        yield level, max((len(value) for value in values if isinstance(value, Mapping)), default=0)
        parents = (value for value in values if isinstance(value, (Mapping, list, tuple)))
        values = [each for value in parents for each in (value.values() if isinstance(value, Mapping) else value)]
        level += 1


def of_schema(schema: str) -> str:
    """The grammar of the JSON texts that a schema allows, as `schema_text` gives it."""
    return '{"grammars":[{"json_schema":' + schema + "}]}"


def of_lark(grammar: str) -> str:
    """A grammar in llguidance's Lark syntax."""
    return json.dumps({"grammars": [{"lark_grammar": _of_sound_size(grammar)}]})


def of_gbnf(grammar: str) -> str:
    """A grammar in llama.cpp's GBNF.  InputError: it cannot be read."""
    check_installed()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    def converted() -> str:
        try:
            return gbnf_to_lark(grammar)
        except (Exception, RecursionError) as error:
            # A parser of another project, which raises what it likes.
            raise InputError(f"the grammar cannot be read: {str(error)[:300]}") from None

    _of_sound_size(grammar)
    try:
        return of_lark(confined(converted, TRIAL_LIMITS))
    except LimitError as error:
        raise InputError(f"the grammar cannot be read: {error}") from None


def _of_sound_size(grammar: str) -> str:
    if not isinstance(grammar, str) or not grammar.strip():
        raise InputError("the grammar is empty; expected text with a rule `start`")
    if len(grammar) > MAX_SCHEMA_CHARACTERS:
        raise InputError(f"the grammar has {len(grammar)} characters; at most {MAX_SCHEMA_CHARACTERS} are possible")
    return grammar


def check_installed() -> None:
    """UnsupportedError: llguidance is not installed."""
    if find_spec("llguidance") is None:
        raise UnsupportedError('grammars need llguidance, which is not installed: pip install "edgeq[grammar]"')


class NotCompiledError(LookupError):
    """A grammar that was neither compiled nor refused yet."""


@dataclass(frozen=True)
class Constraint:
    """A compiled grammar; every text that is held to it has a Matcher of its own.

    matcher   llguidance's, at the beginning of a text;  end: a token that it takes for the end
    """

    matcher: Any
    vocab_size: int
    end: int

    def begin(self, start: int, stops: Collection[int]) -> Matcher:
        """For a text after `start` tokens that each of `stops` may end."""
        return Matcher(self.matcher.deep_copy(), start, sorted(token for token in stops if token < self.vocab_size), self)


Compile = Callable[[str], Constraint]
"""Constraints.compile, or Constraints.recall."""


class Constraints:
    """Compiles the grammars of one model, and keeps the last 32, and why others were refused.

    From any thread, but not from one that runs the model: a vocabulary of 128,000 tokens takes half a second at first.
    """

    def __init__(self, text: Callable[[], Tokenizer], vocab_size: int) -> None:
        """`text` reads the tokenizer when it is first needed."""
        self._text, self._vocab_size = text, vocab_size
        self._lock, self._tokenizer = Lock(), None
        self._compiled = OrderedDict[bytes, Constraint]()
        self._refused = OrderedDict[bytes, str]()

    def compile(self, grammar: str) -> Constraint:
        """The constraint of a grammar that a function of this file gave.

        InputError: llguidance refuses it; the message says what is not supported.  UnsupportedError: llguidance is not
        installed, or no token ends a text of this model.
        """
        try:
            return self.recall(grammar)
        except NotCompiledError:
            pass
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._read()
        try:
            refused = confined(lambda: _trial(tokenizer, grammar)[1], TRIAL_LIMITS)
        except StallError as error:
            # The machine was too busy, which says nothing of the grammar.
            raise InputError(f"the grammar could not be compiled: {error}") from None
        except LimitError as error:
            raise self._refuse(grammar, f"the grammar is too complex: {error}; simplify it") from None
        matcher, again = _trial(tokenizer, grammar) if not refused else (None, "")
        if refused or again:
            raise self._refuse(grammar, f"the grammar cannot be used: {_reason(refused or again)}")
        found = Constraint(matcher, self._vocab_size, min(self._text().eos))
        with self._lock:
            _keep(self._compiled, _digest(grammar), found, MAX_COMPILED)
        return found

    def recall(self, grammar: str) -> Constraint:
        """A grammar that was compiled before, at once.  Errors as of `compile`; NotCompiledError: it was not tried yet."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise InputError(
                f"the grammar has {len(grammar)} characters with its schemas; at most {MAX_GRAMMAR_CHARACTERS} are possible"
            )
        check_installed()
        key = _digest(grammar)
        with self._lock:
            if key in self._refused:
                self._refused.move_to_end(key)
                raise InputError(self._refused[key])
            if key not in self._compiled:
                raise NotCompiledError
            self._compiled.move_to_end(key)
            return self._compiled[key]

    def _refuse(self, grammar: str, reason: str) -> InputError:
        with self._lock:
            _keep(self._refused, _digest(grammar), reason, MAX_REFUSED)
        return InputError(reason)

    def _read(self) -> Any:
        from llguidance import LLTokenizer

        text = self._text()
        ends = sorted(token for token in text.eos if token < self._vocab_size)
        if not ends:
            raise UnsupportedError("no token of this model ends a text, so a grammar cannot; convert the checkpoint again")
        vocabulary: Any = _Vocabulary(text, self._vocab_size, ends[0])
        return LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=ends)


def _digest(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode("utf-8", "replace"), digest_size=16).digest()


def _keep(kept: OrderedDict[bytes, T], key: bytes, value: T, most: int) -> None:
    """Enter a value, and drop those that were not used for longest."""
    kept[key] = value
    while len(kept) > most:
        kept.popitem(last=False)


class _Vocabulary:
    """The tokenizer as llguidance asks for it.  Special tokens are no text, whatever they spell.

    llguidance takes the tokens of bytes that have to come for those that come, so they must spell these bytes: tokenizers of
    SentencePiece put a space before a text.
    """

    is_tokenizer_wrapper = True

    def __init__(self, text: Tokenizer, vocab_size: int, end: int) -> None:
        self.eos_token_id, self.bos_token_id, self._text = end, text.bos, text
        self.tokens = [text.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted({*text.special_ids, *text.eos} & set(range(vocab_size)))

    def __call__(self, data: str | bytes) -> list[int]:
        wanted = data.encode() if isinstance(data, str) else data
        for begin in ("", APART):
            before = self._text.encode_plain(begin)
            tokens = self._text.encode_plain(begin + wanted.decode("utf-8", "replace"))
            rest = tokens[len(before) :]
            if (
                tokens[: len(before)] == before
                and all(token < len(self.tokens) for token in rest)
                and (b"".join(self.tokens[token] for token in rest) == wanted)
            ):
                return rest
        return self._longest(wanted)

    def _longest(self, wanted: bytes) -> list[int]:
        """The longest token that fits, again and again, as far as there is one."""
        found, at = list[int](), 0
        while at < len(wanted):
            ends = range(min(len(wanted), at + self._most_bytes), at, -1)
            token = next((self._spelled[wanted[at:end]] for end in ends if wanted[at:end] in self._spelled), None)
            if token is None:
                break
            found.append(token)
            at += len(self.tokens[token])
        return found

    @cached_property
    def _spelled(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        return {spelled: token for token, spelled in enumerate(self.tokens) if spelled and token not in special}

    @cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self._spelled), default=0)


def _trial(tokenizer: Any, grammar: str) -> tuple[Any, str]:
    """A matcher that has given its first mask, and why it cannot be used; "": it can."""
    from llguidance import LLMatcher, LLParserLimits

    # Verbose errors quote the text.
    limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, step_lexer_fuel=STEP_FUEL, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher, matcher.get_error()


def _reason(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip() and "non-verbose" not in line]
    found = "; ".join(line for line in lines if set(line) != {"^"})[:500]
    return {"NoExtensionBias": "nothing can satisfy it", "NoExtension": "nothing can satisfy it"}.get(found, found)


class Matcher:
    """Where one text is in its grammar.

    What it answers depends on the tokens alone: it follows them, also back from drafts that were not accepted.
    """

    def __init__(self, matcher: Any, start: int, stops: Sequence[int], constraint: Constraint) -> None:
        self._matcher, self._start, self._constraint = matcher, start, constraint
        self._stops, self._stopping = np.array(stops, np.int64), frozenset(stops)
        self._taken: list[int] = []
        self._ahead: tuple[list[int], Future[NDArray[np.bool_]]] | None = None

    def prepare(self, history: Sequence[int]) -> None:
        """Begin with what `allowed` will say, on another thread: the model is about to run for longer than that takes."""
        if self._constraint.vocab_size >= AHEAD_FROM:
            tokens = list(history[self._start :])
            self._ahead = tokens, _THREAD.submit(self._mask, tokens)

    def allowed(self, history: Sequence[int]) -> NDArray[np.bool_]:
        """Whether each token may come next, bool [vocab]; `history`: prompt and text.  Only a stop token follows the end.

        InputError: llguidance gives up on this text.
        """
        tokens = list(history[self._start :])
        prepared = self._finished()
        return prepared[1] if prepared and prepared[0] == tokens else self._mask(tokens)

    def _finished(self) -> tuple[list[int], NDArray[np.bool_]] | None:
        """What was prepared, once; the other thread is done with the matcher then."""
        ahead, self._ahead = self._ahead, None
        return (ahead[0], ahead[1].result()) if ahead else None

    def _mask(self, tokens: list[int]) -> NDArray[np.bool_]:
        constraint, mask = self._constraint, np.zeros(self._constraint.vocab_size, np.bool_)
        if not self._follow(tokens):
            mask[self._stops] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=constraint.vocab_size, bitorder="little").view(np.bool_)
        mask[self._stops] = mask[constraint.end]
        if constraint.end not in self._stopping:
            mask[constraint.end] = False
        return mask

    def forced(self, history: Sequence[int]) -> list[int]:
        """Tokens whose text alone can come next, in the tokenizer's own words; other tokens can spell it too."""
        self._finished()
        if not self._follow(list(history[self._start :])):
            return []
        found = self._matcher.compute_ff_tokens()
        self._check()
        return [int(token) for token in found]

    def _follow(self, tokens: list[int]) -> bool:
        """Whether the text has not ended."""
        count = len(self._taken)
        if tokens[:count] != self._taken:
            same = next(i for i in range(count) if i == len(tokens) or tokens[i] != self._taken[i])
            self._matcher.rollback(count - same)
            del self._taken[same:]
        for token in tokens[len(self._taken) :]:
            if token in self._stopping:
                return False
            if not self._matcher.consume_token(token):
                self._check()
                raise InputError("a token came that the grammar does not have")
            self._taken.append(token)
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            raise InputError(f"the grammar is too complex to go on after {len(self._taken)} tokens: {reason}; simplify it")
