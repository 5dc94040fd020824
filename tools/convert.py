"""`edgeq convert`: the conversion with its progress, and whether the result fits a device."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from edgeq.container import ModelFile
from edgeq.converters.method_options import check_method_options
from edgeq.converters.options import ConvertOptions
from edgeq.converters.output import check_output
from edgeq.devices import Device, device
from edgeq.metadata import Metadata
from edgeq.partial import partial_path
from edgeq.runtime.context_size import DEFAULT_CONTEXT
from edgeq.tools.params import refuse_gguf
from edgeq.tools.report import bits_per_weight
from edgeq.tools.terminal import note, progress


def quiet_libraries() -> None:
    """Silence what torch and transformers print on standard error: what a user must know is an error of edgeq."""
    for name in ("transformers", "torch", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|huggingface_hub)")


def convert(source: str, output: Path, target: str | None, options: dict[str, Any]) -> None:
    """Convert `source` into `output` and print a line about the result to standard error.

    InputError: a GGUF file; otherwise as edgeq.converters.convert.convert.  ModuleNotFoundError: torch or transformers is not
    installed.
    """
    refuse_gguf(Path(source))
    profile = device(target) if target else None
    settings = ConvertOptions(**options)
    check_method_options(settings)
    check_output(source, output)
    # torch is imported from here on, which takes seconds.
    quiet_libraries()
    from edgeq.converters.convert import carry_out, preflight
    from edgeq.converters.layer_report import LayerReport

    with progress() as bar:

        def on_layer(report: LayerReport) -> None:
            note(f"{report}, {bar.left} left")

        try:
            converted = carry_out(preflight(source, settings), output, bar, note, on_layer)
        except KeyboardInterrupt:
            if partial_path(output).exists():
                note("interrupted; run the same command again to continue")
            raise
    file = converted.file
    note(f"{output}: {'already there, ' * converted.found}{summary(file)}")
    if profile:
        note(verdict(profile, file.metadata, file.size))


def summary(file: ModelFile) -> str:
    """Size, effective bits per weight and identity in one line."""
    bits = bits_per_weight(file.metadata, lambda name: True)
    return f"{file.size / 1e6:,.1f} MB, {bits:.2f} bits per weight, identity {file.identity[:16]}"


def verdict(profile: Device, metadata: Metadata, size: int) -> str:
    """One line: whether the file with the default context fits a device, and the decode speed that its bandwidth allows."""
    sizes = metadata.bytes_per_token()
    context = min(DEFAULT_CONTEXT, metadata.config.max_position_embeddings)
    need, room = size + context * sizes["kv_per_position"], profile.usable_memory
    fits = "fits" if need <= room else "does not fit"
    ceiling = profile.ceiling(sizes["weights"] + sizes["head"])
    return (
        f"{profile.name}: {need / 1e9:.2f} GB with a context of {context} {fits} in {room / 1e9:.1f} GB; "
        f"at {profile.usable_bandwidth / 1e9:.1f} GB/s at most {ceiling:,.0f} tokens per second"
    )
