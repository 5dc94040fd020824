"""Published models as they are: what is kept of them, what they compute, what they answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import jsonschema
import numpy as np
import pytest

from edgeq.converters.exporters.export import export
from edgeq.runtime import Batch, Model, Sampling
from tests.real.conftest import Published, loaded
from tests.runtime.answers.calling import WEATHER
from tests.runtime.server.schemas import record
from tests.runtime.server.serving import Served, serving

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: E402

pytestmark = pytest.mark.real

TEXT = """The history of the steam engine begins in the first century. In 1712, Thomas Newcomen built the first engine that
paid, and James Watt improved it:

def power(pressure, area):
    return pressure * area ** 2
"""
ASKED = ["What is the capital of France?", "What is 2 + 2?", "What color is the sky?"]
GREEDY = Sampling(temperature=0)
TOKENS, NEAR_TIE = 32, 0.02
QUESTIONS = [
    *ASKED,
    *("Who wrote Hamlet?", "Name three fruits.", "What is the largest planet?", "Write a short poem about rain."),
    *("How do I boil an egg?", "What does a compiler do?", "Why do leaves fall in autumn?", "Say hello in Spanish."),
    *("What is a prime number?", "Write a Python function that adds two numbers.", "Tell me a fact about cats."),
    *("When did the Second World War end?", "What is water made of?", "Explain gravity to a child."),
    *("List the days of the week.", "What is the opposite of hot?", "How many legs does a spider have?"),
]
CAPITAL = record(capital={"type": "string", "maxLength": 20}, country={"type": "string", "maxLength": 20})
# What Hermes 2 Pro's template says, in short: SmolLM2's own has no tools.
TOOLS = """{%- if tools %}<|im_start|>system
You may call one or more functions. The functions are within <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
For each function call return a json object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def said(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def reference(path: Path) -> Any:
    """transformers' model with the weights that its own reader takes from the file."""
    torch.set_num_threads(1)
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model.eval()


def test_a_published_file_means_the_same_here(published: Published) -> None:
    """Weights one by one, and logits of a text, against transformers' reader and model."""
    model = reference(published.gguf)
    values = model.state_dict()
    for name, found in published.stored.items():
        expected = values[name].numpy() + np.float32(published.added.get(name, 0))
        assert np.array_equal(found, expected), (name, np.abs(found - expected).max())
    with loaded(published.path) as runs:
        tokens = runs.text.encode(TEXT)
        found = np.concatenate([np.reshape(rows, (-1, runs.config.vocab_size)) for rows in runs.session().all_logits(tokens)])
    with torch.inference_mode():
        expected_logits = model(torch.tensor([tokens])).logits[0].double()
    wanted, got = torch.log_softmax(expected_logits, -1), torch.log_softmax(torch.from_numpy(found).double(), -1)
    divergence = (wanted.exp() * (wanted - got)).sum(-1).mean().item()
    assert divergence <= 1e-5
    assert torch.equal(wanted.argmax(-1), got.argmax(-1))


def test_its_export_to_gguf_has_the_same_tensors(published: Published, tmp_path: Path) -> None:
    back = tmp_path / "back.gguf"
    assert export(published.path, "gguf", back, False, lambda *_: None) == []
    before, after = gguf.GGUFReader(published.gguf), gguf.GGUFReader(back)
    found = {tensor.name: tensor for tensor in after.tensors}
    assert found.keys() == {tensor.name for tensor in before.tensors}
    for tensor in before.tensors:
        same = found[tensor.name]
        assert (same.tensor_type, *same.shape) == (tensor.tensor_type, *tensor.shape), tensor.name
        assert same.data.tobytes() == tensor.data.tobytes(), tensor.name
    for key in ("tokens", "merges", "eos_token_id"):
        name = f"tokenizer.ggml.{key}"
        assert name not in before.fields or before.fields[name].contents() == after.fields[name].contents(), key


@pytest.fixture(scope="module")
def model(smollm2: Published) -> Iterator[Model]:
    with loaded(smollm2.path) as found:
        yield found


def test_greedy_answers_are_those_of_transformers(model: Model, smollm2: Published) -> None:
    """In float32 with the same weights, up to a token of which theirs are nearly in doubt."""
    theirs = reference(smollm2.gguf)
    for question in QUESTIONS:
        prompt = model.chat_prompt(said(question))
        generation = model.generate(prompt, max_tokens=TOKENS, sampling=GREEDY, ignore_eos=True)
        generation.text()
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*prompt.tokens, *generation.tokens]])).logits[0, len(prompt.tokens) - 1 : -1]
        gaps = (logits.max(-1).values - logits[torch.arange(TOKENS), torch.tensor(generation.tokens)]).tolist()
        # Where their text has another token, it goes on in another way.
        assert next((gap for gap in gaps if gap), 0.0) < NEAR_TIE, (question, gaps)


def test_it_answers(model: Model) -> None:
    answers = [model.chat(said(question), max_tokens=24, sampling=GREEDY).text() for question in ASKED]
    assert answers[0] == "The capital of France is Paris." and "4" in answers[1] and "blue" in answers[2]
    assert " Paris" in model.generate("The capital of France is", max_tokens=8, sampling=GREEDY).text()


def test_its_chat_template_is_used(model: Model) -> None:
    """Written out: the template puts a system message before the question, and its markers are tokens."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    tokens = list(model.chat_prompt(said("Hi")).tokens)
    assert tokens == model.text.encode(text) and tokens.count(1) == 3 and tokens.count(2) == 2


def test_the_same_bits_however_it_is_run(model: Model, tmp_path: Path) -> None:
    prompts = [model.chat_prompt(said(question)) for question in ASKED]
    alone = [generated(model, prompt) for prompt in prompts]
    together = sorted(Batch(model, 3, max_tokens=32, sampling=GREEDY, logprobs=0).run(prompts), key=lambda answer: answer.index)
    assert [(answer.text, answer.logprobs) for answer in together] == alone
    drafted = [model.generate(prompt, max_tokens=32, sampling=GREEDY, draft="lookup") for prompt in prompts]
    assert [generation.text() for generation in drafted] == [text for text, _ in alone]
    with model.session() as session, model.session() as again:
        session.prefill(prompts[0])
        session.save(tmp_path / "kept.session")
        again.load(tmp_path / "kept.session")
        assert generated(model, prompts[0], session=again) == alone[0]


def generated(model: Model, prompt: Any, **options: Any) -> tuple[str, Any]:
    generation = model.generate(prompt, max_tokens=32, sampling=GREEDY, logprobs=0, **options)
    return generation.text(), generation.logprobs


@pytest.fixture(scope="module")
def served(smollm2: Published) -> Iterator[Served]:
    with loaded(smollm2.path, chat_template=TOOLS) as found, serving(found, names=("smollm2",)) as server:
        yield server


def answered(served: Served, question: str, **options: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": said(question), "temperature": 0, "max_tokens": 96, **options}
    status, _, found = served.ask("/v1/chat/completions", body)
    assert status == 200, found
    message: dict[str, Any] = found["choices"][0]["message"]
    return message


def test_an_answer_is_json_and_true(served: Served) -> None:
    held = {"type": "json_schema", "json_schema": {"name": "capital", "strict": True, "schema": CAPITAL}}
    question = "Which city is the capital of France? Answer as JSON with the keys capital and country."
    found = json.loads(answered(served, question, response_format=held)["content"])
    jsonschema.validate(found, CAPITAL)
    assert found["capital"] == "Paris"


def test_a_tool_is_called_with_what_was_asked(served: Served) -> None:
    question = "How will the weather in Lima be for the next 3 days?"
    message = answered(served, question, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Lima", "days": 3}
