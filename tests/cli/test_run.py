"""`edgeq run`: text, JSON, sampling, prompts."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from edgeq import __version__
from edgeq.runtime import Model
from edgeq.system import machine
from tests.cli.running import PROMPT, REFERENCE, TARGETS, Run, objects


@pytest.mark.parametrize("target", TARGETS)
def test_run_streams_text_and_ends_with_the_speed(edgeq: Run, demo: Path, target: str) -> None:
    result = edgeq("run", demo, "-p", PROMPT, "-n", 12, "--target", target)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout) > 10 and "tok/s" not in result.stdout
    for word in ("sampling greedy", "model    tiny-llama, i4 g128 zero", "runs on", "TTFT", "prefill", "decode", "GB/s"):
        assert word in result.stderr, word
    # The reference is not measured against anything.
    assert ("% of the" in result.stderr) == (target == "cpu")


@pytest.mark.parametrize("target", TARGETS)
def test_run_json_is_only_json(edgeq: Run, demo: Path, target: str) -> None:
    result = edgeq("run", demo, "-p", PROMPT, "-n", 8, "--json", "--target", target)
    facts = objects(result)
    assert "TTFT" not in result.stderr
    assert facts["finish_reason"] == "length" and len(facts["tokens"]) == 8 and facts["text"]
    assert facts["generation"]["prompt_tokens"] > 1 and "measurement" not in facts
    kinds = {record["kind"]: record for record in facts["measurements"]}
    assert list(kinds) == ["ttft", "pp", "tg"] and len(kinds["tg"]["step_s"]) == 7 == kinds["tg"]["tokens"]
    assert (kinds["tg"]["read_bandwidth"] is None) == (target == "reference")
    expected = {"prompt": PROMPT, "model": "tiny-llama", "codec": "i4 g128 zero", "head_codec": "i8 g128", "target": target}
    assert {key: facts[key] for key in expected} == expected
    assert facts["sampling"]["temperature"] == 0 and facts["version"] == __version__ and facts["processor"]
    assert datetime.fromisoformat(facts["date"]).tzinfo and facts["load_s"] > 0 and facts["generation"]["ttft_s"] > 0


def test_run_jsonl_has_every_token_as_it_comes_and_then_everything(edgeq: Run, demo: Path) -> None:
    options = ("-p", PROMPT, "-n", 8, *REFERENCE)
    *lines, last = map(json.loads, edgeq("run", demo, *options, "--jsonl").stdout.splitlines())
    assert [line["token"] for line in lines] == last["tokens"] and "".join(line["text"] for line in lines) == last["text"]
    assert last["text"] == objects(edgeq("run", demo, *options, "--json"))["text"]


def test_run_says_how_it_samples_and_a_random_seed_can_be_given_again(edgeq: Run, demo: Path) -> None:
    options = ("-p", PROMPT, "-n", 12, "--temp", 1.2, "--top-p", 0.9, *REFERENCE)
    first = edgeq("run", demo, *options, "--seed", "random")
    found = re.search(r"^sampling 1.2, top-p 0.9, seed (\d+)$", first.stderr, re.M)
    assert found and first.stdout == edgeq("run", demo, *options, "--seed", found[1]).stdout
    again = objects(edgeq("run", demo, *options, "--seed", "random", "--presence-penalty", 0.5, "--json"))["sampling"]
    assert again["seed"] != int(found[1]) and again["presence_penalty"] == 0.5


def test_the_sampling_of_the_file_is_named_as_such(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "warm"
    shutil.copytree(tiny_llama, source)
    settings = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(
        json.dumps(settings | {"temperature": 0.9, "top_p": 0.95, "do_sample": True})
    )
    model = tmp_path / "warm.edgeq"
    assert edgeq("convert", source, "-o", model).exit_code == 0
    for given, line in (
        ((), "sampling 0.9, top-p 0.95, seed 0 (the file's)"),
        (("--seed", 7), "sampling 0.9, top-p 0.95, seed 7 (the file's)"),
        (("--top-p", 0.5), "sampling 0.9, top-p 0.5, seed 0"),
        (("--temp", 0), "sampling greedy"),
    ):
        result = edgeq("run", model, "-p", PROMPT, "-n", 12, *given, *REFERENCE)
        assert line in result.stderr.splitlines(), result.stderr
    assert Model.load(model, target="reference").generate(PROMPT, max_tokens=12).text() == edgeq(
        "run", model, "-p", PROMPT, "-n", 12, *REFERENCE
    ).stdout.removesuffix("\n")


def test_more_threads_than_cores_are_noted(edgeq: Run, demo: Path) -> None:
    cores = machine.cpu().cores
    result = edgeq("run", demo, "-p", PROMPT, "-n", 2, "-t", cores + 1, *REFERENCE)
    assert f"{cores + 1} threads on {cores} core" in result.stderr and "-t auto is faster" in result.stderr
    assert "threads on" not in edgeq("run", demo, "-p", PROMPT, "-n", 2, "-t", cores, *REFERENCE).stderr


def test_run_makes_the_context_long_enough_for_its_prompt(
    edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch, template: Path
) -> None:
    for name in ("edgeq.runtime.session.context_size.DEFAULT_CONTEXT", "edgeq.tools.commands.run.DEFAULT_CONTEXT"):
        monkeypatch.setattr(name, 64)
    monkeypatch.setattr("edgeq.tools.commands.run.SHORT_PROMPT", 8)
    prompt = "import os\n" * 40

    def facts(*options: object) -> dict:  # type: ignore[type-arg]
        return objects(edgeq("run", demo, "-n", 6, "--json", *options, *REFERENCE))

    long = facts("-p", prompt)
    assert long["context"] == long["generation"]["prompt_tokens"] + 6 > 64
    assert facts("-p", "import os")["context"] == 64
    chat = facts("-p", prompt, "--chat", "--chat-template", template)
    assert chat["context"] == chat["generation"]["prompt_tokens"] + 6 > long["context"]
    refused = edgeq("run", demo, "-p", prompt, "-c", 64, *REFERENCE)
    assert refused.exit_code == 1 and "pass a larger -c" in refused.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_seed_gives_the_same_text_and_another_seed_another(edgeq: Run, demo: Path, target: str) -> None:
    def text(seed: int) -> str:
        options = ("--temp", 1.2, "--seed", seed, "-n", 24, "-t", 1, "--target", target)
        return str(objects(edgeq("run", demo, "-p", PROMPT, "--json", *options))["text"])

    assert text(5) == text(5) != text(6)


def test_a_prompt_from_a_file_and_from_a_pipe_is_the_same_prompt(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    options = ("-n", 6, "--json", *REFERENCE)
    texts = [
        objects(edgeq("run", demo, "-p", PROMPT, *options))["text"],
        objects(edgeq("run", demo, "-f", file, *options))["text"],
        objects(edgeq("run", demo, *options, input=PROMPT + "\n"))["text"],
        objects(edgeq("run", demo, "-f", "-", *options, input=PROMPT + "\n"))["text"],
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_stop_ends_the_text_before_the_string(edgeq: Run, demo: Path) -> None:
    whole = objects(edgeq("run", demo, "-p", PROMPT, "-n", 24, "--json", *REFERENCE))["text"]
    word = next(w for w in whole.split() if len(w) > 3)
    cut = objects(edgeq("run", demo, "-p", PROMPT, "-n", 24, "--json", "--stop", word, *REFERENCE))
    assert cut["finish_reason"] == "stop" and cut["text"] == whole[: whole.index(word)]
