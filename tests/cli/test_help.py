"""Help, option values and completion."""

from __future__ import annotations

import shlex

import click
import pytest
from click.shell_completion import ShellComplete

from edgeq import targets
from edgeq.converters.families.ranking import PROMPTS
from edgeq.converters.methods import METHODS
from edgeq.converters.planning.options import CHOICES
from edgeq.format import records
from edgeq.runtime.session.requantize import WHEN
from edgeq.runtime.speculative.speculator import DRAFT_SOURCES
from edgeq.system.devices import DEVICES
from edgeq.tools.cli import convert_options, options
from edgeq.tools.cli.entry import Commands, EdgeqCommand
from edgeq.tools.cli.main import main
from tests.cli.running import Run


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
    # Files of models are put in their place by it, and examples are shown line by line.
    assert isinstance(main.commands[command], EdgeqCommand | Commands)
    for example in (main.commands[command].epilog or "").strip().splitlines():
        assert f"\n  {example.strip()}\n" in result.stdout
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
    assert CHOICES["rerank"][1] == convert_options.RANKINGS == tuple(PROMPTS)
    for words, expected in (
        (["run", "x", "--mode"], ["a16", "a8", "a4"]),
        (["chat", "x", "--kv"], ["file", "f16", "int8", "int4"]),
        (["convert", "x", "--method"], [*METHODS]),
        (["convert", "x", "--for"], [*DEVICES]),
    ):
        found = ShellComplete(main, {}, "edgeq", "_EDGEQ_COMPLETE").get_completions(words, "")
        assert [item.value for item in found] == expected
