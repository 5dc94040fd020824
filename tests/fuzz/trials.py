"""The kinds of trials: each makes one hostile input, gives it to edgeq and says how that went.

A trial returns a short outcome, such as "opened" or "refused".  It raises what edgeq should not have raised.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

Trial = Callable[[random.Random], str]


@dataclass(frozen=True)
class Kind:
    """What `make fuzz` does of a kind.

    prepare   a folder in memory -> the trial
    count     trials of `make fuzz`
    seconds   of processor time, of a trial and what it starts, beyond which it is a finding: the stated limits and a second
    memory    bytes of address space; what asks for more is a finding.  0: no limit
    hang      seconds of processor time, or twenty times as many of wall clock, without a finished trial after which its process
              is ended
    own_cache   the cache folder is empty at the start, so that nothing was accepted before
    """

    prepare: Callable[[Path], Trial]
    count: int
    seconds: float = 2.0
    memory: int = 2 << 30
    own_cache: bool = True
    hang: float = 100.0


def _bytes(folder: Path) -> Trial:
    from file_trials import changed_file, samples

    return partial(changed_file, samples=samples(folder), path=folder / "bytes.edgeq")


def _metadata(folder: Path) -> Trial:
    from file_trials import metadata, samples

    return partial(metadata, samples=samples(folder), path=folder / "metadata.edgeq")


def _acting(folder: Path) -> Trial:
    from file_trials import acting, policies

    return partial(acting, samples=policies(folder), path=folder / "acting.edgeq")


def _family(folder: Path) -> Trial:
    from gguf_networks.model_files import families, family

    return partial(family, samples=families(folder), path=folder / "family.edgeq")


def _template(folder: Path) -> Trial:
    from text_trials import plain_text, template

    return partial(template, text=plain_text())


def _tokenizer(folder: Path) -> Trial:
    from text_trials import tokenizer

    return tokenizer


def _config(folder: Path) -> Trial:
    from checkpoint_trials import config

    return config


def _policy(folder: Path) -> Trial:
    from checkpoint_trials import policy

    return policy


def _index(folder: Path) -> Trial:
    from checkpoint_trials import index, shards

    return partial(index, folder=shards(folder / "shards"))


def _header(folder: Path) -> Trial:
    from checkpoint_trials import header

    return partial(header, path=folder / "header.safetensors")


def _packed(folder: Path) -> Trial:
    from checkpoint_trials import packed

    return partial(packed, folder=folder / "packed")


def _gguf(folder: Path) -> Trial:
    from gguf_trials import gguf

    return partial(gguf, path=folder / "m.gguf")


def _cache(folder: Path) -> Trial:
    import logging

    from cache_trials import Caches

    # A line for each file that is not used.
    logging.getLogger("edgeq.server").setLevel(logging.ERROR)
    return Caches(folder).trial


def _request(folder: Path) -> Trial:
    """The server lives as long as the trial."""
    import contextlib
    import logging
    import subprocess
    import sys

    root = Path(__file__).parent.parent.parent
    sys.path.insert(0, str(root))
    from request_trials import Requests

    from edgeq.runtime import Model
    from tests.runtime.server.serving import TEMPLATE, serving

    logging.getLogger("edgeq.server").setLevel(logging.CRITICAL)
    convert = [sys.executable, "-m", "edgeq", "convert", str(root / "models" / "tiny-llama"), "-o", str(folder / "m.edgeq")]
    subprocess.run(convert, check=True, capture_output=True)
    model = Model.load(folder / "m.edgeq", threads=1, threads_prefill=1, context=96, chat_template=TEMPLATE)
    stack = contextlib.ExitStack()
    return Requests(stack.enter_context(serving(model)).port, stack).trial


def _mutant(folder: Path) -> Trial:
    from file_trials import samples
    from number_trials import mutant

    return partial(mutant, samples=samples(folder), path=folder / "mutant.edgeq")


def _sound(folder: Path) -> Trial:
    from number_trials import sound

    return partial(sound, path=folder / "sound.edgeq")


def _kill(folder: Path) -> Trial:
    from kills import Conversions

    return Conversions(folder).trial


KINDS = {
    "bytes": Kind(_bytes, 1_000_000),
    "metadata": Kind(_metadata, 100_000),
    "acting": Kind(_acting, 10_000, seconds=20.0, memory=4 << 30),
    "family": Kind(_family, 10_000, seconds=20.0, memory=4 << 30),
    "template": Kind(_template, 1000, seconds=5.0, hang=300.0),
    "tokenizer": Kind(_tokenizer, 2000, seconds=12.0, hang=300.0),
    "config": Kind(_config, 100_000),
    "policy": Kind(_policy, 100_000),
    "index": Kind(_index, 100_000),
    "header": Kind(_header, 100_000),
    "packed": Kind(_packed, 100_000),
    "gguf": Kind(_gguf, 100_000),
    "cache": Kind(_cache, 100_000),
    "request": Kind(_request, 10_000, seconds=20.0, memory=0, own_cache=False, hang=120.0),
    "mutant": Kind(_mutant, 10_000, seconds=60.0, memory=4 << 30, own_cache=False, hang=300.0),
    "sound": Kind(_sound, 2000, seconds=60.0, memory=4 << 30, own_cache=False, hang=300.0),
    "kill": Kind(_kill, 260, seconds=120.0, memory=0),
}
