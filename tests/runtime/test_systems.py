"""Other systems than Linux, imitated: what macOS does not have is taken away; Windows is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MACOS = """
import builtins, io, mmap, os, platform, resource, select, selectors, subprocess, sys, tempfile
import click, jinja2, llvmlite.binding, numba, numpy, rich.progress, tokenizers
for module, names in {
    os: ["sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "O_TMPFILE", "O_DIRECT",
         "copy_file_range", "sendfile", "splice", "eventfd", "pidfd_open"],
    mmap: ["MADV_REMOVE", "MADV_HUGEPAGE", "MAP_POPULATE"],
    select: ["epoll"],
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
selectors.DefaultSelector, tempfile._O_TMPFILE_WORKS = selectors.PollSelector, False
sys.platform, platform.system = "darwin", lambda: "Darwin"
opened = []
def without(call):
    def opening(path, *arguments, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys")):
            opened.append(path)
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *arguments, **options)
    return opening
builtins.open = io.open = without(io.open)
os.open, os.listdir, os.scandir = without(os.open), without(os.listdir), without(os.scandir)
setrlimit = resource.setrlimit
def limited(kind, values):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    setrlimit(kind, values)
resource.setrlimit = limited
import edgeq
if not hasattr(edgeq, "targets"):
    edgeq.__path__.append(sys.argv[1])
"""
RUNS = """
from edgeq import Model; from edgeq.system import machine
assert machine.cpu().cores >= 1 and machine.memory().total > 0 and machine.big_cores() == [] and machine.process_memory() == {}
model = Model.load(sys.argv[2], target=sys.argv[3], context=128)
assert len(model.generate("def main():", max_tokens=4).text()) > 0, "no text"
assert opened, "nothing was asked of /proc: the imitation is not used"
print(model.description)
"""
LOADED = """
import sys, torch
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[2])
"""
CONVERTS = """
from edgeq.tools.cli.main import main
main(["convert", sys.argv[2], "-o", sys.argv[3], "--dry-run"])
"""


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, str(ROOT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("target", ["reference", pytest.param("cpu", marks=pytest.mark.exhaustive)])
def test_a_model_runs_without_what_macos_lacks(target: str, tiny_path: Path) -> None:
    result = run(MACOS + RUNS, tiny_path, target)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cpu, portable" if target == "cpu" else "reference"), "features come from /proc/cpuinfo"


@pytest.mark.exhaustive
def test_a_conversion_is_planned_without_what_macos_lacks(tmp_path: Path) -> None:
    # torch looks for libraries by names of its system.
    result = run(LOADED + MACOS + CONVERTS, ROOT / "models" / "tiny-llama", tmp_path / "x.edgeq")
    assert result.returncode == 0, result.stderr
    assert "bits per weight" in result.stdout + result.stderr and not list(tmp_path.iterdir())


def test_windows_is_refused_in_one_line() -> None:
    windows = "import sys\nimport numba, click, rich.progress\nsys.platform = 'win32'\n"
    command = run(windows + "from edgeq.tools.cli.main import main\nmain(['devices'])")
    said = "error: edgeq runs on Linux and macOS, not on Windows; install it in WSL, where Windows runs Linux\n"
    assert (command.returncode, command.stdout, command.stderr) == (1, "", said)
    library = run(windows + "import edgeq.runtime")
    assert library.returncode == 1 and library.stderr.endswith("ImportError: " + said.removeprefix("error: "))
