"""`edgeq serve`: a model for clients of OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeq.errors import InputError
from edgeq.runtime.session.requantize import NEVER
from edgeq.tools.cli.adapters import adapted, named
from edgeq.tools.cli.terminal import note
from edgeq.tools.commands.run import load, read_template

KEY_VARIABLE = "EDGEQ_API_KEY"
MIB = 1 << 20


def serve(
    *,
    model: Path,
    names: tuple[str, ...],
    adapters: tuple[str, ...],
    api_key_file: Path | None,
    no_auth: bool,
    cache_memory: float | None,
    body: float | None,
    chat_template: Path | None,
    quiet: bool,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Until a signal ends it.  What it says goes to standard error.

    settings   fields of Settings;  options: those of Model.load

    InputError: an address that others reach without a key, a key file that others can read, a cache that is too small.
    """
    from edgeq.runtime.batching.prompt_store import prepare_folder
    from edgeq.runtime.server.serve import bound, check_address, warm
    from edgeq.runtime.server.serve import serve as run
    from edgeq.runtime.server.settings import Settings, read_keys

    keys = {} if no_auth else read_keys(api_key_file, os.environ.get(KEY_VARIABLE))
    if no_auth and api_key_file:
        raise InputError("--no-auth and --api-key-file exclude each other")
    folders = named(adapters)
    made = Settings(names=(*names, model.stem) if names else (model.stem,), keys=keys, **settings)
    check_address(made, no_auth)
    if made.prompt_cache and not made.share_prefixes:
        raise InputError("--prompt-cache and --no-share-prefixes exclude each other")
    if made.prompt_cache:
        prepare_folder(made.prompt_cache)
    sockets = bound(made)
    # Weights that were rounded for one prompt would be wrong for the others of a run.
    loaded = load(model, read_template(chat_template), options | {"requantization": NEVER}, embeds=True, draft=made.draft)
    note(f"runs on  {loaded.description}")
    made = replace(made, adapters=adapted(loaded, folders))
    warm(loaded)
    if body is None and loaded.config.vision:
        made = replace(made, most_body=16 * MIB)
    elif body is not None:
        made = replace(made, most_body=int(body))
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    # It has a line for every chunk that a client did not wait for.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.getLogger("edgeq.server").setLevel(logging.WARNING if quiet else logging.INFO)

    def started(port: int) -> None:
        host = f"[{made.host}]" if ":" in made.host else made.host
        note(f"serves   {made.names[0]} at http://{host}:{port}/v1, {made.seats} texts at once, context {loaded.context:,}")

    memory = None if cache_memory is None else int(cache_memory)
    run(loaded, made, sockets=sockets, cache_bytes=memory, on_start=started)
