"""Prompts on disk: found again after a restart, and only by those whose they are."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from click.testing import CliRunner
from numpy.typing import NDArray

from edgeq.errors import InputError, ResourceError
from edgeq.runtime import Model, Sampling
from edgeq.runtime.batching import page_file, prompt_store
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.page_file import DIGEST_BYTES
from edgeq.runtime.batching.prefix_tree import PrefixTree, digest_of, key_of
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from edgeq.targets.rows import PAGE
from edgeq.tools.cli.main import main

TOKENS = [3 + (7 * i * i + i) % 1900 for i in range(6 * PAGE + 5)]


@pytest.fixture(scope="module")
def path(model_path: Callable[..., Path]) -> Path:
    return model_path("tiny-llama", bits=4, group_size=32)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return Model.load(path, mode="a16", threads=1, context=512)


@pytest.fixture(scope="module")
def alone(model: Model) -> list[int]:
    generation = model.generate(TOKENS, max_tokens=8, sampling=Sampling(), ignore_eos=True)
    generation.text()
    return generation.tokens


def asked(model: Model, store: PromptStore, owner: str = "", tokens: list[int] = TOKENS, **given: Any) -> tuple[list[int], int]:
    """The text after a prompt by a scheduler that has just begun, and how many tokens it did not have to run."""
    scheduler = Scheduler(model, 4, shares_prefixes=True, store=store, **given)
    job = Job(model.prompt(tokens), Request(max_tokens=8, ignore_eos=True), Sampling(), 1, owner, owner)
    ticket, found = scheduler.submit(job), list[int]()
    while scheduler.busy:
        for update in scheduler.step():
            found += [piece.token for piece in update.pieces]
    store.flush()
    return found, ticket.cached_tokens


def files(store: PromptStore, tokens: list[int] = TOKENS, owner: str = "") -> list[Path]:
    """That of each page of a prompt."""
    found, before = list[Path](), PrefixTree().digest(owner, ())
    for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
        key = key_of(tokens, (), start)
        found.append(store._path(before, key))
        before = digest_of(before, key)
    return found


@pytest.fixture
def store(model: Model, tmp_path: Path) -> PromptStore:
    return model.prompt_store(tmp_path / "kept", 1 << 30)


def test_after_a_restart_a_prompt_is_not_read_again(model: Model, store: PromptStore, alone: list[int]) -> None:
    assert asked(model, store) == (alone, 0)
    again = model.prompt_store(store.folder, 1 << 30)
    assert asked(model, again) == (alone, 6 * PAGE) and again.bytes == store.bytes > 0
    scheduler = Scheduler(model, 4, shares_prefixes=True, store=again)
    scheduler.submit(Job(model.prompt(TOKENS), Request(max_tokens=8), Sampling()))
    assert scheduler.step()[0].pieces, "the first token does not come in the first step"
    # Prompts that begin alike have files in common, and an answer that goes on adds only what is new.
    before = len(list(store.folder.iterdir()))
    assert asked(model, again, tokens=[*TOKENS[: 5 * PAGE], 5, *TOKENS[5 * PAGE :]])[1] == 5 * PAGE
    assert len(list(store.folder.iterdir())) == before + 1
    assert not again.errors and all(each.stat().st_mode & 0o777 == 0o600 for each in store.folder.iterdir())


def test_pages_are_those_of_one_owner_and_of_one_setting(
    model: Model, path: Path, store: PromptStore, alone: list[int]
) -> None:
    asked(model, store, "anna")
    assert asked(model, store, "bert")[1] == 0 and asked(model, store, "anna") == (alone, 6 * PAGE)
    other = Model.load(path, mode="a16", threads=1, context=512, kv="int8")
    assert asked(other, other.prompt_store(store.folder, 1 << 30), "anna")[1] == 0


def test_another_version_of_edgeq_reads_again(model: Model, store: PromptStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(model, store)
    monkeypatch.setattr(prompt_store, "__version__", "0.0.0")
    assert asked(model, model.prompt_store(store.folder, 1 << 30))[1] == 0


def test_a_file_does_not_grow_with_what_came_before(model: Model, store: PromptStore) -> None:
    asked(model, store)
    assert len({path.stat().st_size for path in files(store)}) == 1


def test_files_of_an_older_version_are_not_used(
    model: Model, store: PromptStore, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(page_file, "VERSION", 4)
        asked(model, store)
    shown = CliRunner().invoke(main, ["cache", "ls", str(store.folder)]).stdout
    # They have other names, so that those of this version find room beside them.
    assert "of another version" in shown and asked(model, store) == (alone, 0) and store.errors == 0
    assert asked(model, store) == (alone, 6 * PAGE)


def test_a_file_with_the_header_of_an_older_version_is_not_used(model: Model, store: PromptStore, alone: list[int]) -> None:
    asked(model, store)
    for path in files(store):
        data = bytearray(path.read_bytes()[:-DIGEST_BYTES])
        data[8:12] = (4).to_bytes(4, "little")
        path.write_bytes(data + xxhash.xxh3_128_digest(data))
    assert asked(model, store) == (alone, 0) and store.errors == 1


def test_without_room_in_memory_the_text_is_the_same(model: Model, store: PromptStore, alone: list[int]) -> None:
    asked(model, store)
    assert asked(model, store, pages=8) == (alone, 6 * PAGE)


def test_beside_a_text_that_is_decoded_a_slow_disk_gives_a_page_for_each_step(
    model: Model, store: PromptStore, alone: list[int]
) -> None:
    asked(model, store)
    scheduler = Scheduler(model, 2, shares_prefixes=True, store=store)
    beside = Job(model.prompt([4, 5]), Request(max_tokens=300, ignore_eos=True), Sampling())
    scheduler.submit(beside)
    scheduler.step()
    scheduler._step_seconds = 0.0
    ticket = scheduler.submit(Job(model.prompt(TOKENS), Request(max_tokens=8, ignore_eos=True), Sampling()))
    taken, found = list[int](), list[int]()
    while scheduler.busy and len(found) < len(alone):
        updates = scheduler.step()
        found += [piece.token for update in updates if update.ticket is ticket for piece in update.pieces]
        taken += [len(text.path) for text in scheduler._texts if text.fetching]
    assert taken == [1, 2, 3, 4, 5, 6] and ticket.cached_tokens == 6 * PAGE and found == alone


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif how == "writable":
        path.chmod(0o666)
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "exchanged":
        other = next(each for each in path.parent.iterdir() if each != path)
        path.write_bytes(other.read_bytes().ljust(len(data), b"\0")[: len(data)])
    else:
        path.write_bytes(
            {"cut": data[:-1], "longer": data + b"x", "flipped": data[:-100] + b"?" + data[-99:], "empty": b""}[how]
        )


@pytest.mark.parametrize("how", ["link", "writable", "pipe", "exchanged", "cut", "longer", "flipped", "empty"])
def test_a_damaged_page_is_removed_and_read_again(model: Model, store: PromptStore, alone: list[int], how: str) -> None:
    asked(model, store)
    third = files(store)[2]
    damage(third, how)
    assert asked(model, store) == (alone, 2 * PAGE) and store.errors == 1
    assert asked(model, store) == (alone, 6 * PAGE)


def test_a_page_that_is_removed_after_it_was_read_is_no_error(
    model: Model, store: PromptStore, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are read ahead, and another thread or process may make room meanwhile."""
    asked(model, store)
    third, read = files(store)[2], page_file.read

    def removed(path: Path, *rest: Any) -> NDArray[np.uint8] | None:
        found = read(path, *rest)
        if path == third:
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(prompt_store, "read", removed)
    assert asked(model, store) == (alone, 2 * PAGE) and store.errors == 0


def test_the_longest_unused_go_first_and_ends_before_beginnings(model: Model, store: PromptStore) -> None:
    asked(model, store)
    size = store.bytes // 6
    small = model.prompt_store(store.folder, 8 * size + 100)
    other = [9 + token % 1800 for token in TOKENS]
    assert asked(model, small, tokens=TOKENS[: 4 * PAGE + 1])[1] == 4 * PAGE
    asked(model, small, tokens=other)
    assert small.bytes <= 8 * size + 100 and not [each for each in files(small)[4:] if each.exists()]
    left = sum(each.exists() for each in files(small))
    assert left < 4 and asked(model, small, tokens=TOKENS[: 4 * PAGE + 1])[1] == left * PAGE


def test_what_is_written_after_the_clock_was_set_back_stays(
    model: Model, store: PromptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(model, store)
    left = store.folder / f"{'a' * 64}.kv.7.new"
    left.write_bytes(b"x")
    size, real = store.bytes // 6, time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86_400)
    small = model.prompt_store(store.folder, 8 * size + 100)
    assert not left.exists()
    other = [9 + token % 1800 for token in TOKENS]
    asked(model, small, tokens=other)
    assert small.bytes <= 8 * size + 100 and asked(model, small, tokens=other)[1] == 6 * PAGE


def test_a_full_disk_changes_no_answer(
    model: Model, store: PromptStore, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[Path]()

    def full(path: Path, *_: Any) -> None:
        tried.append(path)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(prompt_store, "write_whole", full)
    assert asked(model, store) == (alone, 0) and asked(model, store) == (alone, 0)
    # After the first it is not tried for ten minutes.
    assert len(tried) == store.errors == 1 and not list(store.folder.iterdir())


@pytest.mark.parametrize("error", [MemoryError(), ResourceError("no memory on the device")])
def test_without_memory_for_bytes_no_page_stays_held(
    model: Model, store: PromptStore, alone: list[int], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def scarce(page: Any) -> bytes:
        raise error

    monkeypatch.setattr(store, "_save_page", scarce)
    assert asked(model, store) == (alone, 0) and store.errors == 1
    assert asked(model, store) == (alone, 0) and not store._waiting and store._thread.is_alive()


def test_a_text_that_is_being_written_makes_room(
    model: Model, store: PromptStore, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages, which the disk takes one after another, are not missed by a text that needs the whole cache."""
    save = store._save_page

    def slow(page: Any) -> bytes:
        time.sleep(0.1)
        return save(page)

    monkeypatch.setattr(store, "_save_page", slow)
    scheduler = Scheduler(model, 4, shares_prefixes=True, store=store, pages=8)
    for tokens in ([5, *TOKENS], TOKENS):
        scheduler.submit(Job(model.prompt(tokens), Request(max_tokens=8, ignore_eos=True), Sampling()))
        found = list[int]()
        while scheduler.busy:
            for update in scheduler.step():
                assert not update.error, update.error
                found += [piece.token for piece in update.pieces]
    assert found == alone


def test_a_disk_that_hangs_holds_no_pages(
    model: Model, store: PromptStore, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(prompt_store, "write_whole", lambda *_: goes_on.wait())
    scheduler, most = Scheduler(model, 4, shares_prefixes=True, store=store, pages=8), 0
    for tokens in ([5, *TOKENS], TOKENS):
        scheduler.submit(Job(model.prompt(tokens), Request(max_tokens=8, ignore_eos=True), Sampling()))
        found = list[int]()
        while scheduler.busy:
            for update in scheduler.step():
                assert not update.error, update.error
                found += [piece.token for piece in update.pieces]
            most = max(most, scheduler.pages[1])
    goes_on.set()
    assert found == alone and most <= 8


def test_what_a_killed_process_left_is_removed(model: Model, store: PromptStore) -> None:
    old, new, foreign = (store.folder / name for name in (f"{'a' * 64}.kv.7.new", f"{'b' * 64}.kv.7.new", "notes.7.new"))
    for each in (old, new, foreign):
        each.write_bytes(b"x")
    for each in (old, foreign):
        os.utime(each, (0, 0))
    model.prompt_store(store.folder, 1 << 30)
    assert sorted(each.name for each in store.folder.iterdir()) == sorted([new.name, foreign.name])


def test_a_folder_that_others_can_read_is_refused(model: Model, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(InputError, match="chmod 700"):
        model.prompt_store(tmp_path, 1 << 30)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(InputError, match="chmod 700"):
        model.prompt_store(tmp_path / "link", 1 << 30)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot keep prompts there"):
        model.prompt_store(tmp_path / "file" / "x", 1 << 30)


def test_the_command_shows_and_removes(model: Model, store: PromptStore) -> None:
    asked(model, store)
    (store.folder / f"{'c' * 64}.kv").write_bytes(b"no page")
    folder, run = str(store.folder), CliRunner()
    shown = json.loads(run.invoke(main, ["cache", "ls", "--json", folder]).stdout)
    assert [(each["model"], each["positions"]) for each in shown["models"]] == [
        (None, PAGE),
        (model.file.identity, 6 * PAGE),
    ]
    assert "damaged" in run.invoke(main, ["cache", "ls", folder]).stdout
    unknown = run.invoke(main, ["cache", "rm", "--model", "ffff0000", folder])
    assert unknown.exit_code == 1 and "no prompts of a model 'ffff0000'" in unknown.output
    # As of a shell's variable that was not set.
    assert run.invoke(main, ["cache", "rm", "--model", "", folder]).exit_code == 1
    assert "removed 6 files" in run.invoke(main, ["cache", "rm", "--model", model.file.identity[:8], folder]).stdout
    assert "removed 1 files" in run.invoke(main, ["cache", "rm", folder]).stdout
    assert run.invoke(main, ["cache", "ls", folder]).stdout == "no prompts\n" and asked(model, store)[1] == 0


def test_a_text_that_cannot_begin_ends_with_its_error(
    model: Model, store: PromptStore, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise InputError("no tokenizer")

    scheduler = Scheduler(model, 4, shares_prefixes=True, store=store)
    with monkeypatch.context() as patched:
        patched.setattr(Request, "sampler", refused)
        scheduler.submit(Job(model.prompt(TOKENS), Request(max_tokens=8), Sampling()))
        (update,) = scheduler.step()
    assert str(update.error) == "no tokenizer" and not scheduler.busy
    assert asked(model, store) == (alone, 0)


def test_a_text_that_leaves_while_it_takes_its_pages_leaves_nothing(model: Model, store: PromptStore) -> None:
    asked(model, store)
    scheduler = Scheduler(model, 2, shares_prefixes=True, store=store, pages=16)
    first = Job(model.prompt([4, 5]), Request(max_tokens=300, ignore_eos=True), Sampling())
    scheduler.submit(first)
    scheduler.step()
    scheduler._step_seconds = 0.0
    ticket = scheduler.submit(replace(first, prompt=model.prompt(TOKENS)))
    scheduler.step()
    assert any(text.fetching and len(text.path) == 1 for text in scheduler._texts)
    scheduler.cancel(ticket)
    scheduler.step()
    assert scheduler.running == 1 and scheduler.pages[2] == 1


def test_a_model_with_an_adapter_has_pages_of_its_own(model: Model, store: PromptStore) -> None:
    asked(model, store)
    scheduler = Scheduler(model, 4, shares_prefixes=True, store=store)
    job = Job(model.prompt(TOKENS), Request(max_tokens=2, ignore_eos=True), Sampling())

    class Adapted:
        """What a job needs of one."""

        session = model.session
        file = type("File", (), {"identity": "f" * 32})

    ticket = scheduler.submit(replace(job, model=Adapted))  # type: ignore[arg-type]
    while scheduler.busy:
        scheduler.step()
    assert ticket.cached_tokens == 0
