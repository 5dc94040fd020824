"""What a GPU is run under, as nvidia-smi or a board tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.tools.measure import gpu, sensors

H200 = "NVIDIA H200, 77.21, 29, 345, 570.86.15, 700.00\n"
NOTHING = dict.fromkeys(("device_mhz", "device_celsius", "device_driver", "device_power_limit", "device_power_mode"))


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The output of commands by name; without any, no command is there."""
    told: dict[str, str] = {}
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/bin/{name}" if name in told else None)
    monkeypatch.setattr(gpu, "output_of", lambda *command: told[command[0]])
    monkeypatch.setattr(gpu, "RELEASE", tmp_path / "nv_tegra_release")
    monkeypatch.setattr(gpu, "DEVFREQ", tmp_path / "devfreq")
    monkeypatch.setattr(gpu, "THERMAL", tmp_path / "thermal")
    return told


def test_nvidia_smi_may_not_know_the_power() -> None:
    assert sensors.nvml_watts(H200 + "NVIDIA H200, 80.00, 30, 345, 570.86.15, 700\n") == pytest.approx(157.21)
    with pytest.raises(ValueError, match="no GPU"):
        sensors.nvml_watts("Orin (nvgpu), [N/A], 40, 612, N/A, [N/A]\n")


def test_a_gpu_tells_its_conditions_unless_it_has_twins(nvidia_smi: dict[str, str]) -> None:
    nvidia_smi["nvidia-smi"] = H200 + "NVIDIA A2, 20, [N/A], 1.2.3, [N/A], 60\ngarbage\n"
    assert gpu.gpus(nvidia_smi["nvidia-smi"]) == [
        ("NVIDIA H200", 77.21, 29.0, 345.0, "570.86.15", 700.0), ("NVIDIA A2", 20.0, None, None, None, 60.0),
    ]  # fmt: skip
    known = {"device_mhz": 345.0, "device_celsius": 29.0, "device_driver": "570.86.15", "device_power_limit": 700.0}
    assert gpu.conditions("NVIDIA H200") == NOTHING | known
    assert gpu.conditions("NVIDIA A2") == NOTHING | {"device_power_limit": 60.0}
    assert gpu.conditions("other") == gpu.conditions(None) == NOTHING
    nvidia_smi["nvidia-smi"] += H200
    assert gpu.conditions("NVIDIA H200") == NOTHING
    del nvidia_smi["nvidia-smi"]
    assert gpu.conditions("NVIDIA H200") == NOTHING


def test_a_board_tells_them_by_files_and_nvpmodel(nvidia_smi: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "nv_tegra_release").write_text("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n")
    assert gpu.conditions("Orin") == NOTHING | {"device_driver": "L4T 36.4.3"}
    nvidia_smi["nvpmodel"] = "NV Power Mode: MAXN_SUPER\n2\n"
    for path, text in (
        ("devfreq/17000000.gpu/cur_freq", "1020000000"),
        ("thermal/thermal_zone0/type", "cpu-thermal"), ("thermal/thermal_zone0/temp", "40000"),
        ("thermal/thermal_zone1/type", "gpu-thermal"), ("thermal/thermal_zone1/temp", "51250"),
    ):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert gpu.conditions("Orin") == {
        "device_mhz": 1020.0, "device_celsius": 51.25, "device_driver": "L4T 36.4.3", "device_power_limit": None,
        "device_power_mode": "MAXN_SUPER",
    }  # fmt: skip
    nvidia_smi["nvpmodel"] = "something else"
    assert gpu.conditions("Orin")["device_power_mode"] is None


def test_a_record_without_them_is_incomplete() -> None:
    whole = {"device": "Orin", "device_mhz": 1020.0, "device_celsius": 51.0, "device_driver": "L4T 36.4.3"}
    assert gpu.lacking(whole | {"device_power_mode": "15W"}) == gpu.lacking(whole | {"device_power_limit": 60.0}) == []
    assert gpu.lacking(whole) == ["GPU power limit or mode"]
    assert gpu.lacking({"device": "Orin"}) == ["GPU driver", "GPU clock", "GPU temperature", "GPU power limit or mode"]
    assert gpu.lacking({"device": None}) == gpu.lacking({}) == []
