"""Every command end to end on the demo model."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import Result

from edgeq import __version__, machine, records, targets
from edgeq.container import ModelFile
from edgeq.converters.methods import METHODS
from edgeq.converters.options import CHOICES
from edgeq.devices import DEVICES
from edgeq.runtime import Model
from edgeq.runtime.requantize import WHEN
from edgeq.runtime.speculative.speculator import DRAFT_SOURCES
from edgeq.targets.cpu.isa import all_isas
from edgeq.tools import chat, convert_options, options
from edgeq.tools.cli import main
from edgeq.writer import Writer

Run = Callable[..., Result]
Shell = Callable[..., subprocess.CompletedProcess[str]]
PROMPT = "def read_file(path):"
TARGETS = [name for name in targets.TARGETS if targets.load(name).refusal() is None]
REFERENCE = ("--target", "reference")


def objects(result: Result) -> dict:  # type: ignore[type-arg]
    """The JSON that is all of standard output."""
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_help_lists_the_commands_in_the_order_of_use(edgeq: Run) -> None:
    text = edgeq("--help").stdout
    places = [text.index(f"  {name} ") for name in ("convert", "run", "chat", "bench", "inspect", "compare", "devices")]
    assert places == sorted(places)


def test_short_help_is_whole_at_80_columns(edgeq: Run) -> None:
    lines = edgeq("--help").stdout.splitlines()
    listed = lines[lines.index("Commands:") + 1 : lines.index("Examples:") - 1]
    assert len(listed) == len(main.commands) and all(line.endswith(".") for line in listed)
    assert max(map(len, lines)) <= 80 and not any("..." in line for line in listed)


@pytest.mark.parametrize("command", list(main.commands))
def test_every_option_says_what_it_does(edgeq: Run, command: str) -> None:
    result = edgeq(command, "--help")
    assert result.exit_code == 0 and f"Usage: edgeq {command}" in result.stdout
    for param in main.commands[command].params:
        assert isinstance(param, click.Argument) or (param.help or "").strip().endswith((".", "]")), param.name  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["run", "bench", "convert", "chat", "compare"])
def test_long_help_has_sections_and_examples_that_parse(edgeq: Run, command: str) -> None:
    headings = [line for line in edgeq(command, "--help").stdout.splitlines() if line.endswith(":") and line[0] != " "]
    assert len(headings) >= 4 and headings[-2:] == ["Other options:", "Examples:"]
    if command != "convert":
        assert "Test-time quantization:" in headings
    examples = [line.split(" | ")[-1] for line in (main.commands[command].epilog or "").strip().splitlines()]
    for example in examples:
        _, name, *arguments = shlex.split(example)
        assert name == command and main.commands[name].make_context(name, arguments)


def test_values_are_taken_in_any_case_that_the_help_shows() -> None:
    run, bench, convert = (main.commands[name] for name in ("run", "bench", "convert"))
    given = run.make_context(
        "run", ["x", "-t", "AUTO", "--gamma", "Auto", "--mode", "A8", "--kv", "INT8", "--draft", "Off"]
    ).params
    assert (given["threads"], given["gamma"], given["mode"], given["kv"], given["draft"]) == (0, None, "a8", "int8", "off")
    assert bench.make_context("bench", ["x", "-t", "AUTO,2"]).params["threads"] == (0, 2)
    given = convert.make_context(
        "convert", ["x", "-o", "y", "--group-size", "ROW", "--method", "AWQ", "--for", "RTX-4090"]
    ).params
    assert (given["group_size"], given["method"], given["target"]) == (0, "awq", "rtx-4090")


def test_values_of_options_are_those_of_the_library_and_a_shell_completes_them() -> None:
    assert options.MODES == records.MODES and options.TARGETS == targets.TARGETS
    assert ("file", *records.KV_KINDS) == options.CACHES
    assert options.DRAFTS == DRAFT_SOURCES and options.WHEN == WHEN
    assert tuple(METHODS) == convert_options.METHODS
    assert CHOICES["dtype"][1] == convert_options.TYPES and CHOICES["master"][1] == convert_options.MASTERS
    assert CHOICES["activations"][1] == convert_options.ACTIVATIONS
    for words, expected in (
        (["run", "x", "--mode"], ["a16", "a8", "a4"]),
        (["chat", "x", "--kv"], ["file", "f16", "int8", "int4"]),
        (["convert", "x", "--method"], [*METHODS]),
        (["convert", "x", "--for"], [*DEVICES]),
    ):
        found = ShellComplete(main, {}, "edgeq", "_EDGEQ_COMPLETE").get_completions(words, "")
        assert [item.value for item in found] == expected


def test_convert_says_size_bits_and_whether_a_device_can_hold_it(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    result = edgeq("convert", tiny_llama, "-o", out, "--bits", 3, "--group-size", 32, "--sym", "--for", "raspberry-pi-5")
    assert result.exit_code == 0 and result.stdout == ""
    planned, device, *layers, size = result.stderr.strip().splitlines()
    assert planned.startswith("rtn: a file of at most ") and len(layers) == 6
    assert "bits per weight" in size and size.startswith(str(out))
    assert device.startswith("raspberry-pi-5: 0.31 GB with a context of 1024 fits in")
    facts = objects(edgeq("inspect", out, "--json"))
    assert "raspberry" not in json.dumps(facts["provenance"])
    assert {g["codec"] for g in facts["layers"] if g["part"] != "head"} == {"i3 g32"}


def test_convert_takes_a_group_per_row_and_a_head(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    assert edgeq("convert", tiny_llama, "-o", out, "--bits", 8, "--group-size", "row", "--head", 4).exit_code == 0
    layers = {g["part"]: g["codec"] for g in objects(edgeq("inspect", out, "--json"))["layers"]}
    assert layers["o"] == "i8 row zero" and layers["head"].startswith("i4")


def test_convert_without_quantizing(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    assert edgeq("convert", tiny_llama, "-o", out, "--method", "none", "--dtype", "f16").exit_code == 0
    assert {g["codec"] for g in objects(edgeq("inspect", out, "--json"))["layers"]} == {"f16"}


def test_inspect_shows_parts_codecs_bits_and_provenance(edgeq: Run, demo: Path) -> None:
    result = edgeq("inspect", demo, "--verify")
    assert result.exit_code == 0
    for fact in ("every byte verified", "i4 g128 zero", "gate_up", "4.188", "decoder 4.188, head 8.125", '  method: "rtn"'):
        assert fact in result.stdout, fact


def test_inspect_json_adds_up(edgeq: Run, demo: Path) -> None:
    facts = objects(edgeq("inspect", demo, "--json"))
    assert facts["bytes"] == demo.stat().st_size and facts["verified"] is False
    layers = sum(g["bytes"] for g in facts["layers"])
    sizes = facts["bytes_per_token"]
    assert sizes["weights"] + sizes["head"] == layers + facts["arrays"]["bytes"]
    assert facts["bits_per_weight"]["decoder"] == pytest.approx(4 + 24 / 128)


def test_inspect_lists_every_part_and_a_total_that_is_the_file(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    seen = {}
    short = ("--calibration-rows", 5, "--calibration-length", 64, "--head", 8)
    for name, given in (("ttq", ("--bits", 3)), ("resq", ("--bits", "4/4/4", *short))):
        out = tmp_path / f"{name}.edgeq"
        assert edgeq("convert", tiny_llama, "-o", out, "--method", name, *given).exit_code == 0
        facts = objects(edgeq("inspect", out, "--json"))
        blobs = sum(facts["blobs"].values())
        parts = sum(group["bytes"] for group in facts["layers"])
        assert parts + facts["arrays"]["bytes"] + blobs + facts["other_bytes"] == facts["bytes"] == out.stat().st_size
        assert 16384 < facts["other_bytes"] < 60_000
        lines = edgeq("inspect", out).stdout.splitlines()
        assert any(line.split() == ["total", f"{out.stat().st_size / 1e6:.2f}"] for line in lines)
        seen[name] = {(group["component"], group["codec"]) for group in facts["layers"]}
    assert {("weights", "i3 g32 zero"), ("low rank", "f16"), ("master", "i8 g128")} <= seen["ttq"]
    assert {("weights", "i4 row"), ("second block", "i8 row"), ("transform", "f32"), ("input order", "i32")} <= seen["resq"]


def test_a_file_with_compiled_kernels_is_listed_whole_and_runs_as_before(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    file = ModelFile.open(demo)
    writer = Writer(tmp_path / "with.edgeq")
    for index in range(len(file.segments)):
        writer.append([file.segment(index)])
    kernels = {"sm_87": writer.append([b"code" * 5000]), "sm\x1b[7m": writer.append([b"?"])}
    out = writer.finish(replace(file.metadata, kernels=kernels)).path
    before, facts = (objects(edgeq("inspect", path, "--json", "--verify")) for path in (demo, out))
    assert facts["kernels"] == {"sm_87": 20_000, "sm\x1b[7m": 1} and before["kernels"] == {}
    assert abs(facts["other_bytes"] - before["other_bytes"]) < 500
    rows = [line.split() for line in edgeq("inspect", out).stdout.splitlines()]
    assert ['"sm_87"', "kernels", "0.02"] in rows and ['"sm\\u001b[7m"', "kernels", "0.00"] in rows
    texts = [edgeq("run", path, "-p", "def main", "-n", 8, "--target", "reference").stdout for path in (demo, out)]
    assert texts[0] == texts[1] and texts[0].strip()


def test_inspect_shows_a_text_of_the_file_and_keeps_names_whole(
    edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(edgeq("inspect", demo, "--show", "tokenizer.json").stdout)["model"]
    missing = edgeq("inspect", demo, "--show", "chat_template")
    assert missing.exit_code == 1 and "no chat_template in the file; it has tokenizer.json" in missing.stderr
    monkeypatch.setenv("COLUMNS", "40")
    assert "metadata, padding" in edgeq("inspect", demo).stdout


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
    assert facts["measurement"]["prompt_tokens"] > 1 and (facts["read_bandwidth"] is None) == (target == "reference")
    expected = {"prompt": PROMPT, "model": "tiny-llama", "codec": "i4 g128 zero", "head_codec": "i8 g128", "target": target}
    assert {key: facts[key] for key in expected} == expected
    assert facts["sampling"]["temperature"] == 0 and facts["version"] == __version__ and facts["processor"]
    assert datetime.fromisoformat(facts["date"]).tzinfo and facts["load_s"] > 0 and facts["measurement"]["ttft_s"] > 0


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
    for name in ("edgeq.runtime.context_size.DEFAULT_CONTEXT", "edgeq.tools.run.DEFAULT_CONTEXT"):
        monkeypatch.setattr(name, 64)
    monkeypatch.setattr("edgeq.tools.run.SHORT_PROMPT", 8)
    prompt = "import os\n" * 40

    def facts(*options: object) -> dict:  # type: ignore[type-arg]
        return objects(edgeq("run", demo, "-n", 6, "--json", *options, *REFERENCE))

    long = facts("-p", prompt)
    assert long["context"] == long["measurement"]["prompt_tokens"] + 6 > 64
    assert facts("-p", "import os")["context"] == 64
    chat = facts("-p", prompt, "--chat", "--chat-template", template)
    assert chat["context"] == chat["measurement"]["prompt_tokens"] + 6 > long["context"]
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


def test_bench_prints_rows_as_llama_bench_names_them(edgeq: Run, demo: Path) -> None:
    options = ("-p", "8,0", "-n", "4", "-d", "0,16", "-t", "1", "-r", 2, "--target", TARGETS[0])
    rows = objects(edgeq("bench", demo, *options, "-o", "json"))
    assert [row["test"] for row in rows] == ["pp8", "pp8 @ d16", "tg4", "tg4 @ d16"]
    again = objects(edgeq("bench", demo, "-p", 0, "-n", 2, "-t", 1, "-r", 1, "--json", *REFERENCE))
    assert [row.keys() for row in again] == [rows[0].keys()]
    for row in rows:
        assert row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
        assert len(row["samples_s"]) == 2 and row["ms_per_token"] <= row["ms_per_token_p95"]
        assert len(row["step_s"]) == (8 if row["kind"] == "tg" else 0)
    assert rows[3]["bytes_per_s"] > 0 and rows[0]["bytes_per_s"] is None
    assert min(rows[0]["samples_s"]) <= rows[0]["ttft_s"] <= max(rows[0]["samples_s"])
    assert rows[0]["version"] == __version__ and rows[0]["processor"] and rows[0]["load_s"] > 0 and rows[2]["ttft_s"] is None
    assert rows[0]["codec"] == "i4 g128 zero" and rows[0]["threads"] == 1 and "facts" not in rows[0]
    assert all(0 <= row["compile_s"] <= row["load_s"] for row in rows) and rows[0]["celsius"] == machine.temperature()


def test_bench_tells_how_warm_the_machine_was_and_how_long_kernels_were_compiled(
    edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("bench", demo, "-p", 0, "-n", 2, "-t", 1, "-r", 1, *REFERENCE)
    assert " °C " not in edgeq(*words).stdout and "compiling" not in edgeq(*words).stdout
    monkeypatch.setattr(machine, "temperature", lambda: 71.5)
    plain = Model.load

    def load(path: Path, *, on_progress: Any, **options: Any) -> Model:
        for done in range(4):
            on_progress(done, 3, "compiling matmul")
            time.sleep(0.02)
        return plain(path, **options)

    monkeypatch.setattr(Model, "load", load)
    (row,) = objects(edgeq(*words, "--json"))
    assert row["celsius"] == 71.5 and 0.05 < row["compile_s"] < 60
    lines = edgeq(*words).stdout.splitlines()
    assert " s compiling" in lines[1] and " °C " in lines[3] and " 72 " in lines[5]


def test_bench_tables_have_one_line_per_row(edgeq: Run, demo: Path) -> None:
    options = ("-p", 0, "-n", "2,3", "-t", 1, "-r", 1, *REFERENCE)
    lines = edgeq("bench", demo, *options).stdout.strip().splitlines()
    about, table = lines[:2], lines[3:]
    assert len(table) == 4 and len({len(line) for line in table}) == 1 and "tg3" in table[3] and len(table[0]) <= 100
    assert about[0].startswith("tiny-llama, i4 g128 zero, head i8 g128, 3.2 MB; reference, a16; cache f16, ")
    assert about[1].startswith(f"edgeq {__version__}, {machine.cpu().name}, 20")
    table = list(csv.DictReader(io.StringIO(edgeq("bench", demo, *options, "-o", "csv").stdout)))
    assert [row["test"] for row in table] == ["tg2", "tg3"]


def test_compare_with_itself_finds_no_difference(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text(Path(__file__).read_text(encoding="utf-8"))
    options = ("--text", text, "--window", 64, "--limit", 256, "--json", *REFERENCE)
    facts = objects(edgeq("compare", demo, "--against", demo, *options))
    (file,) = facts["files"]
    assert file["kl_mean"] == 0 and file["top1_agreement"] == 1 and file["perplexity"] == facts["source"]["perplexity"]
    assert file["perplexity_ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert facts["windows"] == 4 and facts["predicted_tokens"] == 4 * 63


def test_a_source_is_scored_once_for_a_text(
    edgeq: Run, demo: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeq.converters.calibration import logits
    from edgeq.tools import kept_predictions

    options = ("--against", tiny_llama, "--window", 64, "--json", "--limit")
    monkeypatch.setattr(kept_predictions, "cache_folder", lambda: tmp_path)
    first = edgeq("compare", demo, *options, 512)
    assert "tiny-llama: scoring 512 tokens, in up to 0.7 GB of memory" in first.stderr
    runs: list[object] = []
    monkeypatch.setattr(logits, "stream_logits", lambda *arguments: runs.append(arguments))
    second = edgeq("compare", demo, *options, 512)
    assert objects(second) == objects(first) and not runs and "scoring" not in second.stderr
    monkeypatch.setattr("edgeq.tools.scorers.available_bytes", lambda: 750_000_000)
    monkeypatch.setattr("edgeq.converters.calibration.logits.available_bytes", lambda: 750_000_000)
    other = edgeq("compare", demo, *options, 8192)
    assert other.exit_code == 1 and re.search(r"scoring 8192 tokens needs 0\.8 GB .*; --limit (\d+) would fit", other.stderr)
    assert not runs


def test_compare_orders_files_by_their_bits(edgeq: Run, demo: Path, tiny_llama: Path, tmp_path: Path) -> None:
    two = tmp_path / "two.edgeq"
    assert edgeq("convert", tiny_llama, "-o", two, "--bits", 2, "--group-size", 32).exit_code == 0
    facts = objects(edgeq("compare", demo, two, "--against", tiny_llama, "--window", 128, "--limit", 1024, "--json"))
    four_bits, two_bits = facts["files"]
    assert 0 < four_bits["kl_mean"] < two_bits["kl_mean"] and four_bits["top1_agreement"] > two_bits["top1_agreement"]
    assert facts["source"]["perplexity"] < two_bits["perplexity"]
    (pair,) = facts["pairs"]
    assert pair["perplexity_ratio"]["low"] > 1
    table = edgeq("compare", demo, "--against", tiny_llama, "--window", 128, "--limit", 512)
    assert re.search(r"^tiny.edgeq +4.58 +3.2 +a16 ", table.stdout, re.M) and four_bits["bits_per_weight"] < 5
    assert table.exit_code == 0 and "against source" in table.stdout and "4 windows of 128 tokens of code" in table.stdout


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return path


def test_bench_decodes_more_texts_at_once_than_a_chunk_has_rows(edgeq: Run, demo: Path) -> None:
    result = edgeq("bench", demo, "-p", 0, "-n", 2, "--batch", 600, "-r", 1, "-t", 1)
    assert result.exit_code == 0 and "tg2 x600" in result.stdout


def test_chat_answers_every_line_and_keeps_the_conversation(edgeq: Run, demo: Path, template: Path) -> None:
    talk = "import os\n/help\n\nimport sys\n/nonsense\n/clear\n/exit\nnever read\n"
    result = edgeq("chat", demo, "--chat-template", template, "-n", 4, *REFERENCE, input=talk)
    assert result.exit_code == 0, result.stderr
    assert "unknown command /nonsense" in result.stderr and result.stderr.count("/clear forgets") == 3
    assert result.stdout.count("\n") >= 2


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
    found = re.search(r"sampling 1.2, seed (\d+)", first.stderr)
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


def test_warm_compiles_for_both_modes(edgeq: Run, demo: Path) -> None:
    result = edgeq("warm", demo, *REFERENCE)
    assert result.exit_code == 0 and result.stdout == ""
    assert "mode a16: ready after" in result.stderr and "mode a8: ready after" in result.stderr
    assert "mode a16" not in edgeq("warm", demo, "--mode", "a8", *REFERENCE).stderr


def test_devices_say_what_will_be_used(edgeq: Run) -> None:
    facts = objects(edgeq("devices", "--json"))
    assert facts["used"]["target"] == TARGETS[0] and facts["memory"]["total"] > 0
    assert "raspberry-pi-5" in {profile["name"] for profile in facts["profiles"]}
    text = edgeq("devices").stdout
    assert f"will be used: {TARGETS[0]}" in text and "jetson-orin-nano-8gb" in text
    assert re.search(r"^raspberry-pi-5 +neon-dotprod +4 +8 ", text, re.M) and " GiB available" in text
    assert sum("does not have" in line for line in text.splitlines()) == 0
    (sets,) = [line for line in text.splitlines() if line.startswith("instruction sets")]
    here, others = sets.split("; not here: ")
    for isa in facts["isas"]:
        # As people call it, once, and the name that an option takes.
        assert f"{isa['label']} (" in (others if isa["missing"] else here)
        if isa["name"] == facts["used"]["isa"]:
            assert f"with {isa['label']} ({isa['name']}): " in text
        assert sets.count(f"{isa['label']} (") == 1 and re.search(rf"[( ]{isa['name']}[ ;)]", sets)
    assert [isa["name"] for isa in facts["isas"] if isa["missing"]] == [isa["name"] for isa in facts["isas"] if isa["refused"]]


def test_instruction_sets_of_a_label_need_the_same() -> None:
    needs: dict[str, set[frozenset[str]]] = {}
    for isa in all_isas():
        needs.setdefault(isa.label, set()).add(isa.needs)
    assert {label for label, found in needs.items() if len(found) > 1} == set()


def test_an_interrupt_is_no_error_worth_a_traceback(edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgeq.tools.inspect.collect", interrupted)
    result = edgeq("inspect", demo)
    assert result.exit_code == 130 and result.stderr.strip() == ""


LOST = """
import sys, time
from edgeq.tools.entry import repeated_interrupts

class Destroyed:
    def __del__(self):
        raise KeyboardInterrupt

class Broken:
    def __del__(self):
        raise ValueError

try:
    with repeated_interrupts():
        Destroyed()
        Broken()
        time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""


def test_an_interrupt_that_a_destructor_swallows_is_heard() -> None:
    result = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=50)
    assert (result.stdout, result.stderr) == ("heard\n", "")


def test_a_reader_that_goes_away_is_no_error_worth_a_traceback(demo: Path) -> None:
    command = [sys.executable, "-c", "import edgeq.tools.cli; edgeq.tools.cli.main()", "inspect", str(demo), "--json"]
    result = subprocess.run(["bash", "-c", f"{shlex.join(command)} | head -c 10"], capture_output=True, text=True)
    assert len(result.stdout) == 10 and "Traceback" not in result.stderr and "error" not in result.stderr
