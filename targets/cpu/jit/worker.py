"""A process that compiles kernels: told what by lines of JSON on standard input, it answers each with a line when it is kept.

The first line says where machine code goes, for which processor, and the digest of the sources that the other process runs.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from edgeq.system.devices import DEVICES
from edgeq.targets.cpu.jit import processor


def main() -> None:
    """Until standard input ends.  An error ends the process: the other one compiles by itself what is missing, and reports."""
    setup = json.loads(sys.stdin.readline())
    if setup["device"]:
        processor.choose(processor.of_device(DEVICES[setup["device"]]))
    # Here, because the processor must be known when kernels are first defined.
    from edgeq.targets.cpu.jit import compile

    if compile.source_digest() != setup["digest"]:
        sys.exit("the sources have changed since the other process began")
    for line in sys.stdin:
        module, name, literals = json.loads(line)
        compile.keep(Path(setup["folder"]), getattr(importlib.import_module(module), name), *literals)
        print(flush=True)
