"""Clients as they are installed from the package index, unmodified and in an environment of their own: `make test-clients`.

They need other versions of httpx and openai than the tests do, and a network to be installed from; where they are not there the
tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.runtime import Model
from tests.checkpoints.embeddings import PROMPTS, embedding_checkpoint

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("llguidance")

from tests.runtime.answers.calling import TEMPLATE  # noqa: E402
from tests.runtime.server.serving import Served, serving  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

pytestmark = pytest.mark.exhaustive
HERE = Path(__file__).parent
INSTALLED = Path(os.environ.get("EDGEQ_CLIENTS", HERE.parents[2] / "build" / "clients"))
# The last thing that `make test-clients` makes: without it an installation broke off, such as for want of a network.
if not (INSTALLED / "installed").exists():
    pytest.skip(f"no clients in {INSTALLED}: make test-clients", allow_module_level=True)
NAMES = ["city", "days"]
REFUSED = [[404, "model_not_found"], [400, "invalid_value"], [400, "invalid_value"]]


@pytest.fixture(scope="module")
def served(model_path: Callable[..., Path]) -> Iterator[Served]:
    path = model_path("tiny-llama", bits=4, group_size=32)
    model = Model.load(path, mode="a16", threads=1, threads_prefill=1, context=1024, chat_template=TEMPLATE)
    with serving(model, names=("tiny",)) as found:
        yield found


def run(command: list[str], **options: Any) -> str:
    # Nothing of what the clients say about themselves leaves this machine.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
    environment = {**os.environ, **quiet, **options}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script(name: str, served: Served) -> Any:
    """What a script prints that asks the server."""
    command = [str(INSTALLED / "bin" / "python"), str(HERE / name), f"{served.url}/v1", "tiny"]
    return json.loads(run(command).splitlines()[-1])


def test_langchain(served: Served) -> None:
    found = script("of_langchain.py", served)
    assert found["whole"] == found["streamed"] and found["tokens"] == found["streamed_tokens"] == 12
    assert found["call"] == ["get_weather", NAMES] and found["same_call"] and found["after"] == [True, []]
    assert found["json_schema"] and found["function_calling"] and found["responses"] == [True, True]
    assert found["refused"] == REFUSED
    assert served.idle(), "a client that left still has its text"


def test_embeddings_of_langchain(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("embeds")
    source = embedding_checkpoint(checkpoint("qwen3"), folder / "source", "last", ends=True, prompts=PROMPTS)
    convert(str(source), folder / "tiny.edgeq", ConvertOptions(bits=8), lambda *_: None)
    model = Model.load(folder / "tiny.edgeq", threads=1, threads_prefill=1)
    with serving(model, names=("tiny",)) as served:
        found = script("embeddings_of_langchain.py", served)
        assert served.idle()
    wanted = model.embed(["How tall is it?", "b"])
    for given, expected in (
        (found["documents"], wanted),
        ([found["query"]], wanted[:1]),
        ([found["short"]], model.embed("How tall is it?", dimensions=16)),
        ([found["tokens"]], model.embed([[5, 6, 7]])),
    ):
        assert np.array_equal(np.array(given, np.float32), expected)
    assert found["refused"] == [400, "invalid_value"]


def test_litellm(served: Served) -> None:
    found = script("of_litellm.py", served)
    assert found["whole"] == found["streamed"] and found["tokens"] == found["streamed_tokens"] == 12
    assert found["call"] == ["get_weather", NAMES, "tool_calls"] and found["same_call"] and found["after"]
    assert found["json_schema"] == NAMES and found["text"] == 6
    assert found["refused"] == [[status] for status, _ in REFUSED]
    assert served.idle(), "a client that left still has its text"


def test_openai_for_node(served: Served) -> None:
    if not shutil.which("node") or not (INSTALLED / "node_modules" / "openai").exists():
        pytest.skip(f"no node, or no openai in {INSTALLED}: make test-clients")
    command = ["node", str(HERE / "of_node.js"), f"{served.url}/v1", "tiny"]
    found = json.loads(run(command, NODE_PATH=str(INSTALLED / "node_modules")))
    assert found["whole"] == found["streamed"] and found["tokens"] == found["streamed_tokens"] == 12
    assert found["call"] == ["get_weather", NAMES, "tool_calls"] and found["same_call"] and found["after"]
    assert found["json_schema"] == NAMES and found["responses"] and found["models"] == ["tiny"]
    assert found["refused"] == REFUSED
    assert served.idle(), "a client that left still has its text"


class Llm:
    """The command `llm`, with a folder for its settings."""

    def __init__(self, folder: Path, served: Served) -> None:
        self._command = INSTALLED / "bin" / "llm"
        model = {"model_id": "tiny", "model_name": "tiny", "api_base": f"{served.url}/v1"}
        # JSON is YAML.
        (folder / "extra-openai-models.yaml").write_text(
            json.dumps([model | {"supports_schema": True, "supports_tools": True}])
        )
        self.environment = {"LLM_USER_PATH": str(folder)}

    def command(self, *arguments: str) -> list[str]:
        return [str(self._command), "-m", "tiny", "--key", "none", "--no-log", "-o", "seed", "5", *arguments]

    def say(self, *arguments: str) -> str:
        return run(self.command(*arguments), **self.environment)


def test_llm(served: Served, tmp_path: Path) -> None:
    llm = Llm(tmp_path, served)
    asked = ("-o", "max_tokens", "12", "How is the weather in Oslo?")
    assert llm.say(*asked) == llm.say("--no-stream", *asked)
    schema = {"type": "object", "properties": {"up": {"type": "boolean"}}, "required": ["up"], "additionalProperties": False}
    assert isinstance(json.loads(llm.say("--schema", json.dumps(schema), "Which way?"))["up"], bool)
    function = "def get_weather(city: str) -> str:\n    'What the weather is.'\n    return 'fine'"
    llm.say("--functions", function, *asked)
    wrong = subprocess.run(
        llm.command("-o", "max_tokens", "2000000000000", "Hello"),
        env=os.environ | llm.environment,
        capture_output=True,
        text=True,
    )
    assert wrong.returncode != 0 and "max_tokens" in wrong.stderr


def test_llm_that_is_interrupted_leaves_nothing(served: Served, tmp_path: Path) -> None:
    llm = Llm(tmp_path, served)
    process = subprocess.Popen(llm.command("Hello"), env=os.environ | llm.environment, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(served.server.scheduler.running) or process.poll() is not None, 0.001)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert served.idle(), "a client that left still has its text"
