"""What a file, a prompt and options can have wrong, as the user meets it: one line, what to do, no traceback.

Exit code 2: the command line cannot be understood; 1: everything else.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.refusal import refused

Run = Callable[..., Result]
Shell = Callable[..., subprocess.CompletedProcess[str]]
REFERENCE = ("--target", "reference")


def test_the_shell_sees_one_line_and_a_failing_exit_code(shell: Shell, tmp_path: Path) -> None:
    refused(shell("run", tmp_path / "none.edgeq", "-p", "x"), "none.edgeq: no such file")
    refused(shell("convert", tmp_path / "none", "-o", tmp_path / "out.edgeq", "--offline"), "none")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["no such command 'nonsense'", "edgeq --help"]),
        (["convet"], ["did you mean 'convert'"]),
        (["--nonsense"], ["no such option '--nonsense'", "edgeq --help"]),
        (["run"], ["missing argument 'FILE'", "edgeq run --help"]),
        (["convert", "x"], ["missing option '-o' / '--output'"]),
        (["bench", "x", "-r", "0"], ["'-r' / '--repetitions'", "0 is not in the range"]),
        (["bench", "x", "--json", "-o", "csv"], ["--json", "-o csv", "edgeq bench --help"]),
        (["run", "x", "-n", "many"], ["'-n' / '--tokens'", "'many' is not a valid integer"]),
        (["run", "x", "-t", "many"], ["'-t' / '--threads'", "'many'", "auto"]),
        (["run", "x", "--temperature", "1"], ["no such option '--temperature'", "'--temp'"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_a_usage_error_is_one_line_that_names_the_option(edgeq: Run, arguments: list[str], words: list[str]) -> None:
    result = edgeq(*arguments)
    line = result.stderr[:7] + result.stderr[7:].replace("Did you", "did you")
    assert line == line.splitlines()[0] + "\n" and line.startswith("error: ")
    assert bool(result.stdout) is ("--json" in arguments)
    assert result.exit_code == 2 and all(word in line for word in words), line


def test_no_command_at_all_is_answered_with_the_help(edgeq: Run) -> None:
    assert "Commands:" in edgeq().output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", [["inspect"], ["run", "-p", "x", "-n", "2"], ["bench", "-p", "4", "-n", "0", "-r", "1"]])
def test_output_that_cannot_be_written(demo: Path, command: list[str]) -> None:
    line = [sys.executable, "-m", "edgeq", command[0], str(demo), *command[1:]]
    with open("/dev/full", "w") as full:
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "error: No space left on device"
    assert "Traceback" not in result.stderr and "ignored" not in result.stderr


def test_standard_streams_that_are_closed(demo: Path) -> None:
    line = shlex.join([sys.executable, "-m", "edgeq", "run", str(demo), "-n", "2"])
    for closed, words in ((f"{line} -p x >&-", ""), (f"{line} <&-", "no prompt")):
        result = subprocess.run(["bash", "-c", closed], capture_output=True, text=True, timeout=600)
        assert "Traceback" not in result.stderr and words in result.stderr


def test_a_source_to_compare_with_that_is_damaged(edgeq: Run, demo: Path, copy: Path) -> None:
    weights = copy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    refused(
        edgeq("compare", demo, "--against", copy, "--limit", 64, "--window", 32), "truncated or damaged", "download it again"
    )


def test_numbers_of_thousands_of_digits(edgeq: Run, demo: Path) -> None:
    digits = "9" * 5000
    for options, words in ((["-t", digits], "threads"), (["--gamma", digits], "gamma"), (["-p", digits], "--prompt")):
        refused(edgeq("bench", demo, *options), words, code=2)


# What a file can have wrong.


def test_a_file_that_is_something_else(edgeq: Run, tiny_llama: Path) -> None:
    for command in (["inspect"], ["run", "-p", "x"], ["bench"], ["chat"]):
        refused(edgeq(command[0], tiny_llama / "config.json", *command[1:]), "not an .edgeq file; make one with: edgeq convert")


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["chat"], ["inspect"], ["bench"], ["build"]], ids=lambda x: x[0])
def test_a_model_in_another_form_is_answered_with_the_command_that_converts_it(
    edgeq: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    name, *options = command
    refused(edgeq(name, tiny_llama, *options), "a checkpoint", f"edgeq convert {tiny_llama} -o tiny-llama.edgeq")
    refused(edgeq(name, tmp_path, *options), "a folder", ".edgeq file")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF\x03\0\0\0")
    refused(edgeq(name, gguf, *options), "m.gguf: the header ends inside", "download it again")
    monkeypatch.chdir(tmp_path)
    convert = "edgeq convert meta-llama/Llama-3.2-1B -o Llama-3.2-1B.edgeq"
    refused(edgeq(name, "meta-llama/Llama-3.2-1B", *options), "no such file", "Hugging Face hub", convert)
    refused(edgeq(name, tmp_path / "none", *options), "none: no such file")


def test_a_truncated_file(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.edgeq"
    path.write_bytes(demo.read_bytes()[:100_000])
    refused(edgeq("run", path, "-p", "x"), "short.edgeq", "100000 bytes", "copy it again")


def test_flipped_bits(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "flipped.edgeq", demo.read_bytes()
    for at, words in ((20, "header"), (len(data) - 900, "metadata does not match its digest")):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        refused(edgeq("inspect", path), words)
    path.write_bytes(data[:1_000_000] + bytes([data[1_000_000] ^ 4]) + data[1_000_001:])
    assert edgeq("inspect", path).exit_code == 0
    refused(edgeq("inspect", path, "--verify"), "layers.", "is damaged", "copy or convert the file again")


def test_a_newer_version(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "new.edgeq", demo.read_bytes()
    path.write_bytes(data[:8] + struct.pack("<I", 7) + data[12:])
    refused(edgeq("run", path, "-p", "x"), "format version 7", "upgrade edgeq")


def test_a_name_from_a_file_cannot_control_the_terminal(edgeq: Run, tmp_path: Path) -> None:
    result = edgeq("inspect", tmp_path / "a\x1b[2Jb\nc.edgeq")
    refused(result, "no such file")
    assert "\x1b" not in result.stderr


# What a run can have wrong.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-p", "x " * 400, "-c", 64], ["prompt has", "context 64", "-c"]),
        (["-p", "x", "-c", 0], ["context 0"]),
        (["-p", "x", "-c", 4096], ["context 4096", "1024"]),
        (["-p", ""], ["prompt is empty"]),
        (["-p", "x", "-f", "y"], ["both -p and -f"]),
        (["-f", "/nonexistent/prompt"], ["/nonexistent/prompt"]),
        (["-p", "x", "-n", 0], ["-n is 0"]),
        (["-p", "x", "--temp", -1], ["--temp is -1"]),
        (["-p", "x", "--top-p", 2], ["--top-p is 2"]),
        (["-p", "x", "--stop", ""], ["stop"]),
        (["-p", "x", "--target", "cpu", "--isa", "mmx"], ["'mmx'", "portable"]),
        (["-p", "x", "--chat"], ["no chat template", "--chat-template"]),
        (["-p", "x", "--system", "y"], ["--chat"]),
    ],
    ids=lambda x: " ".join(map(str, x))[:30] if isinstance(x, list) else None,
)
def test_options_of_run(edgeq: Run, demo: Path, options: list[object], words: list[str]) -> None:
    target = () if "--target" in options else REFERENCE
    refused(edgeq("run", demo, *options, *target), *words)


@pytest.mark.parametrize(
    ("command", "option", "words"),
    [("run", "--temp", "--temp is -1"), ("chat", "--temp", "--temp is -1"), ("run", "-n", "-n is -1")],
)
def test_settings_of_a_text_are_checked_before_a_model_is_loaded(
    edgeq: Run, demo: Path, command: str, option: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **options: object) -> None:
        pytest.fail("kernels would be compiled first")

    monkeypatch.setattr(f"edgeq.tools.commands.{command}.load", load)
    refused(edgeq(command, demo, *(("-p", "x") if command == "run" else ()), option, -1), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "abacus"], ["'abacus'", "cuda, cpu, reference", "--target"]),
        (["--mode", "a3"], ["'a3'", "a16, a8", "--mode"]),
        (["--kv", "f32"], ["'f32'", "f16, int8, int4", "--kv"]),
        (["--draft", "dice"], ["'dice'", "qspec, lookup", "--draft"]),
        (["--seed", "-5"], ["'-5'", "random", "--seed"]),
        (["--seed", 1 << 64], ["random or a number", "--seed"]),
        (["--json", "--jsonl"], ["--json and --jsonl"]),
        (["-t", "0"], ["'0'", "auto", "--threads"]),
        (["-t", "all"], ["'all'", "auto"]),
        (["-t", "100000"], ["'100000'", "1 to 1024"]),
        (["-t", "-2"], ["'-2'", "1 to 1024"]),
        (["--threads-prefill", "0"], ["'0'", "auto", "--threads-prefill"]),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else None,
)
def test_options_of_run_that_cannot_be_understood(edgeq: Run, demo: Path, options: list[object], words: list[str]) -> None:
    refused(edgeq("run", demo, "-p", "x", *options), *words, code=2)


def test_an_instruction_set_of_another_processor_names_those_of_this_one(edgeq: Run, demo: Path) -> None:
    from edgeq.system.machine import cpu
    from edgeq.targets.cpu.isa import all_isas

    for isa in all_isas():
        if isa.missing(cpu().features):
            words = [f"isa {isa.name} needs", "this processor does not have", "can run", "portable"]
            refused(edgeq("run", demo, "-p", "x", "--target", "cpu", "--isa", isa.name), *words)


def test_a_prompt_that_is_not_text(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"\xff\xfe\x00")
    refused(edgeq("run", demo, "-f", path, *REFERENCE), "not UTF-8")


def test_a_context_that_does_not_fit_in_memory_says_the_largest_that_does(
    edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeq.targets import host

    monkeypatch.setattr(host, "available_bytes", lambda: 11 << 20)
    refused(edgeq("run", demo, "-p", "x", "-c", 1024, *REFERENCE), "context", "MiB", "pass -c")


def test_a_chat_without_template_says_what_to_pass(edgeq: Run, demo: Path) -> None:
    refused(edgeq("chat", demo, *REFERENCE, input="hello\n"), "no chat template", "--chat-template FILE")


def test_bench_without_anything_to_measure_and_beyond_the_context(edgeq: Run, demo: Path) -> None:
    refused(edgeq("bench", demo, "-p", 0, "-n", 0), "nothing to measure")
    refused(edgeq("bench", demo, "-p", 512, "-n", 0, "-d", 768, *REFERENCE), "1280", "1024", "smaller -p, -n or -d")
    refused(edgeq("bench", demo, "-p", "5;6"), "'5;6'", code=2)


def test_compare_with_another_model_or_without_enough_text(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    refused(edgeq("compare", demo, "--against", demo, "--window", 2000), "--window 2000", "at most 1024 tokens")
    text = tmp_path / "short.txt"
    text.write_text("short")
    refused(edgeq("compare", demo, "--against", demo, "--text", text, *REFERENCE), "too few for two windows")
    missing = edgeq("compare", demo, "--against", demo, "--text", tmp_path / "none", *REFERENCE)
    refused(missing, "none: cannot read it: No such file", "pass a text file, code or docs")
    assert "Errno" not in missing.stderr
    text.write_bytes(b"\xff\xfe\x00")
    refused(edgeq("compare", demo, "--against", demo, "--text", text, *REFERENCE), "not UTF-8 text")
    refused(edgeq("compare", demo, "--against", tmp_path / "nowhere", *REFERENCE), "nowhere")


def test_messages_of_the_library_show_options_on_the_command_line() -> None:
    from edgeq.tools.cli.entry import OPTIONS, SWITCHES, in_options
    from edgeq.tools.cli.main import main

    assert (
        in_options("`top_p` is 2; pass `context=64` or less, not `other=5`")
        == "--top-p is 2; pass -c 64 or less, not `other=5`"
    )
    assert in_options("pass `graphs=False`, not `graphs=True`") == "pass --no-graph, not `graphs=True`"
    params = [param for command in ("run", "chat") for param in main.commands[command].params]
    known = {name for param in params for name in param.opts}
    assert set(SWITCHES.values()) <= {name for param in params for name in param.secondary_opts}
    converting = {name for param in main.commands["convert"].params for name in param.opts}
    assert {option for name, option in OPTIONS.items() if name != "master"} <= known
    assert set(OPTIONS["master"].split()) - {"ttq"} <= converting


def test_a_prompt_in_a_locale_without_utf8_is_the_text_that_was_typed(demo: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    line = [sys.executable, "-m", "edgeq", "run", str(demo), "-n", "2", "--json", *REFERENCE, "-p"]
    result = subprocess.run([*line, "# d\u00e9j\u00e0 vu".encode()], capture_output=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["prompt"] == "# d\u00e9j\u00e0 vu"
    result = subprocess.run([*line, b"# \xff\xfe"], capture_output=True, env=environment, timeout=600)
    assert result.returncode == 1 and b"error: -p: not UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("run", "nowhere.edgeq", "-p", "x", "--json"), 1, "nowhere.edgeq: no such file"),
        (("run", "nowhere.edgeq", "-p", "x", "--jsonl"), 1, "nowhere.edgeq: no such file"),
        (("inspect", "nowhere.edgeq", "--json"), 1, "nowhere.edgeq: no such file"),
        (("bench", "nowhere.edgeq", "--json", "-n", "many"), 2, "'many'"),
        (("run", "--json", "--jsonl", "nowhere.edgeq"), 2, "exclude each other"),
        (("convert", "nowhere", "-o", "x.edgeq", "--json"), 1, "nowhere: no such folder"),
        (("compare", "--json"), 2, "missing argument"),
    ],
)
def test_with_json_an_error_is_one_json_object_too(edgeq: Run, words: tuple[str, ...], code: int, says: str) -> None:
    result = edgeq(*words)
    told = json.loads(result.stdout)
    assert result.exit_code == told["exit_code"] == code and says.lower() in told["error"].lower()
    assert result.stderr == f"error: {told['error']}\n"
    plain = edgeq(*(word for word in words if word not in ("--json", "--jsonl")))
    assert plain.stdout == "" and plain.exit_code != 0
