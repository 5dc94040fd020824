"""Weights requantized for a prompt: with which scales, when, for which session, and at what cost."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import InputError, UnsupportedError
from edgeq.format.codec import Codec, dequantize
from edgeq.format.records import LinearSpec
from edgeq.runtime import Model
from edgeq.runtime.session.requantize import Requantization, drifted, scales
from edgeq.runtime.session.runs import BatchItem, run_together
from edgeq.runtime.session.session import Session
from edgeq.targets.reference import context
from edgeq.targets.requantization import InputSums, SharedInput, Weights
from edgeq.targets.rows import Rows
from edgeq.tools.quality.corpus import evaluation_code
from edgeq.tools.quality.scorers import FileScorer
from tests.runtime.session.with_masters import matrix, with_masters

TINY_LLAMA = Path(__file__).parent.parent.parent.parent / "models" / "tiny-llama"
CODEC, MASTER = Codec("int", 3, 32, False), Codec("int", 8, 128)
TEXT = "def main(argv):\n    parser = argparse.ArgumentParser()\n    parser.add_argument('file')\n    for name in names:\n"
TOKENS = [int(t) for t in np.random.default_rng(3).integers(2, 2000, 90)]


@pytest.fixture(scope="module")
def path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_masters(tiny_path, tmp_path_factory.mktemp("masters") / "r0.edgeq", CODEC, MASTER)


@pytest.fixture(scope="module")
def low_rank_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_masters(tiny_path, tmp_path_factory.mktemp("masters") / "r8.edgeq", CODEC, MASTER, rank=8)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return Model.load(path, context=200)


def sums_of(*squares: np.ndarray, tokens: int = 20) -> InputSums:
    inputs, offset = [], 0
    for each in squares:
        inputs.append(SharedInput((), len(each), offset))
        offset += -(-len(each) // 16) * 16
    sums = InputSums(tuple(inputs), tokens=tokens)
    for view, each in zip(sums.squares(), squares, strict=True):
        view[:] = each
    return sums


def copy_of(session: Session) -> Weights:
    assert session.weights is not None
    return session.weights


def own_weights(model: Model, weights: Weights) -> list[bool]:
    """Whether each array of a copy is that of the file."""
    return [np.array_equal(a, model.file.array(ref)) for ref, a in weights.arrays.items()]


# Scales.


def test_scales_follow_the_formula() -> None:
    squares = np.array([0.0, 1, 4, 100, 2500], np.float32)
    expected = (squares + 0.4) ** 0.25
    found = scales(sums_of(squares), Requantization())[0]
    assert np.allclose(found, expected / np.sqrt(expected.max() * expected.min()), rtol=1e-6)
    per_token = scales(sums_of(squares), Requantization(per_token=True, alpha=1.0))[0]
    assert np.allclose(per_token / per_token[0], np.sqrt((squares / 20 + 0.4) / 0.4), rtol=1e-6)


def test_scales_without_damping_do_not_depend_on_the_size_of_the_input() -> None:
    squares = np.exp(np.random.default_rng(0).standard_normal(64) * 3).astype(np.float32)
    settings = Requantization(damping=0)
    plain = scales(sums_of(squares), settings)[0]
    assert np.array_equal(scales(sums_of(squares * 16), settings)[0], plain)
    assert np.allclose(scales(sums_of(squares * 3), settings)[0], plain, rtol=1e-6)


@pytest.mark.parametrize("squares", [[0, 0, 0], [0, 0, 1], [0, 1, 1e30], [1e-30, 1, 1], [3e38, 1, 0]])
def test_channels_that_see_nothing_or_too_much_leave_usable_scales(squares: list[float]) -> None:
    for damping in (0, 0.4):
        found = scales(sums_of(np.array(squares, np.float32)), Requantization(alpha=2, damping=damping))[0]
        assert np.isfinite(found).all() and found.min() > 0 and found.max() / found.min() <= 1.01e8


def test_alpha_zero_gives_scales_of_one() -> None:
    assert np.array_equal(scales(sums_of(np.array([0, 5, 9e9], np.float32)), Requantization(alpha=0))[0], np.ones(3))


def test_drift_counts_the_inputs_whose_scales_turned() -> None:
    same, other = np.ones(8, np.float32), np.array([9, 0.1] * 4, np.float32)
    settings = Requantization(when="drift")
    assert not drifted([same] * 10, [2 * same] * 10, settings)
    assert not drifted([same] * 10, [same] * 9 + [other], settings)
    assert drifted([same] * 10, [same] * 8 + [other] * 2, settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"when": "always"},
        {"when": 5},
        {"alpha": "big"},
        {"per_token": 1},
        {"min_tokens": 1.5},
        {"alpha": -1},
        {"alpha": float("nan")},
        {"damping": -0.1},
        {"min_tokens": 0},
        {"drifted": 2},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(wrong))}` is "):
        Requantization(**wrong)  # type: ignore[arg-type]


# What a session does.


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_alpha_zero_without_low_rank_is_rounding_of_the_master_bit_by_bit(path: Path, target: str) -> None:
    model = Model.load(path, target=target, context=100, requantization=Requantization(alpha=0))
    session = model.session()
    session.prefill(TOKENS[:30])
    session.requantize()
    assert all(own_weights(model, copy_of(session)))


def test_another_alpha_gives_other_weights(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS[:30])
    assert session.weights is None and session.requantize() > 0
    assert not any(own_weights(model, copy_of(session)))


@pytest.fixture(scope="module")
def planted_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with eight outlier channels in every input of a linear layer."""
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions
    from edgeq.tools.lab.plant_outliers import Kinds, plant

    folder = tmp_path_factory.mktemp("planted")
    plant(TINY_LLAMA, folder / "checkpoint", Kinds(norms=20, up=20, values=20))
    convert(str(folder / "checkpoint"), folder / "f32.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None)
    return with_masters(folder / "f32.edgeq", folder / "planted.edgeq", CODEC, Codec("bf16"))


@pytest.mark.parametrize(("which", "share"), [("planted_path", 0.95), ("path", 0.75)])
def test_the_loss_on_the_prompt_is_lower_than_that_of_plain_rounding(
    which: str, share: float, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """|| (W - Q) X ||^2 of the prompt itself: lower for 95 % of the layers where inputs have outliers, as large models' have,
    for most where they have none, and lower in the (geometric) mean."""
    model = Model.load(request.getfixturevalue(which), target="reference", context=300)
    seen: dict[str, list[np.ndarray]] = {}
    add = context.add_squares

    def record(sums: InputSums, layer: LinearSpec, x: np.ndarray, rows: Rows) -> None:
        seen.setdefault(layer.name, []).append(x.copy())
        add(sums, layer, x, rows)

    monkeypatch.setattr(context, "add_squares", record)
    session = model.session()
    session.prefill(model.text.encode(evaluation_code()[0])[:300])
    session.requantize()
    copy, losses = copy_of(session), []
    for shared, factors in zip(model.program.new_sums().inputs, copy.input_scales, strict=True):
        for layer in shared.layers:
            assert layer.master
            weight, x = layer.weights[0], np.concatenate(seen[layer.name])
            master, plain = (matrix(model.file, each) for each in (layer.master, weight))
            ours = dequantize(weight.codec, *master.shape, {n: copy.array(ref) for n, ref in weight.arrays.items()}) * factors
            loss, theirs = (np.square((w - master) @ x.T).sum() for w in (ours, plain))
            losses.append(loss / theirs)
    assert np.mean(np.array(losses) <= 1) >= share and np.log(losses).mean() < 0, losses


def test_layers_that_read_the_same_share_their_scales(tiny_path: Path, tmp_path: Path) -> None:
    whole = Model.load(tiny_path, target="reference", context=50).config
    apart = {
        f"layers.{i}.qkv": {f"layers.{i}.q": whole.query_size, f"layers.{i}.k": whole.kv_size, f"layers.{i}.v": whole.kv_size}
        for i in range(whole.num_hidden_layers)
    }
    made = with_masters(tiny_path, tmp_path / "apart.edgeq", CODEC, MASTER, apart=apart)
    results = []
    for target in ("reference", "cpu"):
        session = Model.load(made, target=target, context=50).session()
        session.prefill(TOKENS[:40])
        inputs = Model.load(made, target=target, context=50).program.new_sums().inputs
        assert [each.name for each in inputs[0].layers] == ["layers.0.q", "layers.0.k", "layers.0.v"]
        results.append(session.decode(7))
    assert np.abs(results[0] - results[1]).max() < 0.05 * np.abs(results[0]).max()


@pytest.mark.parametrize("which", ["path", "low_rank_path"])
def test_the_cpu_decodes_like_the_reference(which: str, request: pytest.FixtureRequest) -> None:
    results = []
    for target in ("reference", "cpu"):
        session = Model.load(request.getfixturevalue(which), target=target, context=200).session()
        exact = session.prefill(TOKENS[:60]).copy()
        results.append((exact, session.decode(9)))
    for ours, theirs in zip(*results, strict=True):
        assert np.abs(ours - theirs).max() < 0.02 * np.abs(theirs).max()


def test_a_prompt_runs_with_the_masters(model: Model, tiny_path: Path) -> None:
    exact = Model.load(tiny_path, context=200).session().prefill(TOKENS)
    ours = model.session().prefill(TOKENS)
    rounded = Model.load(model.file.path, context=200, requantization=Requantization("never")).session().prefill(TOKENS)
    assert np.abs(ours - exact).max() < 0.2 * np.abs(rounded - exact).max()


def test_the_copy_does_not_depend_on_the_chunks(path: Path, model: Model) -> None:
    session, other = model.session(), Model.load(path, context=200, max_rows=7).session()
    for each in (session, other):
        each.prefill(TOKENS)
        each.requantize()
    assert all(np.array_equal(a, copy_of(other).arrays[ref]) for ref, a in copy_of(session).arrays.items())


def test_a_short_prompt_leaves_the_files_own_weights(model: Model) -> None:
    session, never = model.session(), Model.load(model.file.path, context=200, requantization=Requantization("never")).session()
    session.prefill(TOKENS[:15])
    session.decode(5)
    assert session.weights is None and session.requantized_tokens == 0
    session.prefill(TOKENS[15:16])
    session.requantize()
    assert session.requantized_tokens == 16 and never.requantize() == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sums_that_are_not_finite_leave_the_files_own_weights(model: Model, bad: float) -> None:
    session = model.session()
    session.prefill(TOKENS[:40])
    assert session._requantizer
    session._requantizer.sums.values[3] = bad
    session.requantize()
    assert session.weights is None


def test_turns_add_up(model: Model) -> None:
    session = model.session()
    for first in (0, 30):
        session.prefill(TOKENS[first : first + 30])
        session.decode(4)
    assert session.requantized_tokens == 60
    session.rewind(0)
    session.prefill(TOKENS[:20])
    session.requantize()
    assert session.requantized_tokens == 20


def test_a_different_prompt_in_a_used_session_gives_what_a_fresh_one_does(model: Model) -> None:
    used, fresh = model.session(), model.session()
    used.prefill(TOKENS[:60])
    used.decode(5)
    prompt = [TOKENS[0], *TOKENS[60:]]
    assert used.keep_prefix(prompt) == 0
    for session in (used, fresh):
        session.prefill(prompt)
    assert np.array_equal(used.decode(8), fresh.decode(8))
    assert used.keep_prefix([*prompt, 8, 9]) == len(prompt) + 1


def test_an_interrupted_prompt_is_not_counted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session, fresh, run = model.session(), model.session(), model.program.run_summing

    def interrupted(*arguments: Any, **options: Any) -> Any:
        run(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.program, "run_summing", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(TOKENS)
    assert session.tokens == [] and session.keep_prefix(TOKENS) == 0
    for each in (session, fresh):
        each.prefill(TOKENS)
        each.requantize()
    assert session.requantized_tokens == fresh.requantized_tokens == len(TOKENS)
    assert all(np.array_equal(a, copy_of(fresh).arrays[ref]) for ref, a in copy_of(session).arrays.items())


def test_drift_waits_until_enough_is_new(path: Path) -> None:
    model = Model.load(path, context=200, requantization=Requantization("drift", growth=1.0, cosine=0.0))
    session = model.session()
    for turn, expected in ((TOKENS[:30], 30), (TOKENS[30:50], 30), (TOKENS[50:65], 65)):
        session.prefill(turn)
        session.requantize()
        assert session.requantized_tokens == expected


def test_drift_acts_when_scales_turn(path: Path) -> None:
    model = Model.load(path, context=200, requantization=Requantization("drift", growth=100.0, cosine=1.0, drifted=0.0))
    session = model.session()
    for turn in (TOKENS[:30], TOKENS[30:40]):
        session.prefill(turn)
        session.requantize()
    assert session.requantized_tokens == 40


def test_sessions_have_copies_of_their_own(model: Model) -> None:
    def alone(prompt: list[int]) -> np.ndarray:
        session = model.session()
        session.prefill(prompt)
        return session.decode(6)

    prompts = [TOKENS[:40], TOKENS[40:80]]
    expected = [alone(prompt) for prompt in prompts]
    sessions = [model.session(), model.session()]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.prefill(prompt)
    together = run_together([BatchItem(session, [6], [0]) for session in sessions])
    assert all(np.array_equal(ours[0], theirs) for ours, theirs in zip(together, expected, strict=True))


# The model, its report, its evaluation.


def test_without_masters_it_is_refused_only_when_asked_for(tiny_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no layer has a master.*`requantization`"):
        Model.load(tiny_path, requantization=Requantization())
    assert Model.load(tiny_path, requantization=Requantization("never")).requantization is None
    assert Model.load(tiny_path).requantization is None


def test_a_generation_reports_time_tokens_and_memory(model: Model) -> None:
    generation = model.generate(TEXT, max_tokens=4)
    assert len(list(generation.pieces())) == 4
    m = generation.measurement
    assert m.requantized_tokens == m.prompt_tokens and m.requantize_s > 0
    layers = [each for name, each in model.file.metadata.linears.items() if name != "head"]
    assert m.copy_bytes == sum(each.nbytes + 4 * each.columns for each in layers)
    assert m.peak_bytes >= m.anonymous_bytes > m.copy_bytes
    short = model.generate([5, 6, 7], max_tokens=3)
    assert len(list(short.pieces())) == 3
    assert (short.measurement.requantized_tokens, short.measurement.copy_bytes) == (0, 0)


def test_compare_evaluates_a_window_with_weights_made_from_it(path: Path, model: Model) -> None:
    scorer = FileScorer(path, 64, {})
    assert scorer.weights == "made for each window from all of its own tokens"
    for window in (TOKENS[:64], TOKENS[20:84]):
        session = model.session()
        session.prefill(window)
        session.requantize()
        session.rewind(0)
        expected = np.concatenate(list(session.all_logits(window)))
        found = np.concatenate([part.copy() for part in scorer.logits(window)])
        assert np.array_equal(found, expected)
        assert not np.allclose(found[-1], model.session().prefill(window)), "these are the masters' logits"
    assert FileScorer(path, 64, {"requantization": Requantization("never")}).weights == "the file's"


def test_the_command_says_which_weights_were_used(model: Model) -> None:
    from edgeq.tools.commands.run import summary

    def line(prompt: str, tokens: int) -> list[str]:
        generation = model.generate(prompt, max_tokens=tokens)
        assert list(generation.pieces())
        return [line for line in summary(model, generation) if line.startswith("weights")]

    assert "made for" in line(TEXT, 3)[0] and "MB at its peak" in line(TEXT, 3)[0]
    assert "the file's own: 16 tokens" in line("a", 3)[0]
    assert line(TEXT, 1) == []


def test_released_pages_belong_to_the_array_alone_and_can_be_read_again(model: Model) -> None:
    file = model.file
    for layer in file.metadata.linears.values():
        for _, ref in layer.arrays():
            before, view = file.array(ref).copy(), file.array(ref)
            address, length = file.pages(ref)
            assert address % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
            assert not length or view.ctypes.data <= address <= address + length <= view.ctypes.data + view.nbytes
            assert length + 2 * mmap.PAGESIZE > view.nbytes
            for uncached in (False, True):
                file.release(ref, uncached)
                assert np.array_equal(file.array(ref), before)
