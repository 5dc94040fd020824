"""Runs of few rows as recordings: every launch of a run, started by one call of the driver (a CUDA graph).

What differs between runs is in memory that the kernels read: tokens, slots and lengths of the sessions are one block that the
recording copies to the device first, and it copies the logits back last; page tables are written where they change.

Rows that a class has and a run has not are rows of a session of their own, which has one page and no state, so no launch
depends on lengths or on how many rows there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import ResourceError
from edgeq.format.records import Mode
from edgeq.targets.cuda.device.device import Call, Copy, Device, Memory, Pinned, Recording
from edgeq.targets.cuda.lowering.attention import PART
from edgeq.targets.cuda.lowering.cache import CacheKind
from edgeq.targets.cuda.lowering.context import Gather
from edgeq.targets.cuda.lowering.largest import LeftArray
from edgeq.targets.cuda.run.block import SentBlock, Write, of_rows, stage_of
from edgeq.targets.cuda.run.feed import Sent
from edgeq.targets.requantization import WeightSource
from edgeq.targets.rows import PAGE, Page, Rows

ROW_CLASSES = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a recording.  A program of which one run gives fewer logits has one for that many instead of the next larger."""
RECORDINGS = 16
"""Recordings of the program's launches that memory is reserved for; of more the least recently used are dropped."""
STEP_BYTES = 16 << 10
"""Memory that a step of a recording is taken to need on the device; drivers do not state it."""
OTHER_STEPS = 10
"""Steps of a recording beside the kernels of a run: the block to the device and tokens within it, the search for the largest
and a draw from them, results from it."""
BLOCK_BYTES = 8 << 20
"""Reserved for the blocks of all recordings; the longest page tables are 512 KiB."""
ALIGNMENT = 16
TURNS = 2
"""Recordings of runs that are started ahead, of one kind: one is written while the other waits."""
TURN_BYTES = 40 << 10
"""Bytes of the largest numbers of each row, which a run brings back while those of the one before it are being read."""
MAX_BYTES = (1 + TURNS) * TURN_BYTES
"""Bytes of all of those, where they are more than a whole result."""
Places = Mapping[object, tuple[int, int]]
Steps = Callable[[Mapping[object, int]], Sequence[Call | Copy]]
BlockOf = Callable[[NDArray[np.uint8], Places, Write], SentBlock]


class Key(NamedTuple):
    """What a recording is of.

    weights   number of the requantized weights, 0: the file's
    rows      of the class;  results: of these, that have logits;  parts: of the context that its pages reach
    largest   how many numbers of each row of the result are found; 0: all are copied.  draws: a token is drawn from them
    turn      0: the host sends its tokens.  1, 2: they are what the run before it found, and of such runs one is written by the
              host while the other waits to be copied
    """

    mode: Mode
    source: WeightSource
    weights: int
    rows: int
    results: int
    parts: int
    largest: int = 0
    draws: bool = False
    turn: int = 0


def placed(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where arrays of these bytes begin, one after another, and their bytes."""
    places, end = list[tuple[int, int]](), 0
    for nbytes in sizes:
        places.append((end, nbytes))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places


def row_class(count: int, most: int) -> int:
    """Rows of the recording for `count`, of a program whose runs give at most `most` logits."""
    return min(most, next(rows for rows in ROW_CLASSES if rows >= count))


def parts_of(rows: Rows) -> int:
    """The parts that the longest session of a run has, as a power of two."""
    # Of few rows a list is faster than numpy.
    parts: int = -(-(max(rows.slots.tolist()) + 1) // PART)
    return 1 << (parts - 1).bit_length()


def repeats(rows: Rows, most: int) -> bool:
    """Whether runs like this one come again and again, as those do that decode or verify: all rows have their logits."""
    return 0 < len(rows.tokens) == len(rows.wanted) <= most and _is_plain(rows)


def is_short_prompt(rows: Rows, most: int) -> bool:
    """Whether a run is of few rows of text and has the logits of one: its launches take the host as long as the GPU."""
    return 1 == len(rows.wanted) < len(rows.tokens) <= most and _is_plain(rows)


def _is_plain(rows: Rows) -> bool:
    return rows.vectors is None and rows.modality is None and rows.spans is None


def padded(rows: Rows, count: int, page: Page) -> Rows:
    """The run with `count` rows: those that it has not are of a session with that page, and the first in it; they have logits
    if all others have."""
    extra, session, prompt = count - len(rows), len(rows.pages), len(rows.wanted) < len(rows)
    # No more pages than the rows see: a session can hold others for what comes next.
    ends = [int(rows.slots[rows.sessions == i].max(initial=0)) // PAGE + 1 for i in range(session)]
    return Rows(
        tokens=np.pad(rows.tokens, (0, extra)),
        positions=np.pad(rows.positions, ((0, 0), (0, extra))),
        slots=np.pad(rows.slots, (0, extra)),
        sessions=np.pad(rows.sessions, (0, extra), constant_values=session),
        pages=[*(held[:end] for held, end in zip(rows.pages, ends, strict=True)), *([[page]] if extra else [])],
        wanted=rows.wanted if prompt else np.concatenate([rows.wanted, np.arange(len(rows), count, dtype=np.int32)]),
        states=rows.states,
        in_order=rows.in_order,
    )


@dataclass(eq=False)
class Recorded:
    """A recording, with what it copies: the block to `memory`, and results to `results`, which are valid until the next run.

    places    of what is sent: where it begins in the block, and its bytes
    started   since it was last waited for: the block may not have been copied yet
    """

    recording: Recording
    pinned: Pinned
    memory: Memory
    places: Places
    results: Sequence[NDArray[Any]]
    block: SentBlock
    nbytes: int
    started: bool = False


class Recordings:
    """The recordings of one program, within memory that is reserved when it is made.

    recorded      recordings made so far
    rows          of one that give their logits, at most;  prompt_rows: of a prompt
    """

    def __init__(self, device: Device, most_rows: int, most_logits: int, width: int, steps: int) -> None:
        """most_rows, most_logits   of a run;  width: of a row of the result, float32

        steps   launches of a run, 0: record nothing
        """
        self.prompt_rows = min(most_rows, ROW_CLASSES[-1])
        self.rows = min(self.prompt_rows, most_logits)
        self.recorded = 0
        self._device = device
        self._result_bytes = self.rows * width * 4 + MAX_BYTES
        self._room = RECORDINGS * (steps + OTHER_STEPS) * STEP_BYTES + BLOCK_BYTES if steps else 0
        self._kept: OrderedDict[Key, Recorded] = OrderedDict()
        self._result: Pinned | None = None

    @property
    def reserved(self) -> int:
        """Bytes of the device, with those of the host where it has the same memory; 0: nothing is recorded."""
        return self._room + self._result_bytes * self._device.integrated if self._room else 0

    def kept(self, key: Key) -> Recorded | None:
        """The recording of a key; None: it was not made, or had to make room."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def record(self, key: Key, sent: Sent, calls: Steps, results: Sequence[LeftArray], block: BlockOf) -> Recorded | None:
        """Make one; None: there is no memory for it, now or before.

        sent      what the kernels read that differs between runs; its sizes follow from the key
        calls     the steps, for addresses of what is sent
        block     how its runs are written into pinned memory, for that and the places in it
        """
        if not self._room:
            return None
        try:
            return self._record(key, sent, calls, results, block)
        except ResourceError:
            self._give_up()
            return None

    def start(self, recorded: Recorded) -> bool:
        """Start one; False: there is no memory for it."""
        try:
            recorded.recording.start()
        except ResourceError:
            self._give_up()
            return False
        recorded.started = True
        return True

    def wait(self, recorded: Recorded) -> Sequence[NDArray[Any]]:
        """The results of one that was started."""
        recorded.recording.wait()
        recorded.started = False
        return recorded.results

    def _give_up(self) -> None:
        self._kept.clear()
        self._room = 0

    def _record(self, key: Key, sent: Sent, calls: Steps, results: Sequence[LeftArray], block: BlockOf) -> Recorded:
        if self._result is None:
            self._result = self._device.pinned(self._result_bytes)
        # What differs between rows is first, as a block writes it at once; page tables are last: they change seldom.
        names = sorted(sent, key=lambda name: (isinstance(name, CacheKind), not of_rows(name), stage_of(name)))
        places = dict(zip(names, placed(sent[name].nbytes for name in names), strict=True))
        ends = {name: start + nbytes for name, (start, nbytes) in places.items()}
        end, copied = max(ends.values()), max(end for name, end in ends.items() if not isinstance(name, CacheKind))
        pinned, memory = self._device.pinned(end), self._device.allocate(end)
        back = [(key.turn * TURN_BYTES + start, nbytes) for start, nbytes in placed(result.nbytes for result in results)]
        steps = [
            Copy("in", memory.address, pinned.address, copied),
            *calls({name: memory.address + start for name, (start, _) in places.items()}),
            *(
                Copy("out", self._result.address + start, result.address, nbytes)
                for result, (start, nbytes) in zip(results, back, strict=True)
            ),
        ]
        whole = self._result.array
        found = [each.of(whole[start : start + nbytes]) for each, (start, nbytes) in zip(results, back, strict=True)]
        recording = self._device.record(steps)
        written = block(pinned.array, places, lambda start, values: self._device.write(memory.address + start, values))
        made = Recorded(recording, pinned, memory, places, found, written, end + len(steps) * STEP_BYTES)
        while self._kept and sum(each.nbytes for each in self._kept.values()) + made.nbytes > self._room:
            self._kept.popitem(last=False)
        self._kept[key] = made
        self.recorded += 1
        return made


def gathered(gather: Gather, places: Mapping[object, int], sent: Sent) -> Copy:
    """What brings rows of a table that stays in the file from the block to their buffer."""
    return Copy("within", gather.address, places[gather], sent[gather].nbytes)
