"""Functions of the GPU's driver (CUDA Driver API), called through `cuda.bindings`, and their errors."""

from __future__ import annotations

from typing import Any

from edgeq.errors import DeviceError


def bindings() -> Any:
    """cuda.bindings.driver, which is imported when a GPU is first asked for.  ImportError: it is not installed."""
    from cuda.bindings import driver

    return driver


def called(cuda: Any, function: str, *arguments: Any) -> Any:
    """The value of a function of the driver; of several a tuple.  DeviceError, with the driver's words: it failed."""
    result, *values = getattr(cuda, function)(*arguments)
    if result != cuda.CUresult.CUDA_SUCCESS:
        raise DriverError(cuda, function, result)
    return values[0] if len(values) == 1 else tuple(values)


class DriverError(DeviceError):
    """name   of the error, as the driver calls it"""

    def __init__(self, cuda: Any, function: str, result: Any) -> None:
        self.name = str(getattr(result, "name", result))
        _, text = cuda.cuGetErrorString(result)
        words = text.decode(errors="replace") if isinstance(text, bytes) else "unknown error"
        super().__init__(f"the GPU failed in {function}: {words} ({self.name}); close the model and load it again")


def version_text(version: int) -> str:
    """12.6 for 12060."""
    return f"{version // 1000}.{version % 1000 // 10}"
