"""`edgeq batch`: one record for each line, in order, and the same file however often the run was ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from edgeq.errors import ResourceError

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

THREADS = ("-t", "1", "--threads-prefill", "1")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def line(name: str, body: dict[str, Any], url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests that differ in length, so that they do not end in their order, with temperature and without a seed.

    Their seeds follow from the file, in which the code that made it is named: whenever that changes they draw other texts, that
    may end earlier.
    """
    endless = {"ignore_eos": True}
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    lines = [line(f"r{i}", {"prompt": f"def f{i}(", "max_tokens": 60 - 7 * (i % 8), **endless}) for i in range(24)]
    lines[5] = line("several", {"prompt": ["import ", "class A"], "max_tokens": 9, "logprobs": 2, "model": "tiny", **endless})
    lines[6] = line("two", {"prompt": "x = ", "n": 2, "max_tokens": 20, "temperature": 1.5})
    lines[8] = line("response", {"input": "Hello", "max_output_tokens": 8, "temperature": 1.0}, "/v1/responses")
    hello = [{"role": "user", "content": "Hello"}]
    lines[7] = line("chat", {"messages": hello, "max_tokens": 8, **endless}, "/v1/chat/completions")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "t.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def whole(demo: Path, edgeq: Callable[..., Result], asked: Path, template: Path) -> bytes:
    """What a run that is never ended writes."""
    path = asked.with_name("whole.jsonl")
    result = edgeq("batch", demo, asked, "-o", path, "--chat-template", template, *THREADS)
    assert result.exit_code == 0 and result.stdout == "", result.stderr
    assert "24 of 24 requests" in result.stderr and not path.with_name("whole.jsonl.partial").exists()
    return path.read_bytes()


def test_records_are_in_the_order_of_the_lines_and_in_openais_shape(whole: bytes, asked: Path) -> None:
    records = [json.loads(each) for each in whole.splitlines()]
    names = [json.loads(each)["custom_id"] for each in asked.read_text().splitlines()]
    assert [record["custom_id"] for record in records] == names
    for record in records:
        assert record["error"] is None and record["response"]["status_code"] == 200
        assert record["id"] == record["response"]["request_id"]
    bodies = {record["custom_id"]: record["response"]["body"] for record in records}
    assert [choice["index"] for choice in bodies["several"]["choices"]] == [0, 1]
    assert len(bodies["several"]["choices"][1]["logprobs"]["tokens"]) == 9
    one, other = (choice["text"] for choice in bodies["two"]["choices"])
    assert one != other
    assert bodies["chat"]["choices"][0]["message"]["role"] == "assistant"
    response = bodies["response"]
    assert response["object"] == "response" and response["output"][0]["content"][0]["type"] == "output_text"
    assert 1 <= response["usage"]["output_tokens"] <= 8 and response["created_at"] == 0
    assert bodies["chat"]["usage"]["completion_tokens"] == 8 and bodies["r0"]["usage"]["completion_tokens"] == 60


def test_a_run_goes_on_from_what_another_left(
    demo: Path, edgeq: Callable[..., Result], asked: Path, template: Path, whole: bytes, tmp_path: Path
) -> None:
    records = whole.splitlines(keepends=True)
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    for left in (records[9] + records[2][:50], b"".join(records[::-1]), b"\0\0\xff{"):
        partial.write_bytes(left)
        result = edgeq("batch", demo, asked, "-o", out, "--chat-template", template, *THREADS)
        assert result.exit_code == 0 and out.read_bytes() == whole and not partial.exists(), result.stderr
        out.unlink()
    again = asked.with_name("whole.jsonl")
    result = edgeq("batch", demo, asked, "-o", again, "--chat-template", template, *THREADS)
    assert result.exit_code == 0 and "finished before" in result.stderr and again.read_bytes() == whole


def killed(demo: Path, asked: Path, template: Path, out: Path, records: int) -> bool:
    """Whether a run was killed once its unfinished file had so many records."""
    partial = out.with_name(out.name + ".partial")
    code = "from edgeq.tools.cli.main import main; main()"
    command = [sys.executable, "-c", code, "batch", demo, asked, "-o", out, "--chat-template", template, *THREADS]
    process = subprocess.Popen([str(each) for each in command], stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            if partial.exists() and partial.read_bytes().count(b"\n") >= records:
                return True
            time.sleep(0.001)
        return False
    finally:
        process.kill()
        process.wait()


def test_a_killed_run_begun_again_writes_the_same_file(
    demo: Path, edgeq: Callable[..., Result], asked: Path, template: Path, whole: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    assert killed(demo, asked, template, out, 6) and not out.exists()
    result = edgeq("batch", demo, asked, "-o", out, "--chat-template", template, *THREADS)
    assert "records are there from an earlier run" in result.stderr
    assert result.exit_code == 0 and out.read_bytes() == whole


@pytest.mark.exhaustive
def test_a_run_killed_at_ten_moments_writes_the_same_file(
    demo: Path, asked: Path, template: Path, whole: bytes, tmp_path: Path, edgeq: Callable[..., Result]
) -> None:
    out = tmp_path / "out.jsonl"
    assert sum(killed(demo, asked, template, out, 2 * moment) for moment in range(10)) >= 8
    assert edgeq("batch", demo, asked, "-o", out, "--chat-template", template, *THREADS).exit_code == 0
    assert out.read_bytes() == whole


@pytest.mark.exhaustive
def test_a_ray_cluster_writes_the_same_file(
    demo: Path, shell: Callable[..., Any], asked: Path, template: Path, whole: bytes, tmp_path: Path
) -> None:
    pytest.importorskip("ray.data")
    out = tmp_path / "out.jsonl"
    ray = ("--ray", "local", "--workers", 2, "--seats", 2)
    result = shell("batch", demo, asked, "-o", out, "--chat-template", template, *THREADS, *ray)
    assert result.returncode == 0 and out.read_bytes() == whole, result.stderr


def test_lines_that_cannot_be_answered_have_a_record_and_the_others_an_answer(
    demo: Path, edgeq: Callable[..., Result], tmp_path: Path
) -> None:
    good = {"prompt": "a", "max_tokens": 2}
    cases = {
        "ok": (line("ok", good), 200, None),
        "not JSON": ("{nonsense\n", 400, "invalid_json"),
        "no object": ("[1]\n", 400, "invalid_json"),
        "NaN": ('{"custom_id": "n", "body": NaN}\n', 400, "invalid_json"),
        "deep": ("[" * 90 + "]" * 90 + "\n", 400, "invalid_json"),
        "no name": (json.dumps({"method": "POST", "url": "/v1/completions", "body": good}) + "\n", 400, "invalid_line"),
        "long name": (line("n" * 300, good), 400, "invalid_line"),
        "same name": (line("ok", good), 400, "invalid_line"),
        "a method": (line("m", good).replace("POST", "GET"), 400, "invalid_line"),
        "a url": (line("u", good, "/v1/images"), 400, "invalid_line"),
        "embeddings": (line("e", {"input": "a"}, "/v1/embeddings"), 400, "invalid_line"),
        "no body": (line("b", [1]), 400, "invalid_line"),  # type: ignore[arg-type]
        "out of bounds": (line("t", good | {"temperature": 9}), 400, "invalid_value"),
        "a stream": (line("s", good | {"stream": True}), 400, "unsupported_parameter"),
        "a model": (line("o", good | {"model": "gpt-4"}), 404, "model_not_found"),
        "too long": (line("l", good | {"user": "x" * 5000}), 400, "body_too_large"),
        "more tokens than the context has": (line("c", good | {"prompt": [3] * 600}), 400, "context_length_exceeded"),
        "ok too": (line("ok too", good), 200, None),
    }
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(text for text, _, _ in cases.values()))
    # Two lines are read ahead: more than that follow one another that are refused.
    result = edgeq("batch", demo, source, "-o", out, "--max-body", "4KB", *THREADS, "-c", 512, "--seats", 1)
    assert result.exit_code == 1 and "16 of 18 lines have no answer" in result.stderr, result.stderr
    found = [json.loads(each)["response"] for each in out.read_text().splitlines()]
    for (name, (_, status, code)), response in zip(cases.items(), found, strict=True):
        assert response["status_code"] == status, (name, response)
        assert response["body"].get("error", {}).get("code") == code, (name, response)
    again = edgeq("batch", demo, source, "-o", out, "--max-body", "4KB", *THREADS, "-c", 512)
    assert again.exit_code == 1 and "finished before" in again.stderr


def test_a_line_that_failed_by_no_mistake_of_its_own_is_asked_again(
    demo: Path, edgeq: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeq.runtime.server.interfaces.batch_lines import Lines

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"r{i}", {"prompt": f"def f{i}(", "max_tokens": 5}) for i in range(6)))
    assert edgeq("batch", demo, source, "-o", out, *THREADS).exit_code == 0
    whole, asked = out.read_bytes(), list[bytes]()
    out.unlink()
    sound = Lines._asked

    def scarce(self: Lines, line: Any) -> Any:
        asked.append(line.data)
        if b"r2" in line.data or b"r4" in line.data:
            raise ResourceError("too little memory")
        return sound(self, line)

    monkeypatch.setattr(Lines, "_asked", scarce)
    result = edgeq("batch", demo, source, "-o", out, *THREADS)
    assert result.exit_code == 1 and "2 of 6 lines have no answer" in result.stderr and "asks those again" in result.stderr
    # A run that was killed on the way to asking them again.
    out.with_name("out.jsonl.partial").write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[2:4]))
    asked.clear()
    assert edgeq("batch", demo, source, "-o", out, *THREADS).exit_code == 1 and len(asked) == 2
    monkeypatch.setattr(Lines, "_asked", sound)
    assert edgeq("batch", demo, source, "-o", out, *THREADS).exit_code == 0 and out.read_bytes() == whole


def test_files_of_other_runs_are_neither_used_nor_replaced(demo: Path, edgeq: Callable[..., Result], tmp_path: Path) -> None:
    source, out, partial = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    source.write_text(line("a", {"prompt": "a", "max_tokens": 2}))

    def refused(message: str, *options: str) -> None:
        result = edgeq("batch", demo, source, "-o", out, *THREADS, *options)
        assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.stderr, result.stderr

    out.write_text("a letter\n")
    refused("is not the result")
    refused("is not the result", "--force")
    partial.write_text("another\n")
    assert out.read_text() == "a letter\n"
    out.unlink()
    refused("not the rest of a batch")
    refused("not the rest of a batch", "--force")
    assert partial.read_text() == "another\n"
    partial.unlink()
    assert edgeq("batch", demo, source, "-o", out, *THREADS).exit_code == 0
    refused("is not the result", "-c", "256")
    first = out.read_bytes()
    partial.write_bytes(first)
    other = edgeq("batch", demo, source, "-o", out, *THREADS, "-c", "256", "--force")
    assert other.exit_code == 0 and "earlier run" not in other.stderr and out.read_bytes() != first and not partial.exists()
    out.rename(partial)
    refused("records of other lines")
    partial.unlink()
    partial.symlink_to(source)
    refused("cannot write it")
    source.write_text("\n")
    refused("no lines")


def test_force_replaces_nothing_but_results_and_those_only_by_whole_ones(
    demo: Path, edgeq: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder, link, out = tmp_path / "in.jsonl", tmp_path / "folder", tmp_path / "link", tmp_path / "out.jsonl"
    source.write_text(line("a", {"prompt": "a", "max_tokens": 2}))
    folder.mkdir()
    model = tmp_path / "model.edgeq"
    model.write_bytes(demo.read_bytes())
    assert edgeq("batch", model, source, "-o", out, *THREADS).exit_code == 0
    link.symlink_to(out)
    there, others = out.read_bytes(), (source, model, folder, link)
    before = [path.read_bytes() for path in (source, model)]
    for path in others:
        result = edgeq("batch", model, source, "-o", path, "--force", *THREADS)
        assert result.exit_code == 1 and "is not the result of a batch" in result.stderr, result.stderr
    assert [path.read_bytes() for path in (source, model)] == before and link.is_symlink() and folder.is_dir()
    # A run that ends before its results are whole leaves those that were there.
    monkeypatch.setattr("edgeq.tools.commands.batch.here", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert edgeq("batch", model, source, "-o", out, "--force", *THREADS, "-c", "256").exit_code == 130
    assert out.read_bytes() == there
