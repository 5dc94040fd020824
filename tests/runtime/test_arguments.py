"""Arguments of the wrong type or out of range: refused at the call, with what was found and what is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import InputError
from edgeq.runtime import Batch, Model, Sampling

Call = Callable[[Model], Any]


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Model:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return Model.load(tiny_path, target="reference", context=64, chat_template=template)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.generate(b"def"), "`prompt` is b'def'; expected a string or a list of token ids; decode it first"),
        (lambda m: m.generate([1.5]), "`prompt` holds 1.5; expected a list of token ids from 0 to 2047"),
        (lambda m: m.generate([True]), "`prompt` holds True"),
        (lambda m: m.generate(["a", "b"]), "`prompt` holds 'a'"),
        (lambda m: m.generate([[1, 2]]), "`prompt` holds .1, 2."),
        (lambda m: m.generate(7), "`prompt` is 7"),
        (lambda m: m.generate(None), "`prompt` is None"),
        (lambda m: m.generate({1: 2}), "`prompt` is {1: 2}"),
        (lambda m: m.generate([2048]), "token 2048 is not in the vocabulary of 2048"),
        (lambda m: m.generate([-1]), "token -1 is not in the vocabulary"),
        (lambda m: m.generate([5], max_tokens=5.5), "`max_tokens` is 5.5; expected an integer of at least 1"),
        (lambda m: m.generate([5], max_tokens=None), "`max_tokens` is None"),
        (lambda m: m.generate([5], max_tokens=True), "`max_tokens` is True"),
        (lambda m: m.generate([5], max_tokens="5"), "`max_tokens` is '5'"),
        (lambda m: m.generate([5], stop=None), "`stop` is None; expected a list of at most 16 strings"),
        (lambda m: m.generate([5], stop="x"), "`stop` is 'x'"),
        (lambda m: m.generate([5], stop=[1]), "`stop` is"),
        (lambda m: m.generate([5], stop_tokens=[2048]), "token 2048"),
        (lambda m: m.generate([5], stop_tokens=range(65)), "`stop_tokens` is '65 tokens'; expected at most 64"),
        (lambda m: m.generate([5], min_tokens=9, max_tokens=8), "`min_tokens` is 9; expected an integer from 0 to .*8"),
        (lambda m: m.generate([5], ignore_eos=1), "`ignore_eos` is 1; expected True or False"),
        (lambda m: m.generate([5], logprobs=21), "`logprobs` is 21; expected an integer from 0 to 20"),
        (lambda m: m.generate([5], processors=print), "`processors` is .*; expected a list of functions"),
        (lambda m: m.generate([5], processors=[1]), "`processors` is 1"),
        (lambda m: m.generate([5], sampling={"temperature": 1}), "`sampling` is {'temperature': 1}; expected a Sampling"),
        (lambda m: m.generate([5], sampling=Sampling(logit_bias={2048: 1})), "token 2048"),
        (lambda m: m.generate([5], session="new"), "`session` is 'new'"),
        (lambda m: m.generate([5], on_progress=5), "`on_progress` is 5; expected a function"),
        (lambda m: m.generate([5], draft="lookup", gamma=1.5), "`gamma` is 1.5"),
        (lambda m: m.chat("hello"), "`messages` is 'hello'; expected a list of dicts"),
        (lambda m: m.chat(["hello"]), "`messages` is"),
        (lambda m: m.session().prefill(b"def"), "`tokens` is b'def'"),
        (lambda m: m.session().decode(1.5), "`tokens` holds 1.5"),
        (lambda m: Batch(m, 4.5), "`size` is 4.5"),
        (lambda m: Batch("m", 4), "`model` is 'm'"),
        (lambda m: Batch(m, 4, max_tokens=0), "`max_tokens` is 0"),
        (lambda m: Batch(m, 4).run("def f"), "`prompts` is 'def f'; expected a list of prompts"),
        (lambda m: Batch(m, 4).run([b"def f"]), "`prompt` is b'def f'"),
        (lambda m: Batch(m, 4).run([[5]], n=0), "`n` is 0; expected an integer from 1 to 128"),
        (lambda m: Batch(m, 4).run([[5]], n=129), "`n` is 129"),
        (lambda m: Batch(m, 4).run([[5]], sampling=Sampling()), "`sampling` is Sampling"),
        (lambda m: Batch(m, 4).run([[5], [6]], sampling=[Sampling()]), "`sampling` has 1 entries for 2 prompts"),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_anything_runs(model: Model, call: Call, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": "auto"}, "`threads` is 'auto'; expected 0 .the target chooses. to 1024"),
        ({"threads": 1.0}, "`threads` is 1.0"),
        ({"max_logits": None}, "`max_logits` is None"),
        ({"context": "4096"}, "`context` is '4096'"),
        ({"target": 5}, "`target` is 5; expected a string"),
        ({"chat_template": b"{{ x }}"}, "`chat_template` is b'"),
        ({"requantization": "never"}, "`requantization` is 'never'"),
        ({"on_progress": "bar"}, "`on_progress` is 'bar'"),
    ],
)
def test_options_of_the_wrong_type_are_refused_before_the_file_is_read(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Model.load("none.edgeq", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1.5}, "`seed` is 1.5; expected an integer from 0"),
        ({"seed": "1"}, "`seed` is '1'"),
        ({"temperature": None}, "`temperature` is None; expected 0 .greedy. or 1e-6 to 100"),
        ({"temperature": "hot"}, "`temperature` is 'hot'"),
        ({"temperature": True}, "`temperature` is True"),
        ({"top_k": 2.0}, "`top_k` is 2.0"),
        ({"presence_penalty": 2.1}, "`presence_penalty` is 2.1; expected a number from -2 to 2"),
        ({"frequency_penalty": -2.1}, "`frequency_penalty` is -2.1"),
        ({"logit_bias": [1]}, "`logit_bias` is .1.; expected a dict"),
        ({"logit_bias": {"a": 1}}, "`logit_bias` is 'a'; expected token ids as keys"),
        ({"logit_bias": {5: 101}}, "`logit_bias` is 101; expected a number from -100 to 100"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "at most 1024"),
    ],
)
def test_sampling_of_the_wrong_type_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Sampling(**options)


def test_limits_themselves_are_taken(model: Model) -> None:
    Sampling(presence_penalty=-2, frequency_penalty=2, logit_bias=dict.fromkeys(range(1024), 100), seed=(1 << 64) - 1)
    model.generate([2047], stop_tokens=range(64), logprobs=20, min_tokens=8, max_tokens=8)


def test_arrays_of_integers_are_token_ids(model: Model) -> None:
    tokens = [5, 6, 7]
    texts = {
        model.generate(p, max_tokens=3).text() for p in (tokens, tuple(tokens), np.array(tokens), np.array(tokens, np.uint8))
    }
    assert len(texts) == 1
