"""`edgeq build` and what it makes, from the command line: packs, and a model that runs from them on an imitated GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import InputError
from edgeq.format import kernel_pack
from edgeq.format.container import ModelFile
from edgeq.runtime import Model, Sampling
from edgeq.system import machine
from edgeq.system.trust import trusted
from edgeq.targets.cuda.supply import build as kernels
from edgeq.targets.cuda.supply import nvrtc, pack_file, supply
from edgeq.targets.cuda.supply.ahead import CudaBuilder
from edgeq.tools.commands.build import build
from tests.cuda import imitated
from tests.cuda.comparing import adapter

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("needs_generator")]

BARE = "import sys; sys.modules['tvm'] = sys.modules['nvidia'] = None; from edgeq.tools.cli.main import main; main()"
"""The command line as on a board: without TVM and NVRTC."""
FEW = [kernels.Variant("select"), kernels.Variant("scale")]
"""Kernels of a pack, where it does not matter which."""
PROMPT = ("-p", "def f(", "-n", "3", "--mode", "a16", "--kv", "f16")


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    if reason := nvrtc.refusal():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama by rtn, with its pack for sm_87 and an a16 mode."""
    pytest.importorskip("torch")
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    folder = tmp_path_factory.mktemp("built")
    source = Path(__file__).parents[3] / "models" / "tiny-llama"
    convert(str(source), folder / "tiny.edgeq", ConvertOptions(method="rtn"), lambda *_: None)
    return folder / "tiny.edgeq"


@pytest.fixture
def model(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and a place of its own for what is trusted."""
    monkeypatch.setattr("edgeq.system.trust._folder", lambda: tmp_path / "trusted")
    return Path(shutil.copy(made, tmp_path / "tiny.edgeq"))


def built(model: Path, capsys: pytest.CaptureFixture[str], *goals: str, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "mode": "a16",
        "caches": ("f16",),
        "out": None,
        "embedded": False,
        "target": None,
        "isa": None,
        **options,
    }
    build(model=model, goals=goals or ("sm_87",), as_json=True, **settings)
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.exhaustive
def test_a_second_build_has_the_same_bytes_and_compiles_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = built(model, capsys, "sm_87")
    data = kernel_pack.beside(model).read_bytes()
    second = built(model, capsys, "SM_87", out=model.with_name("other.kernels"))
    assert second["compiled"] == 0 and model.with_name("other.kernels").read_bytes() == data
    assert first["packs"][0]["digest"] == second["packs"][0]["digest"] and trusted(first["packs"][0]["digest"])
    pack = pack_file.decode(data, "pack")
    assert pack.archs == ["compute_80", "sm_87"]
    assert {v.kernel for v in pack.kernels} >= {"matvec", "matmul", "attend", "quantize_input"}
    assert not any(image.spilled for kernel in pack.kernels.values() for image in kernel.images.values())


@pytest.mark.exhaustive
def test_a_build_adds_to_a_pack_that_is_trusted(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeq.targets.cuda.supply.ahead.needed", lambda *_: (FEW, []))
    built(model, capsys, "sm_87")
    built(model, capsys, "jetson-agx-orin-64gb", "sm_90")
    assert pack_file.decode(kernel_pack.beside(model).read_bytes(), "pack").archs == ["compute_80", "sm_87", "sm_90"]
    # One that came from elsewhere would become this machine's own.
    shutil.rmtree(tmp_path / "trusted")
    with pytest.raises(InputError, match="machine code that was made elsewhere.* or give another name with -o"):
        built(model, capsys, "sm_80")
    kernel_pack.beside(model).write_bytes(b"a letter")
    with pytest.raises(InputError, match="exists and is no pack of kernels"):
        built(model, capsys, "sm_80")


@pytest.mark.exhaustive
def test_bytes_in_flight_are_computed_for_a_named_device(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = built(model, capsys, "jetson-agx-orin-64gb")["kernels"]
    (matvec,) = [row for row in rows if row["kernel"] == "matvec_4_1_0_128"]
    # 4 warps ask for 128 channels of 16 output channels each: 1 KB at 4 bits.
    assert matvec["in_flight"] == matvec["blocks"] * 4 * 1024
    assert matvec["needed"] == round(204.8e9 / 16 * 0.8e-6) and matvec["spilled"] == 0
    (fused,) = [row for row in rows if row["kernel"].startswith("fused_heads")]
    # Four warps, and the two steps of each in the next 16 output channels.
    assert fused["in_flight"] == fused["blocks"] * (4 + 8) * 1024 and not any(row["spilled"] for row in rows)
    registers = -(-matvec["registers"] * 32 // 256) * 256 * 4
    assert matvec["blocks"] == min(16, 1536 // 128, 65536 // registers, (164 << 10) // (matvec["shared"] + 1024))


@pytest.mark.exhaustive
def test_kernels_inside_the_model_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = ModelFile.open(model)
    found = built(model, capsys, "sm_87", embedded=True)
    file = ModelFile.open(model)
    assert set(file.metadata.kernels) == {"compute_80", "sm_87"} and len(found["packs"]) == 2 and list(file.verify())
    assert file.metadata.linears == before.metadata.linears and not kernel_pack.beside(model).exists()
    assert all(pack.refused is None for pack in supply.packs(file))
    # Embedded again, it is the same file.
    built(model, capsys, "sm_87", embedded=True)
    assert ModelFile.open(model).identity == file.identity


def test_a_gpu_that_is_not_known_is_refused_with_those_that_are(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sm_75", "raspberry-pi-6", "rtx-1080", "sm_8o"):
        with pytest.raises(InputError, match="supported: sm_80, sm_86, sm_87, sm_89, sm_90, compute_80, neon, .*, jetson"):
            built(model, capsys, name)


def test_compilers_whose_packs_others_refuse_make_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a torch that brings an NVRTC of its own."""
    versions = {**kernels.versions(), "nvidia-cuda-nvrtc-cu12": "12.8.93"}
    monkeypatch.setattr(kernels, "versions", lambda: versions)
    refused = CudaBuilder().refusal()
    assert refused == (
        "nvidia-cuda-nvrtc-cu12 12.8.93 is installed, whose packs are refused elsewhere; run: pip install edgeq[build]"
    )


@pytest.mark.exhaustive
def test_a_cache_that_cannot_be_written_costs_time_and_no_pack(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "file")
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path / "file")
    monkeypatch.setattr("edgeq.system.trust._folder", lambda: tmp_path / "file" / "trusted")
    monkeypatch.setattr("edgeq.targets.cuda.supply.ahead.needed", lambda *_: (FEW, []))
    found = built(model, capsys, "sm_87")
    assert found["compiled"] == 2 and pack_file.decode(kernel_pack.beside(model).read_bytes(), "pack").archs
    assert not any(pack.refused is None for pack in supply.packs(ModelFile.open(model)))


def bare(*arguments: str | Path, cache: Path, kernels: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    return imitated.run("-c", BARE, *arguments, cache=cache, kernels=kernels, **settings)


@pytest.mark.exhaustive
def test_a_model_runs_from_its_pack_on_a_machine_with_a_gpu_and_no_compilers(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command line, cuda.bindings, a pack that has to be trusted; everything but the GPU."""
    if reason := imitated.refusal():
        pytest.skip(reason)
    built(model, capsys, "sm_87")
    pack = pack_file.decode(kernel_pack.beside(model).read_bytes(), "pack")
    here: dict[str, Any] = {"cache": tmp_path / "cache", "kernels": imitated.kernels(pack.kernels, tmp_path / "kernels")}
    refused = bare("run", model, *PROMPT, "--target", "cuda", **here)
    assert refused.returncode == 1 and "pass --trust-kernels" in refused.stderr and "edgeq build" in refused.stderr
    shown = bare("inspect", model, **here).stdout
    assert f"{len(pack.kernels)} kernels; compute_80" in shown and "pass --trust-kernels" in shown
    ran = bare("run", model, *PROMPT, "--trust-kernels", "--json", **here)
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(ran.stdout)
    with Model.load(model, target="reference", mode="a16", kv="f16") as loaded:
        generation = loaded.generate("def f(", max_tokens=3, sampling=Sampling(temperature=0), ignore_eos=True)
        assert generation.text()
    assert facts["target"] == "cuda" and facts["tokens"] == generation.tokens and facts["device"] == "Imitated GPU 0"
    # Remembered; a failed kernel ends the run with one line.
    lost = bare("run", model, *PROMPT, **here, fail="cuLaunchKernel:719:20")
    assert lost.returncode == 1 and "the GPU failed in cuLaunchKernel: unspecified launch failure" in lost.stderr
    for options, settings, words in (
        (("-t", "2"), {}, "the cuda target has no threads to choose"),
        (("--isa", "sm_80"), {}, "isa 'sm_80' is not one that a GPU of sm_87 runs"),
        (("--mode", "a8"), {}, "kernels for sm_87 are missing"),
        (("-c", "1024"), {"memory": 62 << 20}, "the largest context that fits"),
        # Its driver is too old for the pack's PTX.
        ((), {"sm": 89, "driver": 12000}, "--for sm_89"),
    ):
        result = bare("run", model, *PROMPT, "--target", "cuda", *options, **here, **settings)
        assert result.returncode == 1 and words in result.stderr, (options, result.stderr)
    # Another GPU, for which the driver compiles PTX, and says so.
    newer = bare("run", model, *PROMPT, "--target", "cuda", "--json", **here, sm=120, driver=12080)
    assert newer.returncode == 0 and json.loads(newer.stdout)["tokens"] == generation.tokens, newer.stderr
    assert "compiling" in newer.stderr
    # Without --target the processor runs it and says why, and with which command a GPU would.
    other = bare("run", model, *PROMPT, **here, sm=75)
    assert other.returncode == 0 and "not on cuda: Imitated GPU 0: it is sm_75" in other.stderr
    # An adapter asks for kernels that the file alone does not.
    folder = adapter(tmp_path / "adapter", {"q_proj": (256, 256), "o_proj": (256, 256)}, (0, 3))
    changed = bare("run", model, *PROMPT, "--target", "cuda", "--json", "--lora", folder, **here)
    assert changed.returncode == 0, changed.stderr
    with Model.load(model, target="reference", mode="a16", kv="f16", adapter=folder) as loaded:
        adapted = loaded.generate("def f(", max_tokens=3, sampling=Sampling(temperature=0), ignore_eos=True)
        assert adapted.text()
    assert json.loads(changed.stdout)["tokens"] == adapted.tokens != generation.tokens
    listed = json.loads(bare("devices", "--json", **here).stdout)
    assert listed["gpus"][0]["name"] == "Imitated GPU 0" and listed["used"]["target"] == "cuda"


@pytest.mark.exhaustive
def test_without_a_gpu_a_run_says_nothing_of_one(model: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "edgeq", "run", str(model), *PROMPT, "--target", "cuda"], capture_output=True, text=True
    )
    assert result.returncode == 1 and "this machine has no NVIDIA GPU" in result.stderr
    from edgeq.targets import pick

    assert not pick(None, ModelFile.open(model)).refused
