"""Every command of the laboratory, from a clone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[3] / "tools" / "lab"
NAMES = sorted(
    [
        ".".join(path.relative_to(LAB).with_suffix("").parts).removesuffix(".__main__")
        for path in LAB.rglob("*.py")
        if path.name == "__main__.py" or "__main__" in path.read_text(encoding="utf-8")
    ]
)
WITHOUT = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)
"""


def test_all_commands_are_found() -> None:
    expected = {
        "arm_roofline",
        "assembly",
        "dither",
        "gpu_roofline",
        "hybrid",
        "kl_chart",
        "llama_cpp_types",
        "load",
        "make_checkpoint",
        "peers",
        "plant_outliers",
        "products",
        "quality",
        "roofline",
        "signs",
        "soak",
        "speculation",
        "training.train_policy",
        "training.train_text",
        "training.train_vision",
    }
    assert expected == set(NAMES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "dither" else pytest.mark.exhaustive) for name in NAMES]
)
def test_every_command_has_help_without_the_packages_of_the_converter(name: str) -> None:
    command = [sys.executable, "-c", WITHOUT, f"edgeq.tools.lab.{name}", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("Usage: "), result.stderr


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["edgeq.tools.lab.training.train_text", "out"], "torch"),
        (["edgeq.tools.lab.training.train_vision", "text", "out"], "torch"),
        (["edgeq.tools.lab.plant_outliers", "source", "out"], "torch"),
        # What a checkpoint holds is read without it, which a device does.
        (["edgeq", "convert", str(LAB.parents[1] / "models" / "tiny-llama"), "-o", "out.edgeq"], "transformers"),
    ],
    ids=["train_text", "train_vision", "plant_outliers", "convert"],
)
def test_a_missing_package_is_one_line(arguments: list[str], package: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    line = f'error: this needs {package}, which is not installed: pip install "edgeq[convert]"\n'
    assert (result.returncode, result.stdout, result.stderr) == (1, "", line)
    assert not any(tmp_path.iterdir())


def test_a_usage_error_is_one_line() -> None:
    result = subprocess.run([sys.executable, "-m", "edgeq.tools.lab.roofline", "--fast"], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error: no such option '--fast'")
    assert len(result.stderr.splitlines()) == 1
