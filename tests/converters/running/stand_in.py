"""A GPU that is not there: tensors on torch's device type `lazy`, which nothing else uses, numbers in ordinary memory.

Code under test moves tensors with `.to(device)` and `.cpu()` as it does for a real one.  What a real one refuses is refused
here: operations on tensors of two devices, and numpy arrays of its tensors.  Memory is counted as it is taken and given back,
and runs out where a test says so.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)
MOVES = ("aten::_to_copy", "aten::copy_", "aten::_has_compatible_shallow_copy_type")


class There(Tensor):
    """A tensor of the stand-in; `numbers` has the same in ordinary memory."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> There:
        made: There = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func == Tensor.data.__set__:
            args[0].numbers = args[1].numbers
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: a tensor of the stand-in outside of it")


class StandIn(TorchDispatchMode):
    """Within it tensors can be moved to DEVICE.

    memory     bytes that it has
    fails_at   number of the allocation, from 1 on, that fails whatever is free; 0: none
    """

    def __init__(self, memory: float = float("inf"), fails_at: int = 0) -> None:
        super().__init__()
        self.memory, self.fails_at = memory, fails_at
        self.used = self.peak = self.allocations = self.failures = 0
        self._held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        mine = [x for x in tensors if isinstance(x, There)]
        target = kwargs.get("device")
        if target is not None and torch.device(target).type == DEVICE.type:
            kwargs["device"], there = torch.device("cpu"), True
        else:
            there = bool(mine) and target is None
        name = func._schema.name
        if mine and name not in MOVES and any(x.dim() and not isinstance(x, There) for x in tensors):
            raise AssertionError(f"{name}: tensors of two devices")
        found = func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
        into = args[0] if name.endswith("_") and isinstance(args[0], Tensor) else None
        if into is not None:
            return into
        return tree_map(lambda x: self._there(x) if isinstance(x, Tensor) else x, found) if there else found

    def _there(self, numbers: Tensor) -> There:
        storage = numbers.untyped_storage()
        if storage._cdata not in self._held and storage.nbytes():
            self._take(storage)
        return There(numbers)

    def _take(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.allocations += 1
        if self.used + size > self.memory or self.allocations == self.fails_at:
            self.failures += 1
            raise torch.OutOfMemoryError(f"stand-in: {size} bytes asked for, {self.used} of {self.memory} are used")
        self.used += size
        self.peak = max(self.peak, self.used)
        self._held.add(key)
        weakref.finalize(storage, self._give_back, key, size)

    def _give_back(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.used -= size


def _numbers(x: Any) -> Any:
    return x.numbers if isinstance(x, There) else x
