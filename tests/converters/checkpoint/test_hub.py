"""Downloads from the hub, which a server on this machine imitates: what reaches the screen, cut connections, refusals."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edgeq
from tests.converters.checkpoint.hub import Hub, served

COMMAND = [sys.executable, "-c", "from edgeq.tools.cli.main import main; main()", "convert", "owner/model"]
OPTIONS = ["--group-size", "32"]


@pytest.fixture
def hub(checkpoint: Callable[..., Path]) -> Iterator[Hub]:
    # 52 MB: huggingface_hub writes and counts in chunks of 10.
    with served(Hub(checkpoint("llama_gqa", dtype="float32", intermediate_size=16384))) as found:
        yield found


def convert(hub: Hub, folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **hub.environment(folder / "home"), **variables}
    command = [*COMMAND, "-o", str(folder / "o.edgeq"), *OPTIONS, *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=600)


@pytest.mark.exhaustive
def test_without_a_terminal_a_download_has_a_few_lines_and_nothing_of_tqdm(hub: Hub, tmp_path: Path) -> None:
    found = convert(hub, tmp_path)
    assert found.returncode == 0 and not found.stdout, found.stderr
    lines = found.stderr.splitlines()
    progress = [line for line in lines if line.startswith("downloading owner/model: ")]
    assert 1 <= len(progress) <= 24 and re.fullmatch(r".*: ([\d.]+) of \1 MB", progress[-1]), found.stderr
    kinds = ("downloading ", "rtn: a file", "without --method ", "layer ", str(tmp_path))
    assert all(line.startswith(kinds) for line in lines), found.stderr
    # Again: everything is in the cache, and the file is there.
    again = convert(hub, tmp_path)
    assert again.returncode == 0 and "already there" in again.stderr and again.stderr.count("\n") == 1


@pytest.mark.exhaustive
def test_what_was_downloaded_once_is_converted_without_a_network(hub: Hub, tmp_path: Path) -> None:
    assert convert(hub, tmp_path).returncode == 0
    offline = convert(hub, tmp_path, "--offline", "--force")
    assert offline.returncode == 0 and "downloading" not in offline.stderr, offline.stderr


@pytest.mark.exhaustive
def test_a_connection_that_is_cut_is_continued(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 2
    found = convert(hub, tmp_path)
    assert found.returncode == 0, found.stderr
    ranges = [int(r[6:-1]) for _, path, r in hub.asked if path.endswith(".safetensors") and r and r != "bytes=0-"]
    size = (hub.folder / "model.safetensors").stat().st_size
    assert len(ranges) == 2 and size // 3 < ranges[0] < ranges[1] < size
    local = tmp_path / "local.edgeq"
    edgeq.convert(hub.folder, local, group_size=32)
    # Only the name of the source differs.
    assert local.read_bytes()[16384:1_000_000] == (tmp_path / "o.edgeq").read_bytes()[16384:1_000_000]


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        pytest.param(
            ["--revision", "v9"], {}, ["owner/model", "no revision 'v9'"], marks=pytest.mark.exhaustive, id="revision"
        ),
        pytest.param([], {"HF_TOKEN": "hf_wrong"}, ["access is restricted", "hf auth login", "HF_TOKEN"], id="gated"),
        pytest.param(
            [],
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            ["not in the local hub cache"],
            marks=pytest.mark.exhaustive,
            id="offline",
        ),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(
    hub: Hub, tmp_path: Path, options: list[str], variables: dict[str, str], words: list[str]
) -> None:
    hub.token = variables.get("HF_TOKEN", "") and "hf_right"
    found = convert(hub, tmp_path, *options, **variables)
    assert found.returncode == 1 and found.stderr.count("\n") == 1 and not found.stdout, found.stderr
    assert all(word in found.stderr for word in words), found.stderr


def test_a_repository_that_does_not_exist_is_one_line(hub: Hub, tmp_path: Path) -> None:
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    command = [*COMMAND[:-1], "owner/other", "-o", "o.edgeq"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert found.returncode == 1 and found.stderr.count("\n") == 1 and "no such repository" in found.stderr, found.stderr


@pytest.mark.exhaustive
def test_the_token_comes_from_the_environment_and_the_option_is_deprecated(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_right"
    assert convert(hub, tmp_path, HF_TOKEN="hf_right").returncode == 0
    found = convert(hub, tmp_path, "--token", "hf_right", "--force")
    assert found.returncode == 0 and "--token is deprecated" in found.stderr and "hf_right" not in found.stderr


def screen(hub: Hub, folder: Path) -> str:
    """All that a terminal gets."""
    leader, follower = pty.openpty()
    environment = {**os.environ, **hub.environment(folder / "home"), "TERM": "xterm", "COLUMNS": "100"}
    command = [*COMMAND, "-o", str(folder / "o.edgeq"), *OPTIONS]
    child = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment, cwd=folder)
    os.close(follower)
    found = b""
    while True:
        try:
            data = os.read(leader, 1 << 16)
        # What Linux answers when the last writer has gone.
        except OSError:
            break
        if not data:
            break
        found += data
    os.close(leader)
    assert child.wait() == 0, found
    return found.decode()


@pytest.mark.exhaustive
def test_a_terminal_shows_one_bar_with_bytes_and_the_time_left(hub: Hub, tmp_path: Path) -> None:
    hub.pause = 0.3
    found = screen(hub, tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found)
    size = f"{(hub.folder / 'model.safetensors').stat().st_size / 1e6:,.1f}"[:-2]
    assert re.search(rf"downloading owner/model .* {size}\.\d MB 0:00:0\d \d:\d\d:\d\d left", plain), plain
    for litter in ("Fetching", "Reconstruct", "it/s", "B/s", "Download complete"):
        assert litter not in plain, plain
    last = [line for line in plain.replace("\r", "\n").splitlines() if line.strip()][-1]
    assert last.startswith(str(tmp_path / "o.edgeq")), plain
