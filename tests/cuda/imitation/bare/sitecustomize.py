"""Makes a process, and those that it starts, one of a machine with neither TVM nor NVRTC, where PYTHONPATH has this folder."""

import sys

sys.modules["tvm"] = sys.modules["nvidia"] = None  # type: ignore[assignment]
