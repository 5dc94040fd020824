"""The largest numbers of rows, in order, equals by their index: what greedy and top-k sampling read of logits."""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.rows import INFINITY_BITS

NEGATIVE_INFINITY = 0xFF800000  # bits of -inf
ABSENT = (1 << 31) - 1


def largest(first, SLICE):
    """values, ids [row][parts][count]: of every SLICE numbers of x [row][width] the `count` largest, equals in order of ids.

    Where there are not so many, or numbers are NaN, the rest is -inf with the id 0: the next run may look that token up before
    the host has read `finite`.  finite[row][part]: whether all numbers of the part are.

    first   ids are places in x; else those of `given`, in whose order x need not be, and `sound` [row][sounds] is for finite
    """
    EACH, WARPS = 32, SLICE // 1024

    @T.prim_func
    def largest_(x_: T.handle, given_: T.handle, sound_: T.handle, values_: T.handle, ids_: T.handle, finite_: T.handle,
                 tokens: T.int32, width: T.int32, sounds: T.int32, count: T.int32):  # fmt: skip
        T.func_attr({"tirx.noalias": True})
        nx, ng, ns, nv, ni, nf = T.int32(), T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        x = T.match_buffer(x_, (nx,), "float32")
        given = T.match_buffer(given_, (ng,), "int32")
        sound = T.match_buffer(sound_, (ns,), "int32")
        values = T.match_buffer(values_, (nv,), "float32")
        ids = T.match_buffer(ids_, (ni,), "int32")
        finite = T.match_buffer(finite_, (nf,), "int32")
        T.device_entry()
        part, row = T.cta_id([T.ceildiv(width, SLICE), tokens])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([32])
        tid: T.let = warp * 32 + lane
        v = T.alloc_local((EACH,), "float32")
        name = T.alloc_local((EACH,), "int32")
        taken = T.alloc_local((1,), "uint32")  # a bit for each of a lane's numbers
        best = T.alloc_local((1,), "float32")  # of the lane
        which = T.alloc_local((1,), "int32")
        top = T.alloc_local((1,), "float32")  # of the warp, then of all
        of = T.alloc_local((1,), "int32")
        other = T.alloc_local((1,), "float32")
        whose = T.alloc_local((1,), "int32")
        ok = T.alloc_local((1,), "int32")
        tops = T.alloc_shared((2, WARPS), "float32")
        ofs = T.alloc_shared((2, WARPS), "int32")
        oks = T.alloc_shared((WARPS,), "int32")

        @T.inline
        def choose():
            # The lane's largest that is not taken.
            best[0] = T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY))
            which[0] = ABSENT
            for i in T.unroll(EACH):
                free: T.let = (taken[0] >> T.Cast("uint32", i)) & T.uint32(1) == T.uint32(0)
                if free and (v[i] > best[0] or (v[i] == best[0] and name[i] < which[0])):
                    best[0] = v[i]
                    which[0] = name[i]

        ok[0] = 1
        taken[0] = T.uint32(0)
        for i in T.unroll(EACH):
            at: T.let = part * SLICE + i * (WARPS * 32) + tid
            v[i] = T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY))
            name[i] = ABSENT
            if at < width:
                v[i] = x[row * width + at]
                name[i] = at
                if first:
                    if T.reinterpret("uint32", v[i]) & T.uint32(0x7FFFFFFF) >= T.uint32(INFINITY_BITS):
                        ok[0] = 0
                else:
                    name[i] = given[row * width + at]
        if not first:
            for i in T.serial(T.ceildiv(sounds, WARPS * 32)):
                if i * (WARPS * 32) + tid < sounds:
                    ok[0] = T.min(ok[0], sound[row * sounds + i * (WARPS * 32) + tid])
        for level in T.unroll(5):
            ok[0] = T.min(ok[0], T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), ok[0], 1 << level, 32, 32))
        oks[warp] = ok[0]
        choose()
        for k in T.serial(count):
            top[0] = best[0]
            of[0] = which[0]
            for level in T.unroll(5):
                other[0] = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), top[0], 1 << level, 32, 32)
                whose[0] = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), of[0], 1 << level, 32, 32)
                if other[0] > top[0] or (other[0] == top[0] and whose[0] < of[0]):
                    top[0] = other[0]
                    of[0] = whose[0]
            # Two places by turns: a warp may write the next while another still reads.
            tops[k % 2, warp] = top[0]
            ofs[k % 2, warp] = of[0]
            T.cuda.cta_sync()
            for i in T.unroll(WARPS):
                other[0] = tops[k % 2, i]
                whose[0] = ofs[k % 2, i]
                if other[0] > top[0] or (other[0] == top[0] and whose[0] < of[0]):
                    top[0] = other[0]
                    of[0] = whose[0]
            if tid == 0:
                values[(row * T.ceildiv(width, SLICE) + part) * count + k] = top[0]
                ids[(row * T.ceildiv(width, SLICE) + part) * count + k] = T.if_then_else(of[0] == ABSENT, 0, of[0])
            if of[0] == which[0] and of[0] != ABSENT:
                for i in T.unroll(EACH):
                    if name[i] == of[0]:
                        taken[0] = taken[0] | (T.uint32(1) << T.Cast("uint32", i))
                choose()
        if tid == 0:
            for i in T.serial(WARPS):
                ok[0] = T.min(ok[0], oks[i])
            finite[row * T.ceildiv(width, SLICE) + part] = ok[0]

    return largest_
