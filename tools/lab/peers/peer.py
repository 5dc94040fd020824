"""The interface of a peer, and the list of peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from edgeq.network.config import ModelConfig

PEERS = {
    "edgeq": "for_edgeq",
    "llama.cpp": "for_llama_cpp",
    "onnxruntime-genai": "for_onnxruntime",
    "openvino-genai": "for_openvino",
    "torch": "for_torch",
}


@dataclass(frozen=True)
class Variant:
    """One way to run a peer.

    name       as the table has it, unique
    peer       a key of PEERS
    file       what is built; variants that differ in settings only share it
    group      weights that share a scale
    head_bits  of the head without scales: only variants with the same number are compared
    mode       type of activations, or another setting of the peer
    target     what it runs on: only variants of one target run beside each other
    published  runs a model file that was published, as it is, instead of the random model; `group` and `head_bits` are 0
    isa        instruction set of edgeq's kernels on `cpu`; None: the best that this processor has
    """

    name: str
    peer: str
    file: str
    group: int
    head_bits: int
    mode: str
    target: str = "cpu"
    published: bool = False
    isa: str | None = None


@dataclass(frozen=True)
class Stored:
    """Bytes that one token reads, as this peer stores them: all layers with their scales, and the head."""

    weights: int
    head: int


@dataclass(frozen=True)
class Times:
    """`prefill_s` until the first token is drawn, `decode_s` for all the others; `tokens` are those drawn, greedily."""

    prefill_s: float
    decode_s: float
    tokens: list[int]


class Runner(Protocol):
    """A loaded model."""

    settings: str

    def run(self, prompt: Sequence[int], steps: int) -> Times:
        """Empty the cache, run `prompt`, then draw 1 + `steps` tokens."""
        ...


class Peer(Protocol):
    """The interface of a module of PEERS.  Its functions run in the process of the peer and import the peer when called."""

    VARIANTS: tuple[Variant, ...]

    def version(self) -> str:
        """Version of the installed package.  ImportError: it is not installed."""
        ...

    def build(self, config: ModelConfig, variant: Variant, folder: Path) -> Stored:
        """Write the random model into the empty `folder`."""
        ...

    def take(self, model: Path, folder: Path) -> Stored:
        """Put a published GGUF file into the empty `folder` as this peer loads it; of a peer with a published variant."""
        ...

    def load(self, config: ModelConfig, variant: Variant, folder: Path, threads: int, context: int) -> Runner:
        """Load what `build` or `take` wrote."""
        ...


def module(peer: str) -> Peer:
    """The module of a key of PEERS."""
    return cast(Peer, import_module(f"edgeq.tools.lab.peers.{PEERS[peer]}"))


def variants() -> dict[str, Variant]:
    """All variants by name, those of edgeq first."""
    return {variant.name: variant for name in PEERS for variant in module(name).VARIANTS}
