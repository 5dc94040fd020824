"""Sensors of power: what they say in the formats that their makers document, that they are absent, or not to be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeq.tools.measure import power, sensors
from edgeq.tools.measure.power import PowerMeter
from edgeq.tools.measure.sensors import Sensor

ADC = """\
   3V7_WL_SW_A current(0)=0.07910600A
   3V3_SYS_A current(1)=0.10000000A
   VDD_CORE_A current(7)=1.50000000A
   3V7_WL_SW_V volt(8)=3.70000000V
   3V3_SYS_V volt(9)=3.30000000V
   VDD_CORE_V volt(15)=0.80000000V
   EXT5V_V volt(24)=5.12000000V
"""


class Clock:
    """Time that passes only while somebody sleeps, in place of the time module."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_absent_sensors_are_named_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for found in (sensors.rapl(tmp_path), sensors.ina3221(tmp_path), sensors.pmic(), sensors.battery(tmp_path), sensors.nvml()):
        assert found.state == "absent" and not found.usable


def test_rapl_sums_packages_and_not_their_parts(tmp_path: Path) -> None:
    for package in (0, 1):
        for name in (f"intel-rapl:{package}", f"intel-rapl:{package}:0"):
            tree(tmp_path / name, energy_uj="2500000", max_energy_range_uj="262143328850")
    found = sensors.rapl(tmp_path)
    assert found.state == "read" and found.joules is not None and found.joules() == 5.0
    assert found.wraps_at == pytest.approx(2 * 262143.32885)


def test_what_may_not_be_read_names_the_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path / "intel-rapl:0", energy_uj="1", max_energy_range_uj="2")
    tree(tmp_path / "hwmon0", name="ina3221", in1_label="VDD_IN", in1_input="1", curr1_input="1")

    def refused(path: Path) -> float:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sensors, "_number", refused)
    rapl = sensors.rapl(tmp_path)
    assert "no permission to read" in rapl.state and "chmod a+r" in rapl.state and not rapl.usable
    assert "no permission to read" in sensors.ina3221(tmp_path).state


def test_a_jetson_is_measured_at_its_input(tmp_path: Path) -> None:
    tree(tmp_path / "hwmon0", name="cpu_thermal")
    tree(
        tmp_path / "hwmon1",
        name="ina3221",
        **{"in1_label": "VDD_IN", "in1_input": "5000", "curr1_input": "1200"},
        **{"in2_label": "VDD_CPU_GPU_CV", "in2_input": "5000", "curr2_input": "400"},
        **{"in7_label": "Sum of shunt voltages"},
    )
    found = sensors.ina3221(tmp_path)
    assert found.watts is not None and found.watts() == pytest.approx(6.0)
    (tmp_path / "hwmon1" / "in1_label").write_text("GPU\n")
    found = sensors.ina3221(tmp_path)
    assert found.watts is not None and found.watts() == pytest.approx(8.0)


def test_a_pi_adds_up_its_rails() -> None:
    assert sensors.pmic_watts(ADC) == pytest.approx(0.079106 * 3.7 + 0.33 + 1.2)
    for text in ("", 'error=1 error_msg="Command not registered"', "EXT5V_V volt(24)=5.1V\n"):
        with pytest.raises(ValueError, match="no rail"):
            sensors.pmic_watts(text)


def test_what_throttled_a_pi() -> None:
    assert sensors.throttled("throttled=0x0\n") == []
    assert sensors.throttled("throttled=0x50005") == [
        "under-voltage", "throttled", "under-voltage has occurred", "throttling has occurred",
    ]  # fmt: skip
    for text in ("", "throttled=", "throttled=0xg", "0x5"):
        with pytest.raises(ValueError, match="expected throttled"):
            sensors.throttled(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(power, "time", found)
    return found


def test_energy_of_a_gpu_counts_where_the_target_runs_on_it(clock: Clock) -> None:
    both = [Sensor("RAPL", "read", lambda: 1.0, 100.0), Sensor("NVML", "read", watts=lambda: 100.0)]
    assert PowerMeter(both, on_gpu=True, idle_seconds=0.05).idle_watts == pytest.approx(100.0)
    assert PowerMeter(both, idle_seconds=0.01).idle_watts == 0
    assert PowerMeter(both[:1], on_gpu=True, idle_seconds=0.01).idle_watts is None


def test_a_battery_counts_while_it_discharges(tmp_path: Path) -> None:
    tree(tmp_path / "AC", type="Mains")
    tree(tmp_path / "BAT0", type="Battery", status="Discharging", power_now="12500000")
    tree(tmp_path / "BAT1", type="Battery", status="Discharging", current_now="-500000", voltage_now="12000000")
    found = sensors.battery(tmp_path)
    assert found.watts is not None and found.watts() == pytest.approx(18.5)
    for name in ("BAT0", "BAT1"):
        (tmp_path / name / "status").write_text("Charging\n")
    found = sensors.battery(tmp_path)
    assert not found.usable and "unplug the charger" in found.state


def test_a_sensor_that_gives_no_number_is_unreadable(tmp_path: Path) -> None:
    tree(tmp_path / "intel-rapl:0", energy_uj="many", max_energy_range_uj="2")
    assert "no number" in sensors.rapl(tmp_path).state
    tree(tmp_path / "BAT0", type="Battery", status="Discharging", power_now="")
    assert sensors.battery(tmp_path).state.startswith("unreadable: ")


def test_energy_is_what_is_above_idle_and_a_counter_may_wrap() -> None:
    values = iter([10.0, 10.0, 95.0, 5.0])
    meter = PowerMeter([Sensor("RAPL", "read", lambda: next(values), 100.0)], idle_seconds=0.0)
    assert meter.idle_watts == 0
    with meter.measuring() as spent:
        pass
    assert spent.joules == pytest.approx(10.0)


def test_power_is_sampled_and_idle_is_subtracted(clock: Clock) -> None:
    watts = [2.0]
    meter = PowerMeter(
        [Sensor("NVML", "read", watts=lambda: 1e6), Sensor("board", "read", watts=lambda: watts[0])], idle_seconds=0.05
    )
    assert meter.idle_watts == pytest.approx(2.0)
    watts[0] = 12.0
    with meter.measuring() as spent:
        clock.sleep(0.05)
    assert spent.joules == pytest.approx(0.5) and spent.watts == pytest.approx(12.0)


def test_without_a_sensor_there_is_no_energy() -> None:
    meter = PowerMeter([Sensor("RAPL", "absent")])
    with meter.measuring() as spent:
        pass
    assert spent.joules is None and meter.idle_watts is None
    assert json.dumps(meter.described) == '[{"sensor": "RAPL", "state": "absent"}]'


def test_a_sensor_that_fails_meanwhile_gives_nothing() -> None:
    answers = [1.0, 1.0]

    def joules() -> float:
        if not answers:
            raise OSError("gone")
        return answers.pop()

    meter = PowerMeter([Sensor("RAPL", "read", joules, 100.0)], idle_seconds=0.0)
    with meter.measuring() as spent:
        pass
    assert spent.joules is None
