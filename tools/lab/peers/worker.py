"""The process of one peer: it reads requests as lines of JSON and answers each with one line.

{"do": "version", "peer": NAME}
{"do": "build", "variant": NAME, "config": JSON, "folder": PATH}
{"do": "take", "peer": NAME, "model": PATH, "folder": PATH}
{"do": "load", "variant": NAME, "config": JSON, "folder": PATH, "threads": N, "context": N, "isa": NAME}
{"do": "run", "prompt": [TOKEN ...], "steps": N}

and, of models that see (pictures.py):

{"do": "version_pictures", "peer": NAME}
{"do": "build_pictures", "peer": NAME, "checkpoint": PATH, "folder": PATH}
{"do": "load_pictures", "peer": NAME, "folder": PATH, "threads": N, "patches": N, "isa": NAME}
{"do": "see", "size": [WIDTH, HEIGHT]}

An answer is {"result": ...} or {"error": "..."}.  Everything that the peer prints goes to standard error, even what its
libraries write to file descriptor 1.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from edgeq.network.config import ModelConfig
from edgeq.tools.lab.peers import pictures
from edgeq.tools.lab.peers.peer import Runner, module, variants


class Worker:
    """Answers requests; holds the model that was loaded last."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._viewer: pictures.Viewer | None = None

    def answer(self, request: dict[str, Any]) -> Any:
        do = request["do"]
        if do == "see" or do.endswith("_pictures"):
            return self._of_pictures(do, request)
        if do == "version":
            return module(request["peer"]).version()
        if do == "take":
            return asdict(module(request["peer"]).take(Path(request["model"]), Path(request["folder"])))
        if do == "run":
            assert self._runner is not None
            return asdict(self._runner.run(request["prompt"], request["steps"]))
        variant, config = variants()[request["variant"]], ModelConfig.from_json(request["config"])
        peer, folder = module(variant.peer), Path(request["folder"])
        if do == "build":
            return asdict(peer.build(config, variant, folder))
        # The time of the import is not part of loading a model.
        peer.version()
        began = perf_counter()
        variant = replace(variant, isa=request.get("isa"))
        self._runner = peer.load(config, variant, folder, request["threads"], request["context"])
        # A GPU is measured by the process that runs on it.
        bandwidth = getattr(self._runner, "read_bandwidth", None)
        return {"load_s": perf_counter() - began, "settings": self._runner.settings, "read_bandwidth": bandwidth}

    def _of_pictures(self, do: str, request: dict[str, Any]) -> Any:
        if do == "see":
            assert self._viewer is not None
            return asdict(self._viewer.see(tuple(request["size"])))
        peer = pictures.module(request["peer"])
        if do == "version_pictures":
            return peer.version()
        folder = Path(request["folder"])
        if do == "build_pictures":
            return peer.build(Path(request["checkpoint"]), folder)
        self._viewer = peer.load(folder, request["threads"], request["patches"], request.get("isa"))
        return self._viewer.settings


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            reply = {"result": worker.answer(json.loads(line))}
        except Exception as error:  # whatever a peer raises becomes the answer
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)
