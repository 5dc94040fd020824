"""The files of deploy/: the programs that read them take them, and sessions stay where their cache is."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from edgeq.tools.cli.main import main

DEPLOY = Path(__file__).parent.parent / "deploy"
BOARDS = ("127.0.0.1:8081", "127.0.0.1:8082")


def options_of_serve() -> set[str]:
    command = main.commands["serve"]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_the_options_exist() -> None:
    unit = (DEPLOY / "edgeq.service").read_text()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose["services"]["one"] == compose["services"]["two"]
    words = [*re.findall(r"(--[\w-]+)", re.findall(r"ExecStart=.*", unit)[0]), *compose["services"]["one"]["command"]]
    assert {word for word in words if word.startswith("--")} <= options_of_serve()


def test_the_two_configurations_differ_in_addresses_alone() -> None:
    plain, composed = ((DEPLOY / name).read_text() for name in ("nginx.conf", "nginx.compose.conf"))
    for ours, theirs in zip(
        (*BOARDS, "listen 127.0.0.1:8080", "/run/edgeq-nginx"),
        ("one:8080", "two:8080", "listen 8080", "/run/nginx"),
        strict=True,
    ):
        assert ours in plain
        plain = plain.replace(ours, theirs)
    without = [
        [line for line in text.splitlines() if "Test:" not in line and "compose.yaml" not in line] for text in (plain, composed)
    ]
    assert without[0] == without[1]


def test_the_unit_leaves_little_to_whoever_takes_the_server_over() -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(DEPLOY / "edgeq.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"exposure level for edgeq.service: (\d+\.\d)", done.stdout)
    assert found and float(found[1]) <= 1.5, done.stdout + done.stderr


def test_the_unit_has_no_key_that_systemd_does_not_know(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    # It looks whether the program is there.
    text = (DEPLOY / "edgeq.service").read_text().replace("/opt/edgeq/bin/edgeq", sys.executable)
    unit = tmp_path / "edgeq.service"
    unit.write_text(text)
    # Not of units of this machine that it depends on.
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "edgeq.service" not in done.stderr, done.stderr


def test_the_compose_file_is_one_by_its_specification() -> None:
    if not shutil.which("check-jsonschema"):
        pytest.skip("check-jsonschema, which has the schema of Compose files, is not installed: pip install check-jsonschema")
    command = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def proxy(folder: Path, ports: list[int]) -> Iterator[int]:
    """nginx with our configuration before servers at `ports`; its own port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    text = (DEPLOY / "nginx.conf").read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    for board, own in zip(BOARDS, ports, strict=True):
        text = text.replace(board, f"127.0.0.1:{own}")
    # Else they are the system's, which others than root cannot write to.
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    text = text.replace("http {", "http {" + "".join(f" {kind}_temp_path {folder / kind};" for kind in kinds), 1)
    (folder / "nginx.conf").write_text(text.replace("/run/edgeq-nginx.pid", str(folder / "pid")))
    arguments = ["-p", str(folder), "-c", str(folder / "nginx.conf")]
    tested = subprocess.run(["nginx", "-t", *arguments], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stderr
    process = subprocess.Popen(["nginx", "-g", "daemon off;", *arguments], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")
def test_a_session_stays_with_its_board_and_moves_when_that_is_gone(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from edgeq.runtime import Model
    from tests.runtime.server.serving import TEMPLATE, Served, serving

    source = DEPLOY.parent / "models" / "tiny-llama"
    convert = [sys.executable, "-m", "edgeq", "convert", str(source), "-o", str(tmp_path / "m.edgeq")]
    subprocess.run(convert, check=True, capture_output=True)

    def board() -> Model:
        return Model.load(tmp_path / "m.edgeq", threads=1, threads_prefill=1, context=256, chat_template=TEMPLATE)

    with ExitStack() as one, ExitStack() as two:
        boards = [one.enter_context(serving(board())), two.enter_context(serving(board()))]
        with proxy(tmp_path, [each.port for each in boards]) as port:
            through = Served(boards[0].server, port)

            def ask(session: str, **body: object) -> dict[str, object]:
                asked = {"prompt": list(range(2, 150)), "max_tokens": 2, "seed": 1, **body}
                status, _, found = through.ask("/v1/completions", asked, x_session_id=session)
                assert status == 200, found
                return found  # type: ignore[no-any-return]

            def read() -> list[int]:
                return [each.server.scheduler.totals.prompt_tokens for each in boards]

            where = {}
            for name in (f"s{i}" for i in range(12)):
                before = read()
                for _ in range(3):
                    ask(name)
                after = read()
                moved = [a != b for a, b in zip(before, after, strict=True)]
                assert sum(moved) == 1, "one conversation went to two boards"
                where[name] = moved.index(True)
            assert set(where.values()) == {0, 1}
            streamed = ask("s0", stream=True)
            assert str(streamed).count("data: ") >= 3
            first = [name for name, board in where.items() if board == 0]
            before = read()
            # One that ends answers 503 to what it has not begun.
            boards[0].server.owner.draining = True
            ask(first[0])
            one.close()
            ask(first[-1])
            after = read()
            assert after[0] == before[0] and after[1] > before[1]
