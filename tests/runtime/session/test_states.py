"""Layers with a state: a text has the same bits in whatever runs it is read, and wherever it goes on."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import xxhash

from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.runtime import Model, Session
from edgeq.runtime.session.context_size import cache_bytes, states_bytes
from edgeq.targets.rows import PAGE, Rows, StateRows
from edgeq.targets.states import LOG, SessionState, StateSpec, snapshot_bytes, snapshot_pages, state_bytes
from tests.runtime.session.running_sum import load_with_sums

TOKENS = [int(t) for t in np.random.default_rng(1).integers(2, 2048, 400)]


@pytest.fixture(scope="module", params=["llama_gqa reference", "llama_gqa cpu", "mistral cpu"])
def model(request: pytest.FixtureRequest, model_path: Callable[..., Path]) -> Iterator[Model]:
    family, target = request.param.split()
    path = model_path(family, bits=4, group_size=32)
    threads = 2 if target == "cpu" else 0
    with load_with_sums(path, target=target, mode="a16", context=448, max_rows=100, threads=threads) as loaded:
        yield loaded


def plain(model: Model, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits after tokens that are read at once by a session of their own."""
    with model.session() as session:
        return session.prefill(tokens)


def kept(session: Session) -> list[bool]:
    return [page.snapshot is not None for page in session.pages]


def test_the_state_matters(model: Model, model_path: Callable[..., Path]) -> None:
    with Model.load(model.file.path, target=model.target, mode="a16", context=448, max_rows=100, threads=1) as without:
        assert without.program.snapshot_pages == 0 < model.program.snapshot_pages
        assert not np.allclose(plain(without, TOKENS[:20]), plain(model, TOKENS[:20]))


@pytest.mark.parametrize("lengths", [(1,), (100,), (7, 1, 20, 2), (16, 17, 15), (64, 3)])
def test_a_prompt_has_the_same_bits_in_any_chunks(model: Model, lengths: tuple[int, ...]) -> None:
    session, end, i = model.session(), 150, 0
    while len(session.tokens) < end:
        at = len(session.tokens)
        logits = session.prefill(TOKENS[at : min(end, at + lengths[i % len(lengths)])])
        i += 1
    assert np.array_equal(logits, plain(model, TOKENS[:end]))


def test_every_number_of_drafts_is_forgotten_at_every_place_of_two_logs(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS[:60])
    for at in range(60, 60 + 2 * LOG + 2):
        for drafts in (1, 4, 7, LOG):
            # As in a cycle of drafts: row by row, then all in one run, of which some hold.
            for token in TOKENS[200 : 200 + min(drafts, 7)]:
                session.decode(token)
            assert session.rewind(at) == at
            list(session.all_logits(TOKENS[300 : 300 + drafts]))
            assert session.rewind(at) == at
        session.decode(TOKENS[at])
        assert session.logits is not None
    assert np.array_equal(session.logits, plain(model, TOKENS[: 60 + 2 * LOG + 2]))


@pytest.mark.parametrize("apart", [None, 4])
def test_a_random_walk_gives_the_bits_of_a_plain_run(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: int | None
) -> None:
    """`apart`: pages between snapshots, as where they are large."""
    if apart:
        monkeypatch.setattr(model.program, "snapshot_pages", apart)
    walk(model, tmp_path, random.Random(apart or 0))


@pytest.mark.parametrize(
    ("family", "target", "mode"),
    [
        ("lfm2", "reference", "a16"),
        ("qwen3_5", "cpu", "a8"),
        ("granite_hybrid_moe", "cpu", "a8"),
        *(
            pytest.param(family, *on, marks=pytest.mark.exhaustive)
            for family, *on in (
                ("lfm2", "cpu", "a16"),
                ("lfm2", "cpu", "a8"),
                ("qwen3_5", "reference", "a16"),
                ("qwen3_5", "cpu", "a16"),
                ("granite_hybrid_moe", "reference", "a16"),
                ("granite_hybrid", "cpu", "a16"),
                ("falcon_h1", "cpu", "a8"),
                ("nemotron_h", "cpu", "a8"),
                ("nemotron_h_experts", "cpu", "a8"),
            )
        ),
    ],
)
def test_a_random_walk_of_a_model_with_states(
    model_path: Callable[..., Path], tmp_path: Path, family: str, target: str, mode: Any
) -> None:
    path = model_path(family, bits=4, group_size=32)
    with Model.load(path, target=target, mode=mode, context=448, max_rows=100, threads=2 if target == "cpu" else 0) as loaded:
        walk(loaded, tmp_path, random.Random(7))


def walk(model: Model, tmp_path: Path, rng: random.Random, steps: int = 90) -> None:
    """Steps of every kind, in random order; now and then the bits are compared with those of a plain run."""
    kinds, reruns = set[str](), 0
    session = model.session()
    for step in range(steps):
        at = len(session.tokens)
        kind = rng.choice(["run", "row", "draft", "rewind", "back", "prompt", "fork", "save", "interrupt"])
        if kind == "run" and at < 300:
            list(session.all_logits([rng.randrange(2, 2048) for _ in range(rng.choice([2, 5, 16, 17, 64, 90]))]))
        elif kind == "row" and at < 400:
            session.decode(rng.randrange(2, 2048))
        elif kind == "draft" and 0 < at < 400:
            list(session.all_logits(TOKENS[: rng.randrange(1, LOG + 1)]))
            assert session.rewind(at) == at
        elif kind == "rewind" and at:
            length = rng.randrange(max(0, at - 20), at)
            reruns += session.rewind(length) < length
        elif kind == "back" and step % 3 == 0:
            assert session.rewind(rng.randrange(at + 1)) % PAGE in (0, len(session.tokens) % PAGE)
        elif kind == "prompt" and at < 300:
            session.prefill(TOKENS[at : at + 70])
        elif kind == "fork":
            before, session = session, session.fork()
            list(before.all_logits(TOKENS[:20]))
            before.close()
        elif kind == "save":
            session.save(tmp_path / "a")
            session = model.session()
            session.load(tmp_path / "a")
        elif kind == "interrupt" and at < 300:
            interrupt(session, rng.choice([1, 16, 60]))
            assert len(session.tokens) == at
        else:
            continue
        kinds.add(kind)
        # A page is behind every few steps, a plain run is slow.
        if step % 4 == 0 and session.tokens:
            tokens = [*session.tokens, 5]
            assert np.array_equal(session.fork().decode(5), plain(model, tokens)), (step, kind)
    assert len(kinds) == 9 and reruns


def interrupt(session: Session, count: int) -> None:
    """A run of so many rows that reaches its end but for telling so."""
    run = session._program.run

    def interrupted(rows: Rows, mode: Any = None) -> Any:
        slots = [state.slot for state in rows.states]
        run(rows, mode)
        for state, slot in zip(rows.states, slots, strict=True):
            state.slot = slot
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session._program, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(session.all_logits(TOKENS[100 : 100 + min(count, session.most_logits)]))


def test_rows_come_in_order_whatever_their_order_in_the_run(model: Model) -> None:
    """Rows of two sessions, shuffled, as where those of pictures come first."""
    first, second = model.session(), model.session()
    first.prefill(TOKENS[:30])
    expected = plain(model, TOKENS[:75]), plain(model, TOKENS[100:140])
    rng, counts = np.random.default_rng(3), (45, 40)
    for session, count in ((first, 45), (second, 40)):
        session.reserve(count)
    order = rng.permutation(sum(counts))
    tokens, slots = np.array(TOKENS[30:75] + TOKENS[100:140], np.int32), np.r_[30:75, 0:40].astype(np.int32)
    sessions = np.r_[np.zeros(45), np.ones(40)].astype(np.int32)
    rows = Rows(
        tokens=tokens[order], positions=slots[None, order], slots=slots[order], sessions=sessions[order],
        pages=[first.pages, second.pages], wanted=np.argsort(order)[[44, 84]].astype(np.int32),
        states=[first.state_of_run(45), second.state_of_run(40)],
    )  # fmt: skip
    assert np.array_equal(model.program.run(rows), np.stack(expected))


def test_a_skipped_or_doubled_row_raises(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS[:20])
    session.reserve(3)
    state = session.state_of_run(1)
    for slots in ([21], [19], [20, 20], [20, 22]):
        at = np.array(slots, np.int32)
        rows = Rows(at, at[None], at, np.zeros(len(at), np.int32), [session.pages], at[:0], states=[state])
        with pytest.raises(ValueError, match="not the next ones of states at slots"):
            model.program.run(rows)
    with pytest.raises(ValueError, match="0 states for 1 sessions"):
        model.program.run(Rows(at[:1], at[None, :1], at[:1], np.zeros(1, np.int32), [session.pages], at[:0]))
    assert np.array_equal(session.decode(TOKENS[20]), plain(model, TOKENS[:21]))


def test_snapshots_are_kept_where_texts_go_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = model.session()
    session.prefill(TOKENS[:150])
    assert kept(session) == [True, True, False]
    assert session.fork().rewind(140) == 140 and session.fork().rewind(120) == 64
    monkeypatch.setattr(model.program, "snapshot_pages", 4)
    session = model.session()
    session.prefill(TOKENS[:150])
    for token in TOKENS[150:330]:
        session.decode(token)
    # Before the end of the prompt, after every fourth page, after the last one.
    assert kept(session) == [False, True, False, True, True, False]
    assert session.keep_prefix(TOKENS[:150]) == 128
    assert np.array_equal(session.prefill(TOKENS[128:150]), plain(model, TOKENS[:150]))


def test_a_state_begins_with_a_snapshot_that_need_not_be_kept_after_that(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.program, "snapshot_pages", 4)
    first, session = model.session(), model.session()
    first.prefill(TOKENS[:70])
    session.adopt(TOKENS[:64], (), first.pages[:1])
    # In one run over the end of a page, after which a snapshot is taken too.
    session.prefill(TOKENS[64:140])
    session.prefill(TOKENS[140:200])
    assert kept(session)[0] is False
    assert np.array_equal(session.decode(TOKENS[200]), plain(model, TOKENS[:201]))


def test_a_generation_is_the_same_with_drafts_and_when_it_is_asked_again(model: Model) -> None:
    prompt = (TOKENS[:20] * 5)[:90]
    texts = [
        model.generate(prompt, max_tokens=60, ignore_eos=True, draft=draft, gamma=gamma).text()
        for draft, gamma in cast(Any, [("off", None), ("lookup", 5), ("auto", None)])
    ]
    assert texts[0] == texts[1] == texts[2]
    session = model.session()
    for _ in range(2):
        assert model.generate(prompt, max_tokens=60, ignore_eos=True, session=session).text() == texts[0]


def test_a_saved_session_has_its_states_and_no_other_takes_it(model: Model, tmp_path: Path) -> None:
    session, path = model.session(), tmp_path / "a"
    session.prefill(TOKENS[:150])
    session.save(path)
    sound = path.read_bytes()
    states, snapshot, ahead = struct.unpack("<3I", sound[64:76])
    assert states >= state_bytes(model.graph.states) and snapshot >= snapshot_bytes(model.graph.states) and ahead == 0
    loaded = model.session()
    loaded.load(path)
    assert kept(loaded) == kept(session) and loaded.rewind(149) == 149
    assert np.array_equal(loaded.decode(TOKENS[149]), plain(model, TOKENS[:150]))
    with (
        Model.load(model.file.path, target=model.target, mode="a16", context=448, threads=1) as without,
        pytest.raises(InputError, match="other settings"),
    ):
        without.session().load(path)

    def refused(changed: bytes, why: str) -> None:
        path.write_bytes(changed[:-16] + xxhash.xxh3_128_digest(changed[:-16]))
        with pytest.raises(FormatError, match=why):
            model.session().load(path)

    flags = 80 + 4 * 150
    for at, value in ((64, states - 4), (68, snapshot - 4), (72, LOG + 1), (64, 1 << 31)):
        refused(sound[:at] + struct.pack("<I", value) + sound[at + 4 :], "damaged header")
    refused(sound[:76] + b"x" + sound[77:], "damaged header")
    refused(sound[: flags + 1] + b"\x04" + sound[flags + 2 :], "implies|dropped")
    # Without states it would have to begin inside a page.
    without_states = sound[:64] + bytes(4) + sound[68 : -16 - states] + sound[-16:]
    refused(without_states, "no states that the next token needs")


def test_a_session_at_the_end_of_a_page_can_begin_with_its_snapshot(model: Model, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(TOKENS[:150])
    assert session.rewind(100) == 64
    session.save(tmp_path / "a")
    loaded = model.session()
    loaded.load(tmp_path / "a")
    assert np.array_equal(loaded.decode(TOKENS[64]), plain(model, TOKENS[:65]))


def test_files_of_graphs_without_states_say_nothing_of_them(model: Model, tmp_path: Path) -> None:
    with Model.load(model.file.path, target=model.target, mode="a16", context=448, threads=1) as without:
        session = without.session()
        session.prefill(TOKENS[:100])
        session.save(tmp_path / "a")
        assert (tmp_path / "a").read_bytes()[64:80] == bytes(16)
        assert not any("states" in detail for detail in session._origin.details)


def test_the_memory_of_states_is_counted(model: Model) -> None:
    options, states = model.program.options, model.graph.states
    width = model.graph.buffers["normed"]
    assert (
        state_bytes(states) == len(states) * 4 * (2 * width + 2 * LOG * width)
        and snapshot_bytes(states) == len(states) * 4 * width
    )
    within = cache_bytes(model.graph, options, 448) - states_bytes(model.graph, options.kv, 7)
    assert states_bytes(model.graph, options.kv, 7) == 2 * state_bytes(states) + 7 * snapshot_bytes(states)
    with Model.load(model.file.path, target=model.target, mode="a16", context=448, threads=1) as without:
        assert within == cache_bytes(without.graph, options, 448)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "granite_hybrid"])
def test_only_layers_of_attention_count_for_a_position_of_the_cache(family: str, model_path: Callable[..., Path]) -> None:
    with Model.load(model_path(family, bits=4, group_size=32), target="reference", context=64) as model:
        config, sizes = model.config, model.file.metadata.bytes_per_token()
        assert 0 < len(model.graph.cache) == config.num_hidden_layers - len(config.state_layers) < config.num_hidden_layers
        assert sizes["kv_per_position"] == model.position_bytes == len(model.graph.cache) * 2 * config.kv_size * 2


def test_large_snapshots_are_further_apart() -> None:
    spec = StateSpec("sum", (16, 128, 128), 16 * 257)
    assert snapshot_pages((), 1 << 20) == 0 and snapshot_pages((spec,), 1 << 20) == 1
    assert snapshot_pages((spec,), (1 << 20) - 1) == 2 and snapshot_pages((spec,), 1 << 16) == 16
    tail = StateSpec("tail", (2, 100))
    assert (tail.numbers, tail.snapshot_numbers) == ((2 + LOG) * 100, 200)


def test_a_state_forgets_the_rows_of_a_log_and_no_more() -> None:
    state = SessionState(40, 40)
    assert not state.trim(40 - LOG - 1) and state.slot == 40
    assert state.trim(40 - LOG) and state.slot == 24
    # What was written stays written: it has taken the places of older rows.
    assert not state.trim(23)
    rows = Rows(
        *[np.array([24], np.int32)] * 1, np.zeros((1, 1), np.int32), np.array([24], np.int32), np.zeros(1, np.int32), [[]]
    )
    rows.states = [state]
    found = StateRows.of(rows)
    found.begin(rows.states)
    found.end(rows.states)
    assert (state.slot, state.written) == (25, 40)


def test_cuda_refuses_an_operation_that_it_does_not_have_by_name(model: Model) -> None:
    from edgeq.targets.cuda.run.plan import NoDevice, device_bytes

    with pytest.raises(UnsupportedError, match="does not have the operation RunningSum yet; run with --target cpu"):
        device_bytes(model.graph, model.file, model.program.options, NoDevice())
