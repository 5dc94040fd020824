"""Names of models on the hub, as a command takes them: hf:ORG/REPO or hf:ORG/REPO:QUANT."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgeq.errors import InputError

PREFIX = "hf:"
_NAME = re.compile(r"(?P<repository>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<quant>[^:\s]{1,255}))?")


@dataclass(frozen=True)
class HubName:
    """A repository, and which of its models: a quantization type such as Q4_K_M, or the name of a file; "": the usual one."""

    repository: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f":{self.quant}" if self.quant else "")


def is_hub_name(text: str) -> bool:
    """Whether `text` begins as names of the hub do; no path of a file that is there is meant by it."""
    return text.startswith(PREFIX)


def hub_name(text: str) -> HubName:
    """`text` taken apart.  InputError: it is no such name."""
    found = _NAME.fullmatch(text.removeprefix(PREFIX))
    if not is_hub_name(text) or not found:
        raise InputError(f"{text}: expected hf:ORG/REPO or hf:ORG/REPO:QUANT, such as hf:Qwen/Qwen3-0.6B-GGUF:Q8_0")
    return HubName(found["repository"], found["quant"] or "")
