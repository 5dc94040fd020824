"""`edgeq chat`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeq.errors import DeviceError
from edgeq.runtime import Piece
from edgeq.tools.commands import chat
from tests.cli.running import REFERENCE, Run, objects

pytestmark = pytest.mark.usefixtures("works_here")


def test_chat_answers_every_line_and_keeps_the_conversation(edgeq: Run, demo: Path, template: Path) -> None:
    talk = "import os\n/help\n\nimport sys\n/nonsense\n/clear\n/exit\nnever read\n"
    result = edgeq("chat", demo, "--chat-template", template, "-n", 4, *REFERENCE, input=talk)
    assert result.exit_code == 0, result.stderr
    assert "unknown command /nonsense" in result.stderr and result.stderr.count("/clear forgets") == 3
    assert result.stdout.count("\n") >= 2


def test_an_interrupt_before_the_first_token_prints_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for as_json, printed in ((True, ""), (False, "\n")):
        stopped: Any = SimpleNamespace(ask=interrupted, as_json=as_json, answered=lambda text: None, last=None)
        chat.answer(stopped, "hi")
        assert capsys.readouterr().out == printed


def test_an_error_of_the_device_begins_a_line_after_thoughts_too(capsys: pytest.CaptureFixture[str]) -> None:
    def lost() -> Any:
        yield Piece("Hm", 5, True)
        raise DeviceError("the device is lost")

    generation = SimpleNamespace(pieces=lost, tokens=[5])
    with pytest.raises(DeviceError):
        chat.answer(SimpleNamespace(ask=lambda *_: generation, as_json=False), "hi")  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert shown.out == "\n" and shown.err.endswith("Hm")


def test_chat_json_is_a_line_for_each_answer(edgeq: Run, demo: Path, template: Path) -> None:
    words = ("--chat-template", template, "-n", 4, "--temp", 0, "--json", *REFERENCE)
    result = edgeq("chat", demo, *words, input="import os\n/stats\nimport sys\n")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == 2 and all(answer["finish_reason"] == "length" and answer["text"] for answer in answers)
    first = edgeq("run", demo, "--chat", "-p", "import os", *words)
    assert answers[0]["text"] == objects(first)["text"]
    records = [[record["test"] for record in answer["measurements"]] for answer in answers]
    assert [names[2].partition(" ")[0] for names in records] == ["tg3", "tg3"] and answers[1]["generation"]["cached_tokens"] > 0
    assert objects(first)["measurements"][0].keys() == answers[0]["measurements"][0].keys()


@pytest.mark.parametrize(("wish", "word"), [(["-n", "0"], "-n is 0"), (["--stop", ""], "stop")])
def test_chat_refuses_before_the_first_question(edgeq: Run, demo: Path, template: Path, wish: list[str], word: str) -> None:
    result = edgeq("chat", demo, "--chat-template", template, *wish, *REFERENCE, input="hello\n")
    assert result.exit_code == 1 and word in result.stderr and len(result.stderr.splitlines()) == 1


def test_chat_says_which_turns_leave_a_full_context(edgeq: Run, demo: Path, template: Path) -> None:
    talk = "".join(f"question {i} with some words in it to fill the context\n" for i in range(5))
    options = ("--chat-template", template, "-n", 8, "-c", 96, "--system", "Be brief.", *REFERENCE)
    result = edgeq("chat", demo, *options, input=talk)
    assert result.exit_code == 0, result.stderr
    assert "the context of 96 is full: the oldest turn leaves ('question 0" in result.stderr


def test_chat_goes_on_after_a_message_that_is_too_long(edgeq: Run, demo: Path, template: Path) -> None:
    talk = "word " * 200 + "\nshort\n"
    result = edgeq("chat", demo, "--chat-template", template, "-n", 4, "-c", 64, *REFERENCE, input=talk)
    assert result.exit_code == 0 and "shorten it or start with a larger -c" in result.stderr and result.stdout


def test_chat_commands_regenerate_save_load_and_join_lines(
    edgeq: Run, demo: Path, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talk = (
        "/stats\n/regenerate\nimport \\\nos\n/stats\n/regenerate\n/system Be brief.\n/save talk.json\n/save talk.json\n/clear\n"
    )
    talk += "/load talk.json\n/save again.json\n/load none.json\n/load bad.json\n/help\n"
    (tmp_path / "bad.json").write_text('[{"role": "root", "content": "x"}]')
    result = edgeq("chat", demo, "--chat-template", template, "-n", 6, "--temp", 1, *REFERENCE, input=talk)
    assert result.exit_code == 0, result.stderr
    for words in ("there is no answer yet", "there is no question yet", "prefill ", "decode ", "tok/s]", "2 messages"):
        assert words in result.stderr, words
    for words in ("talk.json: cannot write it: File exists", "none.json: cannot read it", "bad.json: not a conversation"):
        assert words in result.stderr, words
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in saved] == ["system", "user", "assistant"]
    assert saved[0]["content"] == "Be brief." and saved[1]["content"] == "import \nos"
    assert json.loads((tmp_path / "again.json").read_text()) == saved
    assert result.stdout.endswith(saved[2]["content"] + "\n") and result.stdout.count("\n") >= 2


def test_chat_draws_a_seed_and_shows_it(edgeq: Run, demo: Path, template: Path) -> None:
    options = (demo, "--chat-template", template, "-n", 8, "--temp", 1.2, *REFERENCE)
    first = edgeq("chat", *options, input="import os\n")
    found = re.search(r"sampling 1.2, top-p 0.95, min-p 0.05, dry-multiplier 0.8, seed (\d+)", first.stderr)
    assert found and first.stdout == edgeq("chat", *options, "--seed", found[1], input="import os\n").stdout
    assert found[0] not in edgeq("chat", *options, input="import os\n").stderr
    answers = edgeq("chat", *options, "--seed", 3, input="import os\n/clear\nimport os\n").stdout
    assert answers != edgeq("chat", *options, "--seed", 3, input="import os\n").stdout * 2


def test_an_interrupt_at_the_prompt_drops_the_line_and_a_second_one_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["first\\", KeyboardInterrupt, "second", KeyboardInterrupt, "third", KeyboardInterrupt, KeyboardInterrupt])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    found = []
    with pytest.raises(KeyboardInterrupt):
        for line in chat.lines():
            found.append(line)
    assert found == ["second", "third"] and capsys.readouterr().err.count("Ctrl-C again") == 3
