"""`edgeq serve` as a process: it starts, answers, ends in order at a signal, and says what is wrong."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")


@contextmanager
def started(demo: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the address that it says it serves."""
    code = "from edgeq.tools.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", str(demo), "--port", "0", "-t", "1", "--threads-prefill", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while not (found := re.search(r"at (http://[^/ ]+)/v1", lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def ask(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


LONG: dict[str, Any] = {"prompt": "import ", "max_tokens": 800, "ignore_eos": True, "temperature": 0}


def test_a_signal_lets_answers_end(demo: Path) -> None:
    found: list[str] = []
    with started(demo, "--quiet") as (process, url):
        asking = threading.Thread(target=lambda: found.append(ask(url, LONG)))
        asking.start()
        while b"edgeq_running 1.0" not in urllib.request.urlopen(f"{url}/metrics", timeout=60).read():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        asking.join()
        assert process.wait(120) == 0
        assert json.loads(found[0])["usage"]["completion_tokens"] == 800
        stdout, stderr = process.communicate()
        assert stdout == "" and "Traceback" not in stderr


@pytest.mark.exhaustive
def test_a_second_signal_does_not_wait(demo: Path) -> None:
    body = json.dumps({**LONG, "stream": True, "n": 4}).encode()
    with started(demo, "--quiet") as (process, url):
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as stream:
            stream.readline()
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0


def test_what_cannot_be_served_is_one_line(demo: Path, edgeq: Callable[..., Result]) -> None:
    for options, message in {
        ("--host", "0.0.0.0"): "no key is asked for",
        ("--no-auth", "--api-key-file", "keys"): "exclude each other",
        ("--api-key-file", "nowhere"): "cannot read it",
        ("--cache-memory", "1KiB"): "less than a context",
    }.items():
        result = edgeq("serve", demo, *options)
        assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.stderr, result.stderr


def test_a_missing_package_is_named_with_its_extra(demo: Path) -> None:
    code = "import sys; sys.modules['starlette'] = None; from edgeq.tools.cli.main import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "serve", str(demo)], capture_output=True, text=True)
    assert result.returncode == 1 and 'pip install "edgeq[server]"' in result.stderr
