"""Models by their names on the hub, which a server on this machine imitates: fetched, run, listed, removed, refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from gguf import GGMLQuantizationType as Type

from tests.checkpoints.vision import TRAINED
from tests.cli.refusal import refused
from tests.converters.checkpoint.hub import Hub, served
from tests.converters.importers.gguf_files import in_type, write_gguf
from tests.converters.importers.mmproj_files import write_pair

Run = Callable[..., Result]
NAME = "hf:owner/model"
ONCE = "converting it once, into"


@pytest.fixture(scope="module")
def types(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GGUF files of a tiny model."""
    folder = tmp_path_factory.mktemp("gguf")
    for kind in (Type.Q4_0, Type.Q8_0):
        write_gguf(checkpoint("llama_gqa"), folder / f"m-{kind.name}.gguf", in_type(kind))
    return folder


def pointed(monkeypatch: pytest.MonkeyPatch, hub: Hub, cache: Path) -> None:
    """Let huggingface_hub, which reads its environment when it is imported, ask `hub`, and keep files in `cache`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(types: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: None) -> Iterator[Hub]:
    """A repository with two GGUF files, and empty caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    shutil.copytree(types, tmp_path / "files")
    with served(Hub(tmp_path / "files")) as found:
        pointed(monkeypatch, found, tmp_path)
        yield found


def rows(edgeq: Run) -> list[dict[str, Any]]:
    found = edgeq("list", "--json")
    assert found.exit_code == 0, found.stderr
    return list(json.loads(found.stdout)["models"])


def requests(hub: Hub, file: str) -> list[str | None]:
    """The ranges of every time that a file was asked for."""
    return [span for method, path, span in hub.asked if method == "GET" and path.endswith(file)]


def test_a_model_runs_by_its_name_and_is_fetched_once(edgeq: Run, hub: Hub) -> None:
    first, again = (edgeq("inspect", f"{NAME}:q4_0", "--json") for _ in range(2))
    assert first.exit_code == again.exit_code == 0, first.stderr
    assert "fetching m-Q4_0.gguf" in first.stderr and ONCE in first.stderr and not again.stderr
    assert first.stdout == again.stdout and json.loads(first.stdout)["provenance"]["method"] == "as-stored"
    assert len(requests(hub, "m-Q4_0.gguf")) == 1 and not requests(hub, "m-Q8_0.gguf")
    ran = edgeq("run", f"{NAME}:Q4_0", "-p", "def f(", "-n", 2, "--target", "reference", "--temp", 0)
    assert ran.exit_code == 0 and ran.stdout, ran.stderr


def test_an_edgeq_file_comes_first_and_needs_no_conversion(edgeq: Run, hub: Hub, demo: Path) -> None:
    shutil.copy(demo, hub.folder / "tiny.edgeq")
    found = edgeq("inspect", NAME)
    assert found.exit_code == 0 and "tiny.edgeq" in found.stdout and ONCE not in found.stderr, found.stderr
    [row] = rows(edgeq)
    assert (row["name"], row["kind"]) == (f"{NAME}:tiny", "edgeq")
    refused(edgeq("convert", NAME, "-o", demo.parent / "again.edgeq"), "tiny.edgeq is an .edgeq file already")


def test_pull_checks_the_digest_and_shows_it(edgeq: Run, hub: Hub) -> None:
    found = edgeq("pull", f"{NAME}:Q8_0", "--json")
    assert found.exit_code == 0, found.stderr
    [file] = json.loads(found.stdout)["files"]
    digest = hashlib.sha256((hub.folder / "m-Q8_0.gguf").read_bytes()).hexdigest()
    assert file["digest"] == digest == hashlib.sha256(Path(file["path"]).read_bytes()).hexdigest()
    assert Path(file["path"]).name == "m-Q8_0.gguf" and rows(edgeq)[0]["sha256"] == digest
    # What is damaged on the disk is found by the next pull, and fetched by the one after it.
    with open(file["path"], "r+b") as damaged:
        damaged.write(b"X")
    broken = edgeq("pull", f"{NAME}:Q8_0")
    assert broken.exit_code == 1 and "the hub says" in broken.stderr and "it was removed" in broken.stderr
    assert edgeq("pull", f"{NAME}:Q8_0").exit_code == 0 and len(requests(hub, "m-Q8_0.gguf")) == 2


def test_a_file_with_another_digest_is_not_kept(edgeq: Run, hub: Hub) -> None:
    hub.digests["m-Q8_0.gguf"] = "5" * 64
    found = edgeq("inspect", f"{NAME}:Q8_0")
    assert found.exit_code == 1 and "and the hub says 5555" in found.stderr.splitlines()[-1], found.stderr
    assert not rows(edgeq)


def test_a_digest_that_is_a_path_is_not_used(edgeq: Run, hub: Hub) -> None:
    hub.digests["m-Q8_0.gguf"] = "../../../evil"
    refused(edgeq("pull", f"{NAME}:Q8_0"), "the hub says no digest of m-Q8_0.gguf")


@pytest.mark.exhaustive
def test_a_killed_download_goes_on(demo: Path, tmp_path: Path) -> None:
    # huggingface_hub writes in pieces of 10 MB.
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "big.edgeq").write_bytes(demo.read_bytes().ljust(60_000_000, b"\0"))
    with served(Hub(folder, pause=1.0)) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "edgeq", "pull", NAME]
        with open(tmp_path / "killed", "wb") as output:
            child = subprocess.Popen(command, env=environment, stderr=output)
        deadline = time.monotonic() + 120
        while not (part := [*(tmp_path / "home").rglob("*.incomplete")]) or not part[0].stat().st_size:
            assert child.poll() is None and time.monotonic() < deadline, (tmp_path / "killed").read_text()
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
        kept = part[0].stat().st_size
        assert 0 < kept < 60_000_000
        listed = subprocess.run([*command[:-2], "list", "--json"], env=environment, capture_output=True, text=True, check=True)
        assert [(row["kind"], row["bytes"]) for row in json.loads(listed.stdout)["models"]] == [("unfinished", kept)]
        hub.pause, hub.cut = 0, 1
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert found.returncode == 0, found.stderr
        starts = [int(span[6:-1]) for span in requests(hub, "big.edgeq") if span and span != "bytes=0-"]
        # From where the killed run stopped, and then from where the connection was cut.
        assert len(starts) == 2 and starts[0] == kept < starts[1], hub.asked
        assert Path(found.stdout.split("  ")[0]).read_bytes() == (folder / "big.edgeq").read_bytes()


def test_a_tower_in_the_repository_is_read_before_it_is_taken(edgeq: Run, hub: Hub) -> None:
    write_pair(TRAINED, hub.folder / "see-Q8_0.gguf", hub.folder / "see-mmproj-F16.gguf")
    found = edgeq("inspect", f"{NAME}:see-Q8_0", "--json")
    assert found.exit_code == 0 and "fetching see-mmproj-F16.gguf" in found.stderr, found.stderr
    assert json.loads(found.stdout)["provenance"]["origin"]["types"] == {"F32": 122}
    files = json.loads(edgeq("pull", f"{NAME}:see-Q8_0", "--json").stdout)["files"]
    assert [Path(file["path"]).name for file in files] == ["see-Q8_0.gguf", "see-mmproj-F16.gguf"]
    # An option for towers is refused where there is none.
    assert edgeq("convert", f"{NAME}:see-Q8_0", "--dry-run", "--vision-bits", 8).exit_code == 0
    # One that is of another model is named, and the model reads text.
    other = edgeq("inspect", f"{NAME}:Q4_0", "--json")
    assert other.exit_code == 0 and "pictures are not read" in other.stderr and "qwen2vl_merger" in other.stderr, other.stderr
    assert len(requests(hub, "see-mmproj-F16.gguf")) == 1


def test_what_was_fetched_is_listed_and_removed(edgeq: Run, hub: Hub, types: Path, tmp_path: Path) -> None:
    assert edgeq("list").stdout == "no models\n"
    for quant in ("Q4_0", "Q8_0"):
        assert edgeq("inspect", f"{NAME}:{quant}").exit_code == 0
    own = tmp_path / "own.gguf"
    shutil.copy(types / "m-Q4_0.gguf", own)
    assert edgeq("inspect", own).exit_code == 0
    found = rows(edgeq)
    assert [(row["name"], row["kind"]) for row in found] == [
        (f"{NAME}:Q4_0", "gguf"),
        (f"{NAME}:Q8_0", "gguf"),
        (str(own), "converted"),
    ]
    assert all(row["converted_bytes"] for row in found[:2]) and "3 models" in edgeq("list").stdout
    removed = edgeq("rm", f"{NAME}:q8_0", own)
    assert removed.exit_code == 0 and removed.stdout.count("removed ") == 2, removed.stderr
    assert [row["name"] for row in rows(edgeq)] == [f"{NAME}:Q4_0"] and own.exists()
    assert len([*(tmp_path / "hub").rglob("blobs/*")]) == 1 and len([*(tmp_path / "cache").rglob("*.edgeq")]) == 1
    assert edgeq("rm", NAME).exit_code == 0 and edgeq("list").stdout == "no models\n"
    assert not [*(tmp_path / "hub").glob("models--*")] and not [*(tmp_path / "cache").rglob("*.edgeq")]
    refused(edgeq("rm", NAME), "not in the cache", "edgeq list")
    refused(edgeq("rm", own), "nothing is kept of it", "edgeq list")


def test_without_a_network_the_cache_is_used(edgeq: Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(edgeq("inspect", "hf:owner/other"), "no such repository")
    assert edgeq("inspect", f"{NAME}:Q4_0").exit_code == 0
    hub.url = "http://127.0.0.1:9"
    pointed(monkeypatch, hub, tmp_path)
    found = edgeq("inspect", NAME)
    assert found.exit_code == 0 and "the hub cannot be reached" in found.stderr and found.stderr.count("\n") == 1
    refused(edgeq("inspect", "hf:owner/other"), "hf:owner/other: not in the local hub cache; no connection to the hub")
    other = edgeq("inspect", f"{NAME}:Q8_0")
    assert other.exit_code == 1 and "no model 'Q8_0'" in other.stderr.splitlines()[-1]


def test_convert_takes_a_gguf_file_or_the_checkpoint(
    edgeq: Run, hub: Hub, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "o.edgeq"
    made = edgeq("convert", f"{NAME}:Q4_0", "-o", output)
    assert made.exit_code == 0 and "as-stored" in made.stderr, made.stderr
    edgeq("inspect", f"{NAME}:Q4_0")
    [cached] = (tmp_path / "cache").rglob("*.edgeq")
    assert output.read_bytes() == cached.read_bytes()
    for path in checkpoint("llama_gqa").iterdir():
        shutil.copy(path, hub.folder / path.name)
    shown = edgeq("convert", NAME, "--dry-run", "--group-size", 32)
    assert shown.exit_code == 0 and "rtn: a file of" in shown.stdout, shown.stderr


def test_a_repository_without_a_model_says_what_it_has(edgeq: Run, hub: Hub, tmp_path: Path) -> None:
    for path in hub.folder.iterdir():
        path.unlink()
    refused(edgeq("inspect", NAME), "no model that edgeq reads")
    (hub.folder / "model.safetensors").write_bytes(b"0")
    refused(edgeq("inspect", NAME), "a checkpoint", "edgeq convert owner/model -o model.edgeq")


def test_access_and_revisions(edgeq: Run, hub: Hub) -> None:
    refused(edgeq("pull", NAME, "--revision", "v9"), "no revision 'v9'")
    hub.token = "hf_right"
    refused(edgeq("pull", NAME), "access is restricted", "hf auth login")


def test_a_full_disk_is_refused_before_and_during_the_download(edgeq: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(edgeq("pull", f"{NAME}:Q4_0"), "MB free", "edgeq rm", "HF_HOME")
    assert not requests(hub, "m-Q4_0.gguf")
    monkeypatch.undo()


def test_a_disk_that_fills_up_is_one_line(edgeq: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    found = edgeq("pull", f"{NAME}:Q4_0")
    assert found.exit_code == 1 and "the disk is full" in found.stderr.splitlines()[-1], found.stderr


def test_a_name_that_is_none(edgeq: Run) -> None:
    for command in (["run", "hf:x", "-p", "x"], ["pull", "owner/model"], ["convert", "hf:a/b:", "-o", "o.edgeq"]):
        refused(edgeq(*command), "expected hf:ORG/REPO")
