"""`edgeq batch`: the requests of a file, answered several at once; a run that was ended goes on where it was."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.format.partial import Partial, partial_path
from edgeq.runtime.session.requantize import NEVER
from edgeq.system.whole_file import no_follow, write_whole
from edgeq.tools.cli.adapters import adapted, digests, named
from edgeq.tools.cli.terminal import note, progress
from edgeq.tools.commands.run import load, read_template
from edgeq.version import __version__

if TYPE_CHECKING:
    from edgeq.runtime.server.interfaces.batch_lines import BatchLine, Lines, ResultLine

MIB = 1 << 20
MAX_LINES = 1_000_000
ANSWERED_BY = ("mode", "kv", "target", "context", "image_tokens")
"""Options of Model.load that answers depend on."""
RECORD = b'{"id":"batch_req_'
"""How a file of records begins; nothing else is replaced, nor continued."""


@dataclass(frozen=True)
class WorkerSetup:
    """What a process needs to answer lines; it travels to other machines, which have the file at the same path."""

    model: str
    chat_template: str | None
    options: dict[str, Any]
    names: tuple[str, ...]
    seats: int
    most_body: int
    cache_memory: float | None
    adapters: dict[str, Path]

    def lines(self) -> Lines:
        """Load the model.  Weights that were rounded for one prompt would be wrong for the others of a run."""
        from edgeq.runtime.server.interfaces.batch_lines import Lines
        from edgeq.runtime.server.serve import cache_pages
        from edgeq.runtime.server.settings import Settings

        options = self.options | {"requantization": NEVER}
        loaded = load(Path(self.model), self.chat_template, options)
        found = adapted(loaded, self.adapters)
        settings = Settings(names=self.names, adapters=found, seats=self.seats, most_body=self.most_body)
        memory = None if self.cache_memory is None else int(self.cache_memory)
        return Lines(loaded, settings, cache_pages(loaded, memory, self.seats))

    def digest(self, identity: str) -> bytes:
        """Digest of what answers depend on beside their lines."""
        given = [(name, self.options[name]) for name in ANSWERED_BY]
        data = repr((__version__, identity, self.chat_template, self.names, given, digests(self.adapters))).encode()
        return hashlib.blake2b(data, digest_size=16).digest()


class FailureCounts(NamedTuple):
    """Lines without an answer, and those of them that may have one when they are asked again."""

    failed: int
    may_pass: int


@dataclass
class RequestFile:
    """A file of requests: what is known of its lines, which themselves stay on the disk.

    ids     of their records, in their order;  places: where each begins, and its bytes;  wrong: lines whose name another has
    """

    path: Path
    ids: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    wrong: dict[int, str] = field(default_factory=dict)

    def left(self, done: set[str]) -> Iterator[BatchLine]:
        """Lines that have no record yet."""
        from edgeq.runtime.server.interfaces.batch_lines import BatchLine

        with self.path.open("rb") as file:
            for number, (id, (offset, length)) in enumerate(zip(self.ids, self.places, strict=True)):
                if id not in done:
                    file.seek(offset)
                    yield BatchLine(id, file.read(length), self.wrong.get(number, ""))


def batch(
    *,
    model: Path,
    source: Path,
    output: Path,
    force: bool,
    ray: str | None,
    workers: int,
    names: tuple[str, ...],
    adapters: tuple[str, ...],
    chat_template: Path | None,
    seats: int,
    cache_memory: float | None,
    body: float | None,
    options: dict[str, Any],
) -> None:
    """Records in the order of the lines; what it says goes to standard error.

    InputError: not such files, results of another run, or lines that have no answer once all are written.
    """

    file = ModelFile.open(model)
    most = int(body) if body is not None else (16 if file.metadata.config.vision else 4) * MIB
    template = read_template(chat_template)
    folders = {name: path.resolve() for name, path in named(adapters).items()}
    serving = WorkerSetup(
        os.fspath(model.resolve()), template, options, (*names, model.stem), seats, most, cache_memory, folders
    )
    lined = scanned(source, most, serving.digest(file.identity))
    del file
    check_replaceable(output)
    before = finished(output, lined.ids) if not force and output.exists() else None
    if before and not before.may_pass:
        failed = before.failed
        note(f"{output}: was finished before")
        remove_rest(output)
    else:
        with partial(output) as lock:
            held = lock.file
            done = kept(held, set(lined.ids), partial_path(output), force)
            if before:
                take_over(output, held, done)
            if done:
                note(f"{len(done):,} of {len(lined.ids):,} records are there from an earlier run")

            def keep(recorded: ResultLine) -> None:
                done[recorded.id] = held.tell(), len(recorded.data), recorded.failed
                held.write(recorded.data)
                held.flush()

            if len(done) < len(lined.ids):
                found = by_ray(ray, serving, lined, set(done), workers) if ray else here(serving, lined, set(done))
                with request_progress(len(done), len(lined.ids)) as tell:
                    for recorded in found:
                        keep(recorded)
                        tell(len(done))
            failed = sum(failed for _, _, failed in done.values())
            put_in_order(held, output, [done[id] for id in lined.ids])
            partial_path(output).unlink(missing_ok=True)
    if failed:
        message = f"{failed:,} of {len(lined.ids):,} lines have no answer; their records in {output} say why"
        again = "; the same command asks those again that failed by no mistake of theirs (status 500)"
        raise InputError(message + (again if finished(output, lined.ids).may_pass else ""))


def here(serving: WorkerSetup, lined: RequestFile, done: set[str]) -> Iterator[ResultLine]:
    """The records of lines that have none, by this process."""
    lines = serving.lines()
    yield from lines.records(lined.left(done))
    totals = lines.scheduler.totals
    read = f"{totals.prompt_tokens:,} tokens read, {totals.cached_tokens:,} found in the cache"
    note(f"{read}, {totals.generated_tokens:,} written")


def by_ray(address: str, serving: WorkerSetup, lined: RequestFile, done: set[str], workers: int) -> Iterator[ResultLine]:
    from edgeq.tools.commands.batch_ray import records

    threads = max(1, serving.options["threads"], serving.options["threads_prefill"])
    return records(address, serving.lines, lined.left(done), workers, threads=threads, seats=serving.seats)


def scanned(source: Path, most: int, run: bytes) -> RequestFile:
    """InputError: no such file, no lines, or too many of them.  What is wrong with a line is said in its record."""
    from edgeq.runtime.server.interfaces.batch_lines import custom_id_of, record_id

    lined, names = RequestFile(source), dict[str, int]()
    try:
        with source.open("rb") as file:
            number = -1
            while line := file.readline(most + 2):
                number += 1
                offset, data = file.tell() - len(line), line
                while not data.endswith(b"\n") and (data := file.readline(MIB)):
                    pass
                if not line.strip():
                    continue
                if len(lined.ids) == MAX_LINES:
                    raise InputError(f"{source}: more than {MAX_LINES:,} lines; cut it into several files")
                # The end of the last line may be missing, and added when lines are.
                line = line.rstrip(b"\r\n")
                name = custom_id_of(line)
                if name is not None and name in names:
                    lined.wrong[len(lined.ids)] = f"custom_id: line {names[name] + 1} has the same"
                elif name is not None:
                    names[name] = number
                lined.ids.append(record_id(run, number, line))
                lined.places.append((offset, len(line)))
    except OSError as error:
        raise InputError(f"{source}: cannot read it: {error.strerror}") from None
    if not lined.ids:
        raise InputError(f"{source}: no lines; each is one request in the shape of OpenAI's batches")
    return lined


def check_replaceable(output: Path) -> None:
    """InputError: there is something that is neither empty nor records of a batch; a symbolic link is not followed."""
    try:
        with open(output, "rb", opener=no_follow) as file:
            found = file.read(len(RECORD)) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except FileNotFoundError:
        return
    except OSError:
        found = None
    if found not in (b"", RECORD):
        raise InputError(f"{output}: exists and is not the result of a batch; it is not replaced: choose another name")


def partial(output: Path) -> AbstractContextManager[Partial]:
    """Records in the order in which they were finished, locked.

    InputError: it cannot be written, another run does, or it is not what a run leaves.
    """
    return closing(Partial(output, "batch", is_rest))


def is_rest(head: bytes) -> bool:
    # A power failure can leave zeros.
    return RECORD.startswith(head[: len(RECORD)]) or head[:1] == b"\0"


def kept(file: BinaryIO, expected: set[str], path: Path, force: bool) -> dict[str, tuple[int, int, bool]]:
    """Where each whole record is, its bytes, and whether it has no answer; what is left of another is cut off.

    A line that may have an answer when it is asked again has no record.

    InputError: a record of another run; with `force` it is cut off with all that follow.
    """
    import msgspec

    from edgeq.runtime.server.interfaces.batch_lines import ResultId

    found, end = dict[str, tuple[int, int, bool]](), 0
    for line in file:
        try:
            named = msgspec.json.decode(line, type=ResultId)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            break
        if not line.endswith(b"\n"):
            break
        if named.id not in expected:
            if force:
                break
            raise InputError(f"{path}: records of other lines, another model or other options; remove it, or pass --force")
        if not named.may_pass:
            found[named.id] = end, len(line), named.failed
        end += len(line)
    file.seek(end)
    file.truncate()
    return found


def take_over(output: Path, file: BinaryIO, done: dict[str, tuple[int, int, bool]]) -> None:
    """Write the records of a finished file after those of an unfinished one, but for lines that are asked again."""
    import msgspec

    from edgeq.runtime.server.interfaces.batch_lines import ResultId

    with open(output, "rb", opener=no_follow) as records:
        for line in records:
            named = msgspec.json.decode(line, type=ResultId)
            if named.id not in done and not named.may_pass:
                done[named.id] = file.tell(), len(line), named.failed
                file.write(line)
    file.flush()


def finished(output: Path, ids: list[str]) -> FailureCounts:
    """What is missing in a finished file.  InputError: it is that of other lines, or of another model."""
    import msgspec

    from edgeq.runtime.server.interfaces.batch_lines import ResultId

    other = InputError(f"{output}: exists, and is not the result of these lines, model and options; --force replaces it")
    try:
        with open(output, "rb", opener=no_follow) as file:
            # One by one: together the bodies of many answers fill the memory.
            found, failed, may_pass = list[str](), 0, 0
            for line in file:
                named = msgspec.json.decode(line, type=ResultId)
                found.append(named.id)
                failed += named.failed
                may_pass += named.may_pass
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        raise other from None
    if found != ids:
        raise other
    return FailureCounts(failed, may_pass)


def remove_rest(output: Path) -> None:
    """That of a run that was killed at its very end; another file of this name is left alone."""
    if partial_path(output).exists():
        with suppress(InputError), partial(output):
            partial_path(output).unlink()


def put_in_order(file: BinaryIO, output: Path, places: list[tuple[int, int, bool]]) -> None:
    """Write the records in the order of their lines; the file has its name once it is whole."""

    def records() -> Iterator[bytes]:
        for offset, length, _ in places:
            file.seek(offset)
            yield file.read(length)

    write_whole(output, records(), durable=True, through=output.with_name(output.name + ".partial.new"))


@contextmanager
def request_progress(first: int, total: int) -> Iterator[Callable[[int], None]]:
    """Progress with the time left: a bar on a terminal, else a line for every tenth."""
    with progress() as bar:
        bar(first, total, "requests")
        noted = 10 * first // total

        def tell(done: int) -> None:
            nonlocal noted
            bar(done, total, "requests")
            if not bar.drawn and 10 * done // total > noted:
                noted = 10 * done // total
                note(f"{done:,} of {total:,} requests, {bar.left} left")

        yield tell
