"""The examples of docs/python.md run, in their order, and print what they say."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("prometheus_client")

import edgeq
from edgeq.errors import InputError
from edgeq.runtime import Model, Requantization, Sampling
from tests.checkpoints.embeddings import PROMPTS, embedding_checkpoint
from tests.checkpoints.encoders import bert_reranker

PAGE = Path(__file__).parent.parent.parent / "docs" / "python.md"


@pytest.fixture(scope="module")
def folder(model_path: Callable[..., Path], checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    shutil.copy(model_path("tiny-llama", bits=4, group_size=32), folder / "tiny-llama.edgeq")
    source = embedding_checkpoint(checkpoint("qwen3"), folder / "embeds", "last", prompts=PROMPTS)
    edgeq.convert(str(source), str(folder / "qwen3-embedding.edgeq"), bits=4)
    edgeq.convert(str(bert_reranker(folder / "ranks")), str(folder / "bge-reranker.edgeq"), bits=4)
    return folder


def test_the_examples_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"(length|stop) \d+ \d+ tok/s", printed)
    kept, saved = (int(n) for n in re.findall(r"(\d+) tokens (?:of the conversation|were in the file)", printed))
    # All of the conversation but its last question, and all of it.
    assert 0 < kept < saved == len(names["third"]._stream.tokens) - len(names["third"].tokens) - 1
    held = names["held"]
    assert held.finish_reason == "length" or set(json.loads(held.text())) == {"name"}
    assert names["call"]["function"]["name"] == "get_weather" and names["result"].startswith("21 degrees in ")
    assert not {each.token for each in names["scored"].logprobs} & set(names["never"])
    assert printed.count("\n0 ") == 1 and names["reply"].output_text == names["answer"]
    assert repr(names["server"]).endswith("ended>")
    assert names["vectors"].shape == (2, 128) and names["short"].shape == (1, 64)
    assert names["documents"][names["index"]] in printed


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.load(folder / "tiny-llama.edgeq", mode="a16", threads=1, context=512)


def test_an_asynchronous_text_is_the_same_and_the_loop_goes_on(model: Model) -> None:
    wanted = model.generate("import ", max_tokens=20, sampling=Sampling()).text()

    async def both() -> tuple[str, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        text = "".join([piece async for piece in model.generate("import ", max_tokens=20, sampling=Sampling())])
        ticking.cancel()
        return text, ticks

    text, ticks = asyncio.run(both())
    assert text == wanted and ticks > 0


def test_cancelling_the_task_ends_the_text(model: Model) -> None:
    generation = model.generate("import ", max_tokens=500, ignore_eos=True)

    async def cancelled() -> None:
        async def read() -> None:
            async for _ in generation:
                pass

        task = asyncio.ensure_future(read())
        while len(generation.tokens) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert len(generation.tokens) < 500 and generation.text() and generation.finish_reason is None


def test_a_server_that_cannot_be_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no key is asked for"):
        edgeq.serve(model, host="0.0.0.0", port=0)
    with edgeq.serve(model, port=0) as server, pytest.raises(InputError, match="in use by another program"):
        edgeq.serve(model, port=int(server.url.split(":")[2].split("/")[0]))
    monkeypatch.setattr(model, "requantization", Requantization())
    with pytest.raises(InputError, match="belong to one prompt"):
        edgeq.serve(model)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seats": 33}, "`seats` is 33; expected an integer from 1 to 32"),
        ({"seats": 0}, "`seats` is 0"),
        ({"queue": -1}, "`queue` is -1"),
        ({"port": 65536}, "`port` is 65536"),
        ({"cache_bytes": "1 GiB"}, "`cache_bytes` is '1 GiB'"),
        ({"prompt_cache_bytes": -1}, "`prompt_cache_bytes` is -1"),
        ({"names": "model"}, "`names` is 'model'"),
        ({"origins": ("",)}, "`origins` is"),
        ({"host": "0.0.0.0", "keys": {"anna": ""}}, "`keys` is"),
        ({"keys": {"anna": "secret", "ben": "secret"}}, "two clients have the same `keys`"),
    ],
)
def test_a_server_with_such_arguments_is_refused(model: Model, given: dict[str, Any], told: str) -> None:
    """Without seats nothing ends, with more than the model has logits a run fails, and an empty key lets in who sends none."""
    with pytest.raises(InputError, match=re.escape(told)):
        edgeq.serve(model, **{"port": 0, **given})
