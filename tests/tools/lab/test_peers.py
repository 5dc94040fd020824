"""The comparison with other runtimes: the tool alone, its model, its workers, its tables; and the machine's limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type

from edgeq.format.codec import dequantize
from edgeq.format.container import ModelFile
from edgeq.runtime import Model
from edgeq.system import machine
from edgeq.targets.cpu import probes
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.isa import all_isas
from edgeq.tools.lab import roofline
from edgeq.tools.lab.peers import contest, for_edgeq, for_llama_cpp, peer, table, weights
from edgeq.tools.lab.peers.__main__ import configuration, main
from edgeq.tools.lab.peers.contest import Contest, Entry, PeerError, process
from edgeq.tools.lab.peers.peer import Stored, Times, Variant
from tests.converters.importers.gguf_files import in_type, write_gguf

CONFIG = configuration("tiny")


def compare(work: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "edgeq.tools.lab.peers", "--shape", "tiny", "-p", "8", "-n", "4", "-r", "2", "-t", "1"]
    result = subprocess.run([*command, "--work", str(work), "--json", *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.exhaustive
def test_edgeq_alone_gives_valid_json_and_keeps_its_model(tmp_path: Path) -> None:
    found = compare(tmp_path, "--only", "edgeq-a8-g128-h8,edgeq-a16")
    assert found["versions"].keys() == {"edgeq"} and not found["left_out"]
    assert [row["name"] for row in found["rows"]] == ["edgeq-a8-g128-h8", "edgeq-a16-g128-h8"]
    for row in found["rows"]:
        assert row["failure"] is None and row["in_cache"] == (row["bandwidth_share"] is None)
        assert 0 < row["decode"]["low"] <= row["decode"]["median"] <= row["decode"]["high"]
        assert row["tokens"] == 5 and row["load_s"] < row["ready_s"]
        assert (row["weight_bits"], row["head_bits"]) == (pytest.approx(4.125, abs=0.02), 8.125)
    assert found["machine"]["read_bandwidth"]["1"]["median"] > 0 and len(found["machine"]["load_before"]) == 3
    (folder,) = tmp_path.iterdir()
    before = (folder / "model.edgeq").stat().st_mtime_ns
    again = Contest(CONFIG, tmp_path, sys.executable, 8, 4, lambda *_: None)
    assert again.build(again.find(["edgeq-a8-g128-h8"])) and again.folder(peer.variants()["edgeq-a8-g128-h8"]) == folder
    assert (folder / "model.edgeq").stat().st_mtime_ns == before


@pytest.mark.exhaustive
def test_kernels_below_the_best_of_the_machine(tmp_path: Path) -> None:
    isa = next(isa.name for isa in all_isas() if isa.name != choose()[0].name and not isa.missing(machine.cpu().features))
    assert isa in compare(tmp_path, "--only", "edgeq-a8-g128-h4", "--isa", isa)["rows"][0]["settings"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--isa", "sse9"], "'sse9' is not known"), (["--isa", "portable", "--target", "cuda"], "leave it out")],
)
def test_an_instruction_set_that_cannot_run_is_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--work", str(tmp_path), *arguments])
    assert result.exit_code and words in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_published_file_is_run_as_it_is(
    tmp_path: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "m.gguf"
    write_gguf(checkpoint("llama_gqa"), model, in_type(Type.Q4_0))
    numbers = ["-p", "8", "-n", "4", "-r", "1", "-t", "1"]
    result = CliRunner().invoke(main, ["--model", str(model), *numbers, "--work", str(tmp_path / "work"), "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["model"] == "m.gguf" and set(found["left_out"]) <= {"llama.cpp"}
    rows = {row["name"]: row for row in found["rows"]}
    assert {"edgeq-as-published-a8", "edgeq-as-published-a16"} <= rows.keys()
    # Blocks of 32 weights of 4 bits with an f16 scale; output channels are filled up to a block of the kernels.
    assert all(4.5 <= row["weight_bits"] < 8 and row["tokens"] == 5 for row in rows.values())
    # llama.cpp reads as many bytes of this type.
    (tmp_path / "theirs").mkdir()
    theirs, ours = for_llama_cpp.take(model, tmp_path / "theirs"), rows["edgeq-as-published-a8"]["bytes_per_token"]
    assert theirs.weights + theirs.head == pytest.approx(ours, rel=0.1)
    assert (tmp_path / "theirs" / for_llama_cpp.NAME).samefile(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "README.md"], "not a GGUF file"),
        (["--model", "README.md", "--shape", "tiny"], "leave out --shape"),
    ],
)
def test_what_is_no_published_file_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0 and message in result.output


def test_a_peer_that_is_not_installed_is_left_out_with_the_reason(tmp_path: Path) -> None:
    c = Contest(CONFIG, tmp_path, "/nowhere/python", 8, 4, lambda *_: None)
    assert c.find(["llama.cpp-q4_0-h6"]) == [] and c.left_out == {"llama.cpp": "/nowhere/python: No such file or directory"}
    with process(sys.executable) as worker, pytest.raises(PeerError, match="ModuleNotFoundError: No module named"):
        worker.ask(do="load", variant="llama.cpp-q4_0-h6", config=CONFIG.to_json(), folder="", threads=1, context=1)


def fake_python(folder: Path, behaviour: str) -> str:
    """An interpreter that answers every request, but meets `load` of llama.cpp as told."""
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, os, signal, sys, time\n"
        "answers = {'version': '1', 'build': {'weights': 5, 'head': 3}, 'load': {'load_s': 0.1, 'settings': 'best'}}\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    if request['do'] == 'load' and request['variant'].startswith('llama'):\n"
        f"        {behaviour}\n"
        "    drawn = {'prefill_s': 0.5, 'decode_s': 0.25, 'tokens': [7] * (request.get('steps', 0) + 1)}\n"
        "    print(json.dumps({'result': answers.get(request['do'], drawn)}), flush=True)\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    "behaviour, reason",
    [
        ("print('out of luck', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)", "signal 9: out of luck"),
        ("sys.exit(3)", "its process ended with exit code 3"),
        ("print(json.dumps({'error': 'ValueError: no'}), flush=True); continue", "ValueError: no"),
    ],
    ids=["killed", "exits", "refuses"],
)
def test_a_peer_that_crashes_is_reported_and_the_others_go_on(tmp_path: Path, behaviour: str, reason: str) -> None:
    c = Contest(CONFIG, tmp_path / "work", fake_python(tmp_path, behaviour), 8, 4, lambda *_: None)
    found = c.find(["llama.cpp-q4_0-h8", "onnxruntime-b128-h8"])
    sizes = c.build(found)
    entries = [Entry(variant, 1, sizes[variant.name]) for variant in found]
    rounds: list[int] = []
    c.compete(entries, 2, lambda: rounds.append(1))
    crashed, sound = table.rows(CONFIG, entries, 8, {}, None)
    assert crashed.failure is not None and reason in crashed.failure and crashed.decode is None
    assert sound.failure is None and len(entries[1].times) == len(rounds) == 2
    assert sound.decode == table.Spread(16, 16, 16) and sound.prefill == table.Spread(16, 16, 16)
    shown = table.markdown([crashed, sound], table.MAIN)
    assert reason in shown and len({line.count("|") for line in shown.splitlines()}) == 1


def test_a_silent_worker_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "MAX_ANSWER_SECONDS", 0.2)
    with process(fake_python(tmp_path, "time.sleep(60)")) as worker:
        with pytest.raises(PeerError, match="no answer"):
            worker.ask(do="load", variant="llama.cpp-q4_0-h8")
        worker._process.kill()


def test_what_a_peer_prints_does_not_reach_the_protocol() -> None:
    shouts = "os.write(1, b'hello') and print('you') or '2'"
    noise = f"import os; import edgeq.tools.lab.peers.for_edgeq as p; p.version = lambda: {shouts}"
    noisy = contest.BOOT.replace("; from edgeq", f"; {noise}; from edgeq")
    root = str(Path(contest.edgeq.__file__).parent.parent)
    request = json.dumps({"do": "version", "peer": "edgeq"})
    result = subprocess.run([sys.executable, "-c", noisy, root], input=request, capture_output=True, text=True)
    assert result.stdout == '{"result": "2"}\n' and "hello" in result.stderr and "you" in result.stderr


def test_the_built_model_is_the_described_one(tmp_path: Path) -> None:
    for_edgeq.build(CONFIG, peer.variants()["edgeq-a8-g32-h6"], tmp_path)
    file = ModelFile.open(tmp_path / "model.edgeq")
    assert file.metadata.linears["head"].weights[0].codec.name == "i6 g32"
    down = file.metadata.linears["layers.1.down"].weights[0]
    stored = dequantize(down.codec, down.rows, down.columns, {n: file.array(ref) for n, ref in down.arrays.items()})
    q = weights.matrix("layers.1.down", down.rows, down.columns).astype(np.float32)
    np.testing.assert_array_equal(stored, (q - 8) * weights.step(down.columns))
    logits = Model.load(tmp_path / "model.edgeq", target="reference", context=8).session().prefill([1, 2, 3])
    assert np.isfinite(logits).all() and 0.05 < logits.std() < 20


def test_the_integers_are_symmetric_and_the_same_every_time() -> None:
    q = weights.matrix("layers.0.q", 64, 128)
    assert (q == weights.matrix("layers.0.q", 64, 128)).all() and (q != weights.matrix("layers.0.k", 64, 128)).any()
    assert q.min() == 1 and q.max() == 15 and abs(q.mean() - 8) < 0.2
    wide, narrow = (np.concatenate(list(weights.head_slabs(CONFIG, bits))) for bits in (8, 4))
    assert wide.shape == (CONFIG.vocab_size, CONFIG.hidden_size) and wide.min() == 1
    kept = wide >= 16
    np.testing.assert_array_equal(narrow[kept], wide[kept] >> 4)


def test_gguf_blocks_hold_the_integers() -> None:
    """Against the layouts as ggml documents them, read back element by element."""
    random = np.random.default_rng(0)
    q = random.integers(0, 16, (2, 64)).astype(np.uint8)
    four = for_llama_cpp.q4_0(q, 0.5).reshape(2, 2, 18)
    assert (four[:, :, :2].copy().view(np.float16) == 0.5).all()
    np.testing.assert_array_equal(np.concatenate([four[:, :, 2:] & 15, four[:, :, 2:] >> 4], axis=-1).reshape(2, 64), q)
    q = random.integers(0, 256, (2, 64)).astype(np.uint8)
    eight = for_llama_cpp.q8_0(q, 0.5).reshape(2, 2, 34)
    np.testing.assert_array_equal(eight[:, :, 2:].copy().view(np.int8).reshape(2, 64), q.astype(int) - 128)
    q = random.integers(0, 64, (1, 256)).astype(np.uint8)
    six = for_llama_cpp.q6_k(q, 0.5)[0]
    assert len(six) == 210 and (six[192:208] == 1).all() and six[208:].view(np.float16)[0] == 0.5
    for i in range(256):
        half, place = divmod(i, 128)
        quarter, j = divmod(place, 32)
        low = six[64 * half + 32 * (quarter % 2) + j] >> (4 * (quarter // 2)) & 15
        high = six[128 + 32 * half + j] >> (2 * quarter) & 3
        assert low | high << 4 == q[0, i]


def test_rows_of_a_head_are_interleaved_for_gguf() -> None:
    q = np.arange(8, dtype=np.uint8)[:, None]
    assert for_llama_cpp.interleaved(q, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def entry(name: str, group: int, head: int, mode: str, decode_s: float, tokens: list[int]) -> Entry:
    variant = Variant(name, name.split("-")[0], name, group, head, mode)
    return Entry(variant, 1, Stored(1_000_000_000, 200_000_000), times=[Times(2.0, decode_s, tokens)], load_s=[1.0])


def test_a_ratio_is_against_the_edgeq_with_the_same_head() -> None:
    entries = [
        entry("edgeq-a16", 128, 8, "a16", 0.3, [5, 6, 7]),
        entry("edgeq-a8-wide", 128, 8, "a8", 0.2, [5, 6, 7]),
        entry("edgeq-a8", 32, 8, "a8", 0.1, [5, 6, 7]),
        entry("other-h8", 32, 8, "", 0.4, [5, 6, 8]),
        entry("other-h6", 32, 6, "", 0.4, [5, 6, 8]),
    ]
    *_, same, apart = table.rows(CONFIG, entries, 100, {1: 24e9}, 32 << 20)
    assert same.against == "edgeq-a8" and same.decode_ratio == pytest.approx(4) and same.prefill_ratio == 1
    assert same.decode is not None and same.decode.median == 5 and same.prefill is not None and same.prefill.median == 50
    assert same.bytes_per_s == 6e9 and same.bandwidth_share == 0.25 and not same.in_cache and same.same_tokens == 2
    assert apart.against is None and apart.decode_ratio is None and apart.same_tokens is None


def test_a_model_that_fits_the_cache_has_no_share_of_bandwidth() -> None:
    (row,) = table.rows(CONFIG, [entry("edgeq-a8", 128, 8, "a8", 0.1, [1, 2])], 8, {1: 1e9}, 2_000_000_000)
    assert row.in_cache and row.bandwidth_share is None and "in cache" in table.markdown([row], table.BY_BYTES)


def test_the_last_level_cache_is_the_largest_that_the_kernel_names(tmp_path: Path) -> None:
    for i, size in enumerate(("48K", "1M", "32768K", "?")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(size + "\n", encoding="ascii")
    assert machine.last_level_cache(tmp_path) == 32 << 20 and machine.last_level_cache(tmp_path / "none") is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--threads", "0"], "--threads '0': expected numbers from 1"),
        (["--threads", "two"], "--threads 'two': expected numbers from 1"),
        (["--only", "tvm"], "--only 'tvm' fits no competitor; choose from edgeq-a8-g128-h8"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["--shape", "tiny", *arguments])
    assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output


def test_roofline_prints_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert roofline.counts(1) == [1] and roofline.counts(2) == [1, 2] and roofline.counts(6) == [1, 2, 4, 6]
    asked: list[bool] = []
    monkeypatch.setattr(probes, "read_bandwidth", lambda n, refresh: asked.append(refresh) or 12.5e9 * n)
    monkeypatch.setattr(probes, "integer_peak", lambda isa, n, refresh: 600e9 * n)
    monkeypatch.setattr(probes, "decode_threads", lambda isa, refresh: 1)
    shown = CliRunner().invoke(roofline.main, []).stdout
    assert "| 1 | 12.50 | 600 |" in shown and "decode is fastest with 1 thread\n" in shown and not any(asked)
    found = json.loads(CliRunner().invoke(roofline.main, ["--refresh", "--json"]).stdout)
    assert found["read_bandwidth"]["1"] == 12.5e9 and found["integer_peak"]["1"] == 600e9 and asked[-1]
