"""The JavaScript client of openai against the server, where node finds it: `npm i openai`, and NODE_PATH its folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeq.runtime import Model

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from tests.runtime.serving import TEMPLATE, serving  # noqa: E402

pytestmark = pytest.mark.exhaustive
FIND = "require.resolve('openai')"
SCRIPT = """
const { OpenAI } = require('openai');
const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none' });
const messages = [{ role: 'user', content: 'Hello' }];
const asked = { model: 'edgeq', messages, max_tokens: 12, seed: 3 };
async function main() {
  const whole = await client.chat.completions.create(asked);
  let text = '', usage = null;
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) { text += chunk.choices[0]?.delta?.content ?? ''; usage = chunk.usage ?? usage; }
  const errors = [];
  for (const wrong of [{ model: 'gpt-4' }, { temperature: 9 }]) {
    try { await client.chat.completions.create({ ...asked, ...wrong }); }
    catch (error) { errors.push([error.status, error.code]); }
  }
  const cut = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true, ignore_eos: true });
  for await (const chunk of cut) { cut.controller.abort(); }
  const models = []; for await (const model of client.models.list()) models.push(model.id);
  console.log(JSON.stringify({ whole: whole.choices[0].message.content, text, usage, errors, models }));
}
main();
"""


def test_chats_streams_errors_and_leaving(model_path: Callable[..., Path], tmp_path: Path) -> None:
    if not shutil.which("node") or subprocess.run(["node", "-e", FIND], capture_output=True).returncode:
        pytest.skip("node does not find openai")
    path = model_path("tiny-llama", bits=4, group_size=32)
    model = Model.load(path, mode="a16", threads=1, threads_prefill=1, context=512, chat_template=TEMPLATE)
    (tmp_path / "client.js").write_text(SCRIPT)
    with serving(model) as served:
        command = ["node", str(tmp_path / "client.js"), f"{served.url}/v1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert served.idle()
    assert found["whole"] == found["text"] and found["usage"]["completion_tokens"] == 12
    assert found["errors"] == [[404, "model_not_found"], [400, "invalid_value"]] and found["models"] == ["edgeq"]
