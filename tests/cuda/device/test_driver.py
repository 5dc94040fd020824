"""The driver's Device over cuda.bindings itself, on an imitated libcuda: memory, errors, refusals.

What an imitation cannot show is said in docs/cuda.md: no test here has run on a GPU.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeq.targets.cuda.device import discover
from edgeq.targets.cuda.device.arguments import packed
from edgeq.targets.cuda.supply.pack import Parameter, Variant
from edgeq.targets.target import Absence
from tests.cuda import imitated

START = """
import json, threading
import numpy as np
from edgeq.errors import DeviceError, ResourceError, UnsupportedError
from edgeq.targets.cuda.device import discover, driver
from edgeq.targets.cuda.supply.pack import Generated, Variant
def failing(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def kernel(image):
    return Generated(Variant("k"), "k_kernel", "", (), (1, 1, 1), (32, 1, 1), image)
"""


@pytest.fixture
def needs_imitation() -> None:
    if reason := imitated.refusal():
        pytest.skip(reason)


def on_an_imitated_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_imitation")):
        test = mark(test)
    return test


def on_gpu(tmp_path: Path, code: str, **settings: object) -> dict[str, object]:
    """What `code` puts into `found`, in a process with an imitated GPU."""
    text = f"{START}\nfound = {{}}\n{textwrap.dedent(code)}\nprint(json.dumps(found))"
    result = imitated.run("-c", text, cache=tmp_path / "cache", **settings)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_arguments_have_the_types_of_their_parameters_and_fit_them() -> None:
    parameters = [Parameter("pointer", "x"), Parameter("int32", "n"), Parameter("int64", "m"), Parameter("float32", "eps")]
    values, types = packed(parameters, [1 << 40, -5, 1 << 40, 1e-5])
    assert values == (1 << 40, -5, 1 << 40, 1e-5)
    assert types == (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float)
    for wrong in ([1, 1 << 31, 1, 1.0], [1, 1.5, 1, 1.0], [1, 1, 1 << 63, 1.0]):
        with pytest.raises(ValueError, match="is no int"):
            packed(parameters, wrong)
    with pytest.raises(ValueError):
        packed(parameters, [1, 2])


@on_an_imitated_gpu
def test_memory_is_written_and_read_in_order_from_any_thread(tmp_path: Path) -> None:
    """More than the pinned buffer holds; copies are done only when something waits, and the array is changed at once."""
    found = on_gpu(
        tmp_path,
        """
        device = driver.DriverDevice()
        found["memory"] = device.memory()
        data = np.arange((driver.STAGING + driver.PIECE) // 4, dtype=np.uint32)
        memory = device.allocate(data.nbytes)
        found["left"] = device.memory()[1]
        device.write(memory.address, data)
        data += 1
        device.write(memory.address, data[:7].copy())
        device.zero(memory.address + 4 * 100, 4 * 5)
        got = np.zeros_like(data)
        worker = threading.Thread(target=device.read, args=(memory.address, got))
        worker.start(), worker.join()
        want = data - 1
        want[:7] += 1
        want[100:105] = 0
        found["same"] = bool(np.array_equal(got, want))
        def drop():
            global memory
            del memory
        worker = threading.Thread(target=drop)
        worker.start(), worker.join()
        found["after"] = device.memory()
        found["facts"] = [device.name, device.sm, device.multiprocessors, device.integrated, device.driver]
        import ctypes
        found["fetched"] = ctypes.CDLL("libcuda.so.1").imitated_fetched()
        """,
        memory=1 << 27,
    )
    assert found["memory"] == found["after"] == [1 << 27, 1 << 27] and found["left"] == (1 << 27) - (40 << 20)
    assert found["same"] and found["facts"] == ["Imitated GPU 0", 87, 8, False, 12060]
    # All of a line, of which prefetches name one address.
    assert found["fetched"] == 128


@on_an_imitated_gpu
def test_where_a_gpu_shares_the_memory_what_linux_can_give_is_free(tmp_path: Path) -> None:
    """The driver counts cached pages of files as taken."""
    found = on_gpu(
        tmp_path,
        """
        from edgeq.system import machine
        machine.available_bytes = lambda: 12345678
        device = driver.DriverDevice()
        found["memory"], found["integrated"] = device.memory(), device.integrated
        """,
        memory=1 << 27,
        integrated=1,
    )
    assert found["memory"] == [1 << 27, 12345678] and found["integrated"]


@on_an_imitated_gpu
def test_threads_do_not_take_the_pinned_buffer_from_each_other(tmp_path: Path) -> None:
    """The decoder of one request and the vision tower of another."""
    found = on_gpu(
        tmp_path,
        """
        import sys
        sys.setswitchinterval(1e-6)
        device, found["wrong"] = driver.DriverDevice(), []
        def copy(thread):
            memory = device.allocate(1 << 16)
            for i in range(300):
                data = np.full(1 << 14, 1000 * thread + i, np.uint32)
                got = np.zeros_like(data)
                device.write(memory.address, data)
                device.read(memory.address, got)
                if not np.array_equal(got, data):
                    found["wrong"].append([thread, i])
        threads = [threading.Thread(target=copy, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """,
    )
    assert found["wrong"] == []


@on_an_imitated_gpu
def test_what_is_recorded_is_replayed_and_finalizers_leave_the_context_of_the_thread(tmp_path: Path) -> None:
    found = on_gpu(
        tmp_path,
        """
        import ctypes
        from edgeq.targets.cuda.device.device import Copy
        from cuda.bindings import driver as cuda
        device = driver.DriverDevice()
        block, result, memory = device.pinned(64), device.pinned(32), device.allocate(128)
        steps = [Copy("in", memory.address, block.address, 64), Copy("within", memory.address + 64, memory.address, 64),
                 Copy("out", result.address, memory.address + 64 + 8, 32)]
        recording = device.record(steps)
        found["before"] = result.array.tolist()
        for first in (0, 100):
            block.array[:] = np.arange(first, first + 64)
            recording.start(), recording.wait()
            found[f"after {first}"] = result.array.tolist()
        graphs = ctypes.CDLL("libcuda.so.1").imitated_graphs
        found["graphs"] = graphs()
        held = result.array
        del result
        recording.start(), recording.wait()
        found["held"] = held.tolist() == found["after 100"]
        found["outside"] = failing(device.record, [Copy("in", memory.address, block.address + 1, 64)])
        def finalize():
            global recording, memory, block
            device.synchronize()
            _, mine = cuda.cuCtxGetCurrent()
            cuda.cuCtxSetCurrent(0)
            del recording, memory, block
            _, after = cuda.cuCtxGetCurrent()
            found["context"] = [int(mine) != 0, int(after)]
        finalize()
        found["left"] = graphs()
        """,
        memory=1 << 27,
    )
    assert found["before"] == [0] * 32
    for first in (0, 100):
        assert found[f"after {first}"] == list(range(first + 8, first + 40))
    assert found["graphs"] == 1 and found["left"] == 0 and found["held"] and found["context"] == [True, 0]
    assert "cuMemcpyHtoDAsync" in str(found["outside"]) and "invalid argument" in str(found["outside"])


@on_an_imitated_gpu
def test_times_are_those_of_the_device_in_a_recording_and_outside(tmp_path: Path) -> None:
    found = on_gpu(
        tmp_path,
        """
        from edgeq.targets.cuda.device.device import Copy
        device = driver.DriverDevice()
        memory = device.allocate(1 << 24)
        half = 1 << 23
        marks = [device.mark() for _ in range(3)]
        for mark in marks:
            device.stamp(mark)
            device.zero(memory.address, half)
        found["alone"] = device.seconds(marks)
        within = [device.mark() for _ in range(2)]
        recording = device.record([within[0], Copy("within", memory.address + half, memory.address, half), within[1]])
        found["too early"] = failing(device.seconds, within)
        found["recorded"] = []
        for _ in range(4):
            recording.start()
            found["recorded"] += device.seconds(within)
        """,
    )
    alone, recorded = found["alone"], found["recorded"]
    assert isinstance(alone, list) and len(alone) == 2 and min(alone) > 0
    # Each replay has a time of its own.
    assert isinstance(recorded, list) and len(recorded) == 4 and min(recorded) > 0 and len(set(recorded)) > 1
    assert "cuEventElapsedTime" in str(found["too early"])


@on_an_imitated_gpu
def test_the_end_of_a_recording_is_waited_for_while_the_next_one_still_runs(tmp_path: Path) -> None:
    """And one that is dropped has ended before memory that it reads is freed."""
    found = on_gpu(
        tmp_path,
        """
        from edgeq.targets.cuda.device.device import Copy
        device = driver.DriverDevice()
        memory, results, made = device.allocate(64), [device.pinned(64) for _ in range(2)], []
        blocks = [device.pinned(64) for _ in range(2)]
        for block, result, value in zip(blocks, results, (3, 4)):
            block.array[:] = value
            made.append(device.record([Copy("in", memory.address, block.address, 64),
                                       Copy("out", result.address, memory.address, 64)]))
        made[0].start(), made[1].start(), made[0].wait()
        found["first"] = [int(result.array[0]) for result in results]
        made[0].start()
        blocks[1].array[:] = 5
        made[1].wait()
        found["second"] = [int(result.array[0]) for result in results]
        made[1].start()
        del made, block, blocks
        device.synchronize()
        found["dropped"] = [int(result.array[0]) for result in results]
        """,
    )
    assert found == {"first": [3, 0], "second": [3, 5], "dropped": [3, 5]}


@on_an_imitated_gpu
def test_the_driver_says_how_many_blocks_of_a_kernel_are_held(tmp_path: Path, needs_generator: None) -> None:
    made = imitated.kernels([Variant("select")], tmp_path / "made")
    found = on_gpu(
        tmp_path,
        """
        device, variant = driver.DriverDevice(), Variant("select")
        for threads in (128, 2048):
            generated = Generated(variant, "select_kernel", "", (), (1, 1, 1), (threads, 1, 1), b".version select_kernel")
            loaded = device.load([generated])[variant]
            if threads == 128:
                found["held"] = device.blocks_held(loaded)
            else:
                found["refused"] = failing(device.blocks_held, loaded)
        """,
        kernels=made,
        held=3,
    )
    assert found["held"] == 3
    assert "cuOccupancyMaxActiveBlocksPerMultiprocessor: invalid argument" in str(found["refused"])


@on_an_imitated_gpu
def test_a_graph_without_memory_is_no_failure_of_the_device(tmp_path: Path) -> None:
    found = on_gpu(
        tmp_path,
        """
        from edgeq.targets.cuda.device.device import Copy
        device = driver.DriverDevice()
        block, memory = device.pinned(64), device.allocate(64)
        found["full"] = failing(device.record, [Copy("in", memory.address, block.address, 64)])
        recording = device.record([Copy("in", memory.address, block.address, 64)])
        recording.start(), recording.wait()
        """,
        fail="cuGraphInstantiate:2",
    )
    assert "ResourceError: Imitated GPU 0 has no room for a graph of 1 steps" in str(found["full"])


@on_an_imitated_gpu
def test_a_graph_without_memory_to_start_is_no_failure_of_the_device(tmp_path: Path) -> None:
    found = on_gpu(
        tmp_path,
        """
        from edgeq.targets.cuda.device.device import Copy
        device = driver.DriverDevice()
        block, memory = device.pinned(64), device.allocate(64)
        recording = device.record([Copy("in", memory.address, block.address, 64)])
        found["full"] = failing(recording.start)
        block.array[:] = 7
        recording.start()
        got = np.zeros(64, np.uint8)
        device.read(memory.address, got)
        found["then"] = got.tolist()
        """,
        fail="cuGraphLaunch:2",
    )
    assert "ResourceError: Imitated GPU 0 has no room to start a graph" in str(found["full"]) and found["then"] == [7] * 64


@on_an_imitated_gpu
def test_a_gpu_without_room_for_a_context_is_told_and_asked_again(tmp_path: Path) -> None:
    found = on_gpu(
        tmp_path,
        """
        device = driver.DriverDevice()
        found["full"] = failing(device.allocate, 1 << 20)
        found["later"] = device.allocate(1 << 20).nbytes
        """,
        fail="cuMemHostAlloc:2",
    )
    assert "ResourceError: no room on Imitated GPU 0 to begin with" in str(found["full"]) and found["later"] == 1 << 20


@on_an_imitated_gpu
def test_errors_are_told_and_end_the_device_but_not_the_process(tmp_path: Path) -> None:
    found = on_gpu(
        tmp_path,
        """
        device = driver.DriverDevice()
        found["full"] = failing(device.allocate, 1 << 30)
        memory = device.allocate(1 << 20)
        data = np.zeros(1 << 18, np.float32)
        device.write(memory.address, data)
        found["lost"] = failing(device.synchronize)
        found["still lost"] = failing(device.write, memory.address, data)
        del memory, device
        device = driver.DriverDevice()
        memory = device.allocate(1 << 20)
        device.write(memory.address, data)
        device.synchronize()
        found["again"] = device.memory()[0]
        """,
        memory=64 << 20,
        fail="cuStreamSynchronize:700",
    )
    assert "ResourceError: Imitated GPU 0 has no room for 1,024 MiB more: 64 MiB are free, 960 MiB are missing" in str(
        found["full"]
    )
    assert "pass a smaller `context` or `graphs=False`" in str(found["full"])
    for key in ("lost", "still lost"):
        assert "DriverError" in str(found[key]) and "an illegal memory access" in str(found[key]), found[key]
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(found[key]) and "load it again" in str(found[key])
    assert found["again"] == 64 << 20


@on_an_imitated_gpu
def test_an_image_that_the_driver_does_not_take_is_refused_by_name(tmp_path: Path) -> None:
    found = on_gpu(
        tmp_path,
        """
        device = driver.DriverDevice()
        found["none"] = failing(device.load, [kernel(b"")])
        found["text"] = failing(device.load, [kernel(b"no PTX, no ELF")])
        elf = bytearray(64)
        elf[:4], elf[48] = b"\\x7fELF", 90
        found["newer"] = failing(device.load, [kernel(bytes(elf))])
        """,
    )
    assert "was not compiled" in str(found["none"])
    assert "the driver (CUDA 12.6) does not take kernel k for Imitated GPU 0, sm_87: CUDA_ERROR_INVALID_IMAGE" in str(
        found["text"]
    )
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU; install a newer driver, or run: edgeq build FILE --for sm_87" in str(found["newer"])


@on_an_imitated_gpu
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"driver": 11040}, "the driver is of CUDA 11.4; 12.0 or later is needed"),
        ({"sm": 75, "driver": 13000}, "Imitated GPU 0: it is sm_75; sm_80 .Ampere. or later is needed"),
        ({"count": 0}, "no NVIDIA GPU|may hide it"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused(settings: dict[str, object], match: str, tmp_path: Path) -> None:
    found = on_gpu(tmp_path, "found['refused'] = discover.find().refused", **settings)
    assert re.search(match, str(found["refused"])), found


def test_without_a_gpu_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(discover, "LIBRARY", "libcuda-of-no-machine.so.1")
    monkeypatch.setattr(discover, "SIGNS", ())
    monkeypatch.setattr(discover, "PCI", tmp_path)
    found = discover.find()
    assert isinstance(found.refused, Absence) and found.first is None and not found.gpus


def test_without_a_gpu_its_driver_is_not_imported() -> None:
    """Every run on a machine without one would pay for it: 9 ms of processor time."""
    code = """
import sys
from edgeq.targets.cuda.device import discover
discover.LIBRARY, discover.SIGNS, discover.PCI = "libcuda-of-no-machine.so.1", (), discover.Path("/no/bus")
assert discover.find().refused
heavy = ("cuda.bindings", "edgeq.targets.cuda.device.driver", "edgeq.targets.cuda.supply.pack")
print([name for name in sys.modules if name in heavy])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_gpu_without_its_library_is_told_and_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(discover, "LIBRARY", "libcuda-of-no-machine.so.1")
    monkeypatch.setattr(discover, "SIGNS", ())
    monkeypatch.setattr(discover, "PCI", tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "vendor").write_text("0x10de\n")
    (tmp_path / "0000:01:00.0" / "class").write_text("0x030000\n")
    reason = discover.find().refused
    assert reason is not None and not isinstance(reason, Absence)
    for part in ("libcuda-of-no-machine.so.1", "/usr/lib/aarch64-linux-gnu/tegra", "nvidia-l4t-cuda"):
        assert part in reason


def test_without_its_bindings_their_name_is_told_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(discover, "library_refusal", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(discover, "PCI", tmp_path)
    monkeypatch.setattr(discover, "WSL", tmp_path / "dxg")
    for signs, told in (((str(tmp_path),), True), ((), False)):
        monkeypatch.setattr(discover, "SIGNS", signs)
        reason = discover.find().refused
        assert reason == discover.NOT_INSTALLED and isinstance(reason, Absence) != told
    assert "edgeq[cuda12]" in discover.NOT_INSTALLED
