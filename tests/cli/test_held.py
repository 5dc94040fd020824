"""`edgeq run --json-schema` and `--grammar`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

pytest.importorskip("llguidance")

Run = Callable[..., Result]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["file", "folder"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_the_text_is_json_of_the_schema(edgeq: Run, demo: Path, tmp_path: Path, draft: str) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    result = edgeq("run", demo, "-p", "path = ", "-n", "40", "--json-schema", schema, "--draft", draft)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["kind"] in ("file", "folder")
    assert ("accepted" in result.stderr) == (draft == "lookup")


@pytest.mark.parametrize(
    ("name", "rules", "read_as"),
    [
        ("g.gbnf", 'root ::= "on" | "off"', "GBNF"),
        pytest.param("g.txt", 'root ::= "on" | "off"', "GBNF", marks=pytest.mark.exhaustive),
        ("g.lark", 'start: "on" | "off"', "Lark"),
    ],
)
def test_the_text_is_of_the_grammar(edgeq: Run, demo: Path, tmp_path: Path, name: str, rules: str, read_as: str) -> None:
    (tmp_path / name).write_text(rules)
    result = edgeq("run", demo, "-p", "x", "--grammar", tmp_path / name)
    assert result.exit_code == 0 and result.stdout.strip() in ("on", "off")
    assert f"grammar read as {read_as}" in result.stderr


@pytest.mark.parametrize(
    ("content", "options", "error"),
    [
        ('{"not": {}}', ["--json-schema"], 'Unimplemented keys: ["not"]'),
        ("{", ["--json-schema"], "not JSON"),
        ("start: nothing", ["--grammar"], "nothing"),
        (None, ["--grammar"], "cannot read it"),
    ],
)
def test_what_cannot_be_used_is_one_error(
    edgeq: Run, demo: Path, tmp_path: Path, content: str | None, options: list[str], error: str
) -> None:
    path = tmp_path / "held"
    if content is not None:
        path.write_text(content)
    result = edgeq("run", demo, "-p", "x", *options, path)
    assert result.exit_code == 1 and result.stdout == "" and error in result.stderr


def test_a_schema_and_a_grammar_exclude_each_other(edgeq: Run, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}")
    result = edgeq("run", demo, "-p", "x", "--json-schema", tmp_path / "x", "--grammar", tmp_path / "x")
    assert result.exit_code == 1 and "exclude each other" in result.stderr
