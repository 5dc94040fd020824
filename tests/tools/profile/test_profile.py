"""The command: records, formats, and what is kept of a run that does not end."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner, Result

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.errors import FormatError, InputError
from edgeq.runtime.session.requantize import Requantization
from edgeq.targets.cpu.program import CpuProgram
from edgeq.targets.rows import Rows
from edgeq.tools.cli.main import main
from edgeq.tools.commands import bench
from edgeq.tools.measure import conditions
from edgeq.tools.measure.measurement import MeasuredTest, measurement
from edgeq.tools.profile import command, findings
from edgeq.tools.profile import record as saved
from edgeq.tools.profile.collect import Plan, Profile, collect
from edgeq.tools.profile.record import SCHEMA, read, write
from edgeq.tools.profile.runs import Combination, RunSample, Setting
from tests.tools.profile.conftest import TINY_LLAMA

SHORT = ("-p", "16", "-n", "4", "-r", "2", "-t", "1", "--target", "cpu")


def edgeq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def record(**changes: Any) -> MeasuredTest:
    facts = {"mhz": 2000.0, "threads": 1, "celsius": None}
    known = {"kind": "tg", "test": "tg4", "tokens": 4, "depth": 0, "batch": 1, "context": 8, "facts": facts}
    return MeasuredTest(**{**known, "samples_s": [0.4, 0.2, 0.8], "step_s": [0.1] * 12, **changes})


def test_every_combination_has_its_rows(profiled: Profile) -> None:
    records = profiled.measurements()
    assert not profiled.partial
    kinds = [(r.kind, r.facts["mode"]) for r in records if r.kind != "compile"]
    assert kinds == [(kind, mode) for mode in ("a16", "a8") for kind in ("load", "ttft", "pp", "tg", "tg")]
    for r in records:
        assert all(x > 0 for x in r.samples_s)
        if r.kind == "tg":
            assert len(r.step_s) == 24 and len(r.samples_s) == 3 and len(r.instrumented_s) == 24
            assert sum(r.step_s) == pytest.approx(sum(r.samples_s), rel=1e-6)
            assert r.bytes_per_s and r.read_bandwidth and r.bandwidth_share == r.bytes_per_s / r.read_bandwidth
        waited = conditions.core_wait_s() is not None and r.kind not in ("compile", "load")
        assert (r.core_wait is not None) == waited and (r.core_wait is None or r.core_wait >= 0)
    assert len(profiled.moments) == 4 * 6 and all(moment.rss > 0 for moment in profiled.moments)


def test_percentiles_need_values() -> None:
    assert record().percentile(50) == pytest.approx(0.1) and record().percentile(95) is None
    many = record(step_s=[float(i) for i in range(1, 101)])
    assert many.percentile(95) == pytest.approx(95.05) and many.percentile(99) == pytest.approx(99.01)
    assert record(step_s=[0.1] * 99).percentile(99) is None


def test_rates_and_overhead_are_of_medians() -> None:
    assert record().tokens_per_s == pytest.approx(10) and record(batch=3).tokens_per_s == pytest.approx(30)
    assert record(kind="load").tokens_per_s is None
    assert record(instrumented_s=[0.1, 0.11, 9.0]).overhead == pytest.approx(0.1) and record().overhead is None


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, []),
        ({"facts": {"mhz": None, "threads": 2}}, ["clocks"]),
        ({"facts": {"mhz": 2.0}}, ["threads"]),
        ({"context": 0}, ["context"]),
    ],
)
def test_a_record_says_what_it_lacks(changes: dict[str, Any], missing: list[str]) -> None:
    assert record(**changes).incomplete == missing and record(**changes).fields()["incomplete"] == missing


def test_records_are_read_as_they_were_written(profiled: Profile) -> None:
    for r in profiled.measurements():
        assert measurement(json.loads(json.dumps(r.fields()))) == r


DAMAGED: list[dict[str, Any]] = [
    {"samples_s": [float("nan")]},
    {"samples_s": "x"},
    {"samples_s": []},
    {"samples_s": [1e-320]},
    {"samples_s": [1.0] * 3, "step_s": [0.1] * 4},
    {"samples_s": [], "step_s": [0.1]},
    {"test": None},
    {"test": "\x1b[2J"},
    {"mode": ["a8"]},
    {"threads": {"1": 1}},
    {"identity": "0" * 300},
    {"load": float("nan")},
    {"cores": 10**400},
]


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(InputError, match="give a file that"):
        read(path)
    for text in ("", "[" * 100_000, "[1]", '{"schema": "other"}', json.dumps({"schema": SCHEMA, "measurements": [1]})):
        path.write_text(text)
        with pytest.raises(FormatError):
            read(path)
    for bad in ({}, *({**record().fields(), **changes} for changes in DAMAGED)):
        with pytest.raises(FormatError):
            measurement(bad)
    write(path, {"schema": SCHEMA, "measurements": []})
    assert read(path)["measurements"] == [] and list(tmp_path.iterdir()) == [path]


def test_what_has_no_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MAX_PROFILE_BYTES", 1 << 20)
    with pytest.raises(FormatError, match="larger than 1 MB"):
        read(Path("/dev/zero"))


@pytest.mark.exhaustive
def test_the_formats(tiny: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    result = edgeq("profile", tiny, *SHORT, "--mode", "a16,a8", "-o", "json", "--save", kept)
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert made["schema"] == SCHEMA and made["partial"] is False and json.loads(kept.read_text()) == made
    tests = [(r["test"], r["mode"]) for r in made["measurements"] if r["kind"] in ("pp", "tg")]
    assert tests == [(test, mode) for mode in ("a16", "a8") for test in ("pp16", "tg4")]
    shown = edgeq("profile", tiny, *SHORT, "--no-operations", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(shown.stdout)))
    assert [row["test"] for row in rows if row["kind"] in ("pp", "tg")] == ["pp16", "tg4"] and "overhead" in rows[0]
    text = edgeq("profile", tiny, *SHORT)
    assert text.exit_code == 0 and "| tg4 " in text.stdout and "+ bubble" in text.stdout and "Energy: " in text.stdout


@pytest.mark.exhaustive
def test_drafts_and_minutes(tiny: Path, tmp_path: Path) -> None:
    """Runs in a cheaper mode and runs that check drafts are apart from the others; settings that are the same run once."""
    more = ("--draft", "off,qspec", "--gamma", "2", "--sustained", "0.005", "--what-if", "bits=3", "--mode", "a16")
    first = edgeq("profile", tiny, "-p", "0", "-n", "8", "-r", "1", "-t", "1,1", *more, "-o", "json", "--save", tmp_path / "a")
    made = json.loads(first.stdout)
    tests = {record["test"]: record for record in made["measurements"] if record["kind"] == "tg"}
    plain, drafted = "tg8 of code @ d256", "tg8 of code, draft qspec 2 @ d256"
    assert list(tests) == ["tg8", plain, drafted]
    assert [tests[name]["draft"] for name in tests] == ["off", "off", "qspec"] and tests[plain]["tokens_per_run"] is None
    assert 1 <= tests[drafted]["tokens_per_run"] <= 3 and tests[drafted]["bytes_per_s"] is None and tests[plain]["bytes_per_s"]
    phases = {operations["test"]: {line["phase"] for line in operations["lines"]} for operations in made["operations"]}
    assert phases["tg8"] == phases[plain] == {"decode"} and {"draft", "verify"} <= phases[drafted]
    assert all(operations["closure"] == pytest.approx(1, abs=0.05) for operations in made["operations"])
    assert made["sustained"]["passes"] and len(made["what_if"]) == 2 and made["what_if"][0]["expected"] > 0
    words = ("-p", "0", "-n", "8", "-r", "1", "-t", "1", "--mode", "a16", "--no-operations", "--baseline", tmp_path / "a")
    again = edgeq("profile", tiny, *words)
    assert again.exit_code == 0 and "A: " in again.stdout and "without an interval" in again.stdout
    other = edgeq("profile", tiny, *words[:3], "4", *words[4:])
    assert other.exit_code == 0 and "no test in common" in other.stderr and "| tg4 " in other.stdout


def test_an_interrupt_keeps_what_was_measured(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, runs, run = tmp_path / "kept.json", [0], Combination.run

    def interrupted(self: Combination, *arguments: Any) -> RunSample:
        runs[0] += 1
        if runs[0] == 8:  # two warm-ups of two tests, then the second test of the first round
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(Combination, "run", interrupted)
    result = edgeq("profile", tiny, *SHORT, "-o", "json", "--save", kept)
    made = json.loads(result.stdout)
    assert result.exit_code == 130 and made["partial"] is True and json.loads(kept.read_text()) == made
    assert [r["test"] for r in made["measurements"] if r["kind"] in ("pp", "tg")] == ["pp16", "tg4"]
    runs[0] = 7
    nothing = edgeq("profile", tiny, *SHORT, "-o", "json")
    assert nothing.exit_code == 130 and not nothing.stdout


def test_an_interrupt_while_the_conditions_are_read_keeps_the_rest(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, facts = [0], conditions.facts

    def interrupted(gpu: str | None) -> dict[str, Any]:
        reads[0] += 1
        if reads[0] == 2:  # after the first run of the second test
            raise KeyboardInterrupt
        return facts(gpu)

    monkeypatch.setattr(conditions, "facts", interrupted)
    result = edgeq("profile", tiny, *SHORT, "-o", "json")
    assert result.exit_code == 130, result.stderr
    assert {r["test"] for r in json.loads(result.stdout)["measurements"] if r["kind"] in ("pp", "tg")} == {"pp16"}


def test_an_interrupt_of_a_prediction_keeps_the_profile(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgeq.tools.profile.document.predictions", interrupted)
    result = edgeq("profile", tiny, *SHORT, "--what-if", "bits=3", "-o", "json", "--save", tmp_path / "kept.json")
    made = json.loads(result.stdout)
    assert result.exit_code == 130 and "--what-if: interrupted" in result.stderr
    assert made["partial"] and not made["what_if"] and read(tmp_path / "kept.json") == made
    assert {r["test"] for r in made["measurements"] if r["kind"] in ("pp", "tg")} == {"pp16", "tg4"}


def test_what_is_not_a_file_is_not_replaced(tiny: Path, tmp_path: Path) -> None:
    pipe, empty = tmp_path / "pipe", tmp_path / "empty.json"
    os.mkfifo(pipe)
    result = edgeq("profile", tiny, *SHORT, "--save", pipe)
    assert result.exit_code == 1 and "not a regular file" in result.stderr and pipe.is_fifo()
    for other in (tiny, tmp_path / "list.json"):
        before = other.read_bytes() if other.exists() else b"[1, 2]"
        other.write_bytes(before)
        result = edgeq("profile", tiny, *SHORT, "--save", other)
        assert result.exit_code == 1 and "which is no profile" in result.stderr and other.read_bytes() == before
    empty.touch()
    command._check_place(empty)
    assert empty.exists()


def test_a_round_is_saved_when_it_ends(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves the last whole round."""
    kept, seen = tmp_path / "kept.json", []
    saved = command._saver(kept)
    monkeypatch.setattr(command, "_saver", lambda save: lambda found: (saved(found), seen.append(read(kept)))[0])
    assert edgeq("profile", tiny, *SHORT, "--no-operations", "--save", kept).exit_code == 0
    lengths = [len(r["samples_s"]) for made in seen for r in made["measurements"] if r["kind"] == "tg"]
    assert lengths == [1, 2] and all(made["partial"] for made in seen) and not read(kept)["partial"]


def test_a_termination_is_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), command.terminated():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("--gamma", "3"), "--gamma is the length of drafts, and nothing drafts here: add --draft"),
        (("--gamma", "3", "--draft", "off"), "add --draft"),
        (("-d", "100000"), "this model takes"),
        (("--image", "56x56"), "reads text alone"),
        (("--save", "/nowhere/at/all.json"), "choose another file for --save"),
        (("--mode", "a8,a9"), "'a9' is not known"),
        (("-o", "trace", "--no-operations"), "leave out --no-operations"),
        (("-n", "0", "--sustained", "1"), "--sustained decodes tokens"),
        (("-n", "0", "--what-if", "bits=3"), "--what-if works from"),
        (("--baseline", "/nowhere.json"), "/nowhere.json: No such file"),
        (("--baseline", "/nowhere.json", "-o", "csv"), "--baseline goes with -o md or html"),
        (("--what-if", "bits=3", "-o", "trace"), "--what-if is not in trace"),
        (("--what-if", "bits=3", "--target", "reference"), "not measured for --target reference"),
        (("--what-if", "threads=1000"), "cores; give at most"),
        (("--what-if", "board=h200"), "runs on CPUs only"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tiny: Path, arguments: tuple[str, ...], message: str) -> None:
    result = edgeq("profile", tiny, *arguments)
    assert result.exit_code in (1, 2) and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_clocks_are_those_of_cpufreq_else_of_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    for core, khz in enumerate(("1500000", "9000000", "2400000")):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
        (folder / "scaling_governor").write_text("ondemand\n")
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\ncpu MHz\t\t: 2600.123\n\nprocessor\t: 1\ncpu MHz\t\t: 2600.125\n")
    assert conditions.clocks(tmp_path, info) == [1500.0, 2400.0]
    assert conditions.clocks(tmp_path / "none", info) == [2600.123, 2600.125]
    assert conditions.clocks(tmp_path / "none", tmp_path / "nothing") == []
    assert conditions.power_mode(tmp_path, tmp_path / "no") == "ondemand"
    assert conditions.power_mode(tmp_path / "none", tmp_path / "no") is None


def test_the_wait_for_cores_is_that_of_all_threads(tmp_path: Path) -> None:
    for thread, text in (
        ("10", "900 2000000000 3"),
        ("11", "800 500000000 1"),
        ("12", ""),
        ("13", "no schedstat here"),
        ("14", "0 0 0"),
    ):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    assert conditions.core_wait_s(tmp_path) == 2.5
    assert conditions.core_wait_s(tmp_path / "none") is None and conditions.core_wait_s(tmp_path / "12") is None


PAGE = (Path(__file__).parent.parent.parent.parent / "docs" / "profile.md").read_text(encoding="utf-8")


def described(heading: str) -> set[str]:
    """The names in the first column of the table under a heading of docs/profile.md."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return {
        name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }


def test_the_schema_is_that_of_the_page(written: dict[str, Any]) -> None:
    assert described("key") == set(written)
    for found in written["measurements"]:
        assert described("field") == set(found)


def test_every_rule_is_on_the_page() -> None:
    rules = set(re.findall(r'Finding\(\s*"([\w ]+)"', Path(str(findings.__file__)).read_text(encoding="utf-8")))
    table = PAGE.partition("| name |")[2].partition("\n\n")[0]
    named = {name for line in table.splitlines()[2:] for name in re.findall(r"`([\w ]+)`", line.split("|")[1])}
    assert len(rules) == 13 and named == rules


def test_what_a_prompt_before_a_test_waited_is_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With requantized weights the tokens before a test are read again for every run."""
    path = tmp_path / "o.edgeq"
    convert(str(TINY_LLAMA), path, ConvertOptions(method="ttq"), lambda *_: None)
    ran, run = [0], CpuProgram._run

    def counted(program: CpuProgram, rows: Rows, *arguments: Any, **others: Any) -> Any:
        ran[0] += len(rows)
        return run(program, rows, *arguments, **others)

    monkeypatch.setattr(CpuProgram, "_run", counted)
    monkeypatch.setattr(conditions, "core_wait_s", lambda: float(ran[0]))
    tests = (bench.Test("tg", 3, 20), bench.Test("pp", 9, 20), bench.Test("pp", 5, 0))
    options = {"target": "cpu", "requantization": Requantization()}
    for waits, test in zip([[3.0] * 2, [9.0] * 2, [5.0] * 2], tests, strict=True):
        found = collect(Plan(path, (Setting(1, None, "f16"),), (test,), 2, True, options), lambda *_: None)
        assert [series.core_waits for series in found.series] == [waits]
