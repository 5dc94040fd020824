"""Operations on heads, and the cache."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.targets.cuda.arguments.heads import (
    AttendArguments,
    CacheArguments,
    CacheWriteArguments,
    HeadNormArguments,
    HeadRotateArguments,
    RopeArguments,
    RotaryArguments,
    ValueNormArguments,
)
from edgeq.targets.cuda.lowering.cache import kind_of
from edgeq.targets.cuda.lowering.context import Launch, Lowering, refuse
from edgeq.targets.cuda.run.angles import Angles
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.family_operations import ValueNorm
from edgeq.targets.graph import Attention, CacheWrite, HeadNorm, HeadRotate, RopeRotate
from edgeq.targets.rows import PAGE

MAX_HEAD, MAX_CODED_HEAD = 512, 256
"""Dimensions of a head; beyond the second, attention over codes has too few registers."""
PART = 512
"""Positions of the largest parts of the context, whose sums are made by themselves (kernels/attention_parts.py)."""
LEVELS = (PART // PAGE).bit_length()
"""Sizes of parts: a page, two, four and eight; of each OF_A_SIZE parts, of the smallest twice as many."""
OF_A_SIZE = 4
PARTS_OF_WINDOW = 16
"""Parts that a window is to have: where it moves over long contexts, all of its parts would have the largest size."""
FEW_TOKENS = 64
"""Token rows up to which each has blocks of threads of its own: a recording has as many, and each can be of another session."""
SIDE_BY_SIDE = 1024
"""Rows times parts that are taken side by side; more parts are taken one after the other, to the same bits."""
QUERIES = 16
"""Query heads of a kv head that a block of threads has."""
WAVES = 4
"""Blocks of threads for each place of the GPU up to which each takes one part."""
SEVERAL = 4 * PART
"""Positions that a row sees up to which a block of threads may take several parts: of more, most have the largest size."""


def head_norm(lowering: Lowering, op: HeadNorm) -> Sequence[Launch]:
    arguments = HeadNormArguments(
        x=lowering.buffer(op.x) + 4 * op.offset,
        gain=lowering.storage.floats(op.gain),
        width=lowering.graph.buffers[op.x],
        heads=op.heads,
        head_dim=op.head_dim,
        eps=op.eps,
    )
    return [Launch(op, lowering.stage, Variant("head_norm"), arguments)]


def value_norm(lowering: Lowering, op: ValueNorm) -> Sequence[Launch]:
    arguments = ValueNormArguments(
        x=lowering.buffer(op.x),
        width=lowering.graph.buffers[op.x],
        first=op.offset,
        to=op.out,
        heads=op.heads,
        head_dim=op.head_dim,
        eps=op.eps,
    )
    return [Launch(op, lowering.stage, Variant("value_norm"), arguments)]


def rope_rotate(lowering: Lowering, op: RopeRotate) -> Sequence[Launch]:
    arguments = RopeArguments(
        x=lowering.buffer(op.x) + 4 * op.offset,
        rotary=rotary(lowering, op),
        width=lowering.graph.buffers[op.x],
        heads=op.heads,
        head_dim=op.head_dim,
    )
    return [Launch(op, lowering.stage, Variant("rope"), arguments)]


def rotary(lowering: Lowering, op: RopeRotate) -> RotaryArguments:
    table = Angles.of_operation(op).table(lowering.storage, lowering.options.max_rows)
    return RotaryArguments(angles=table, places=lowering.sent("places"), pairs=len(op.frequencies))


def head_rotate(lowering: Lowering, op: HeadRotate) -> Sequence[Launch]:
    check_head(op.head_dim)
    arguments = HeadRotateArguments(
        x=lowering.buffer(op.x) + 4 * op.offset,
        matrix=lowering.storage.array(op.matrix),
        scale=lowering.storage.floats(op.scale),
        width=lowering.graph.buffers[op.x],
        heads=op.heads,
    )
    return [Launch(op, lowering.stage, Variant("head_rotate", (op.head_dim,)), arguments)]


def check_head(head_dim: int) -> None:
    if head_dim % 4 or head_dim > MAX_HEAD:
        refuse(f"heads of {head_dim} dimensions, only multiples of 4 up to {MAX_HEAD}")


def layer_of_cache(lowering: Lowering, op: CacheWrite | Attention) -> CacheArguments:
    check_head(op.head_dim)
    if (codec := lowering.options.kv.kind) != "f16" and op.head_dim > MAX_CODED_HEAD:
        refuse(f"a cache of {codec} for heads of {op.head_dim} dimensions, only of up to {MAX_CODED_HEAD}")
    spec = lowering.graph.cache[op.cache]
    if spec.value_dim != spec.head_dim:
        refuse(f"values of {spec.value_dim} numbers beside keys of {spec.head_dim}")
    kind = kind_of(lowering.graph, lowering.options.kv, op.cache)
    return CacheArguments(
        pages=lowering.storage.address(kind),
        tables=lowering.sent("tables"),
        kv_heads=op.kv_heads,
        layer=kind.layers.index(op.cache),
        high=lowering.options.kv.high,
    )


def cache_write(lowering: Lowering, op: CacheWrite) -> Sequence[Launch]:
    kv = lowering.options.kv
    x = lowering.buffer(op.x)
    arguments = CacheWriteArguments(
        cache=layer_of_cache(lowering, op),
        slots=lowering.sent("slots"),
        k=x + 4 * op.k_offset,
        v=x + 4 * op.v_offset,
        width=lowering.graph.buffers[op.x],
        head_dim=op.head_dim,
        top=(1 << kv.bits) - 1,
    )
    variant = Variant("cache_write" if kv.kind == "f16" else f"cache_write_{kv.kind}")
    return [Launch(op, lowering.stage, variant, arguments)]


def attention(lowering: Lowering, op: Attention) -> Sequence[Launch]:
    kind = "causal" if op.span < 0 else f"span {op.span}"
    # A row with a range sees no other slots; where a run has no ranges, they follow from the window (run/feed.py).
    window = op.window if op.span < 0 else 0
    stride = -(-op.head_dim // 32) * 32 + 32
    arguments = AttendArguments(
        cache=layer_of_cache(lowering, op),
        q=lowering.buffer(op.x) + 4 * op.q_offset,
        width=lowering.graph.buffers[op.x],
        firsts=lowering.sent(f"first of {kind}"),
        lasts=lowering.sent(f"last of {kind}"),
        out=lowering.buffer(op.out),
        heads=op.heads,
        window=window,
        level=level_of(op.window),
        has_sinks=int(op.sinks is not None),
        sinks=lowering.storage.floats(op.sinks) if op.sinks else 0,
        scale=op.scale,
        sums=lowering.storage.named(("sums", op.heads, op.head_dim), SIDE_BY_SIDE * op.heads * stride * 4),
        arrived=lowering.storage.named(("arrived", op.heads), SIDE_BY_SIDE * op.heads * 4),
        cap=op.cap or 0.0,
        slopes=lowering.storage.constants(op.slopes) if op.slopes else 0,
    )
    literals = op.head_dim, lowering.options.kv.kind, PART
    # Without changes of scores a kernel is the one that it was before others had some.
    changes = (op.cap is not None, bool(op.slopes)) if op.cap is not None or op.slopes else ()
    apart, packed = (Variant("attend", (*literals, several, *changes)) for several in (False, True))
    return [Launch(op, lowering.stage, apart, arguments, packed, few_rows=FEW_TOKENS)]


def level_of(window: int) -> int:
    """Parts of an attention have up to 2^level pages; window: 0: it has none."""
    pages = -(-window // (PARTS_OF_WINDOW * PAGE)) if window else PART // PAGE
    return min(LEVELS - 1, (pages - 1).bit_length())


def part_of(page: int, level: int) -> int:
    """The part in which a page is."""
    return min(OF_A_SIZE * size + (page >> size) for size in range(level + 1))


def head_blocks(heads: int, kv_heads: int) -> int:
    """Blocks of threads that a token row has, if each takes all of its parts."""
    return kv_heads * -(-heads // kv_heads // QUERIES)


def side_by_side(tokens: int, reach: int, blocks: int, places: int, window: int = 0) -> tuple[int, int]:
    """Parts of the context that blocks of threads take side by side, and how many each takes; (0, 1): one takes all.

    It is one as long as all blocks find places on the GPU in WAVES turns, and where parts are large; none is less than a page.

    reach    how many times PART positions the longest context of the run has; 0: not known
    blocks   of threads that a token row has, if each takes all of its parts
    places   blocks of threads that the GPU runs side by side
    """
    pages, level = reach * PART // PAGE, level_of(window)
    if not pages or tokens > FEW_TOKENS:
        return 0, 1
    seen = min(pages, (window + PAGE - 2) // PAGE + 1) if window else pages
    # A window begins anywhere in a part: one part more than the same pages have at the beginning, where parts are small.
    parts = min(part_of(pages - 1, level) + 1, part_of(seen - 1, level) + 2)
    taken = -(-tokens * blocks * parts // (WAVES * places)) if seen * PAGE <= SEVERAL else 1
    return (parts, taken) if taken < parts and tokens * parts <= SIDE_BY_SIDE else (0, 1)
