"""`edgeq convert`: the conversion with its progress, and whether the result fits a device."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeq.converters.budget.budget import WITHIN
from edgeq.converters.budget.plan_file import check_place, write_plan, write_text
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.planning.method_options import check_method_options
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.output import check_output
from edgeq.errors import InputError, ResourceError
from edgeq.format.container import ModelFile
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.session.context_size import DEFAULT_CONTEXT, expected_cache_bytes
from edgeq.system.devices import DeviceSpec, device, needed
from edgeq.tools.cli.terminal import note, progress, write
from edgeq.tools.commands.budget import decode_here, resolved
from edgeq.tools.hub.fetch import checkpoint_source
from edgeq.tools.hub.names import is_hub_name
from edgeq.tools.measure.report import overall_bits
from edgeq.tools.quality.chart import chart
from edgeq.tools.quality.frontier import HERE, beside, devices_shown, marks, rows, show, show_beside

if TYPE_CHECKING:
    from edgeq.converters.convert import ConversionResult
    from edgeq.converters.planning.plan import ConversionPlan
    from edgeq.converters.probing.decode_choice import DecodeHere


def quiet_libraries() -> None:
    """Silence what torch and transformers print on standard error: what a user must know is an error of edgeq."""
    for name in ("transformers", "torch", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|huggingface_hub)")


def convert(source: str, output: Path | None, target: str | None, as_json: bool, options: dict[str, Any]) -> None:
    """Convert `source` into `output`; None: only say what would be made, on standard output.

    What it will take, progress and the result go to standard error; as_json: the result to standard output, as one object.
    Errors: as edgeq.converters.convert.convert.  ResourceError: it will not fit the device `target`.
    ModuleNotFoundError: torch or transformers is not installed.
    """
    profile = device(target) if target else None
    plot, save = options.pop("plot", None), options.pop("save_plan", None)
    here = None if profile else options.get("speed")
    settings = ConvertOptions(**resolved(options, profile))
    if (plot or save) and settings.budget is None:
        raise InputError(
            f"{'--plot' if plot else '--save-plan'} goes with a budget: --bits 3.5, --size, --read, --kl or --speed"
        )
    for path in filter(None, (plot, save)):
        check_place(path)
    check_method_options(settings)
    if is_hub_name(source):
        access = HubAccess(settings.token, settings.revision, settings.offline)
        source, tower = checkpoint_source(source, access, with_tower=settings.mmproj is None)
        settings = replace(settings, mmproj=settings.mmproj or tower)
    if output is not None:
        check_output(source, output)
    if settings.token:
        note("--token is deprecated: others can read it in the list of processes; run `hf auth login`, or set HF_TOKEN")
    # torch is imported from here on, which takes seconds.
    quiet_libraries()
    from edgeq.converters.convert import preflight

    try:
        with progress() as bar:
            plan = preflight(source, settings, bar.in_bytes)
        if settings.rotate == "auto":
            from edgeq.converters.probing.rotation_choice import choose_rotation

            with progress() as bar:
                plan = choose_rotation(plan, bar, note)
        allocations: dict[str, list[dict[str, Any]]] = {}
        if settings.budget is not None:
            with nullcontext() if here is None else decode_here(plan, output) as decode:
                plan, allocations = allocated(plan, HERE if decode else profile, plot, save, decode)
            if output is not None or not as_json:
                stream = sys.stdout if output is None else sys.stderr
                show(allocations["frontier"], stream)
                show_beside(allocations["neighbours"], stream)
        facts = prospect(plan, profile) | allocations
        if output is None:
            for line in [json.dumps(facts, indent=1)] if as_json else [*lines(facts), *facts["notes"]]:
                write(f"{line}\n")
            return
        found = carried_out(plan, output, facts)
    except KeyboardInterrupt:
        note("interrupted; run the same command again to continue")
        raise
    note(f"{output}: {'already there, ' * found.already_there}{summary(found.file)}")
    for line in outcome(found.file):
        note(line)
    if here is not None:
        facts |= {"speed": {"asked": here, "decoded": decoded(found.file, here)}}
    if as_json:
        made = {"output": str(output), "already_there": found.already_there, "identity": found.file.identity}
        write(json.dumps(facts | made | {"file_bytes": found.file.size}, indent=1) + "\n")


def carried_out(plan: ConversionPlan, output: Path, facts: dict[str, Any]) -> ConversionResult:
    """Say what it will take, and do it.  ResourceError: the result will not fit the device."""
    from edgeq.converters.convert import carry_out

    def begin() -> None:
        if facts["device"] and not facts["device"]["fits"]:
            raise ResourceError(f"{verdict(facts)}; choose fewer bits, or leave out --for to convert it nevertheless")
        for line in lines(facts):
            note(line)

    with progress() as bar:
        return carry_out(plan, output, bar, note, lambda report: note(f"{report}, {bar.left} left"), begin)


def allocated(
    plan: ConversionPlan, profile: DeviceSpec | None, plot: Path | None, save: Path | None, here: DecodeHere | None
) -> tuple[ConversionPlan, dict[str, list[dict[str, Any]]]]:
    """The plan with the codecs that its budget allows, the frontier, and the neighbours of what was chosen; a chart and the
    codecs go to the files named."""
    from edgeq.converters.probing.allocate import allocate

    with progress() as bar:
        found = allocate(plan, bar, note, here)
    frontier = rows(found.frontier.points(), found.point, devices_shown(profile))
    if save:
        write_plan(save, found.point.names)
    if plot:
        title = f"{plan.checkpoint.name}: bits where they matter"
        write_text(plot, chart({title: marks(frontier)}, "predicted KL divergence, nats"))
    budget = plan.options.budget
    neighbours = found.frontier.neighbours(found.point, "size" if budget and budget.unit == "size" else "read")
    return found.plan, {"frontier": frontier, "neighbours": beside(neighbours, found.point)}


def outcome(file: ModelFile) -> list[str]:
    """The measured divergence of a file with an allocation, beside what was predicted; nothing of other files."""
    measured = file.metadata.provenance.get("measured")
    found = measured if isinstance(measured, dict) else {}
    if "kl" not in found:
        return []
    line = f"KL divergence {found['kl']:.3g} nats on calibration text"
    if "kl_predicted" not in found:
        return [line]
    off = found["kl"] / found["kl_predicted"] - 1 if found["kl_predicted"] else 0.0
    lines = [f"{line}, predicted {found['kl_predicted']:.3g} ({100 * off:+.0f} %)"]
    if abs(off) > WITHIN and 3 <= overall_bits(file.metadata) <= 6:
        lines.append(
            f"the prediction missed by more than {100 * WITHIN:.0f} %: sums of single parts do not describe this model well"
        )
    return lines


def decoded(file: ModelFile, asked: float) -> float | None:
    """The tokens per second at which this machine decodes a file, which are printed; None: it does not fit in memory."""
    from edgeq.tools.measure.decode_speed import seconds_here

    seconds = seconds_here(file)
    if seconds is None:
        note(f"not decoded here, where {asked:g} tokens per second were asked for: it does not fit in the available memory")
        return None
    note(f"decodes {1 / seconds:,.1f} tokens per second here, asked for {asked:g} ({100 * (1 / seconds / asked - 1):+.0f} %)")
    return 1 / seconds


def prospect(plan: ConversionPlan, profile: DeviceSpec | None) -> dict[str, Any]:
    """What a plan will make and take, before it is carried out.  Sizes are in bytes, and the most that is possible.

    notes    lines for the user, which the conversion prints too: why a GPU is not used, groups of another size
    device   None, or how the file fits: `needs` with the cache of `context` positions, and the bound of its speed; None where
             this version does not run
    """
    metadata = plan.metadata()
    sizes = metadata.bytes_per_token()
    context = min(DEFAULT_CONTEXT, metadata.config.max_position_embeddings)
    needs = needed(plan.output_bytes, expected_cache_bytes(decoder(metadata), metadata.kv, context))
    return {
        "source": plan.checkpoint.name,
        "method": plan.method.name,
        "file_bytes": plan.output_bytes,
        "bits_per_weight": overall_bits(metadata),
        "bytes_per_token": sizes,
        "memory_bytes": plan.memory_bytes,
        "tuning_seconds": _tuning_seconds(plan),
        "computes_on": plan.compute.kind,
        "notes": plan.notes(),
        "device_memory_bytes": plan.device_bytes(plan.compute.rows) if plan.compute.apart else 0,
        "device": profile
        and {
            "name": profile.name,
            "context": context,
            "needs": needs,
            "has": profile.usable_memory,
            "fits": needs <= profile.usable_memory,
            "bandwidth": profile.usable_bandwidth,
            "tokens_per_second": profile.ceiling(sizes["weights"] + sizes["head"]) if profile.supported else None,
        },
    }


def _tuning_seconds(plan: ConversionPlan) -> float | None:
    if not plan.method.options.tune:
        return None
    # Imports torch.
    from edgeq.converters.planning.tuning_time import tuning_seconds

    return tuning_seconds(plan)


def lines(facts: dict[str, Any]) -> list[str]:
    """The same in words."""
    read = facts["bytes_per_token"]["weights"] + facts["bytes_per_token"]["head"]
    size = (
        f"{facts['method']}: a file of at most {facts['file_bytes'] / 1e6:,.1f} MB, {facts['bits_per_weight']:.2f} bits per "
        f"weight, {read / 1e6:,.1f} MB read per token; converting needs up to {facts['memory_bytes'] / 1e9:.1f} GB of memory"
    )
    if facts["device_memory_bytes"]:
        size += f" and {facts['device_memory_bytes'] / 1e9:.1f} GB of {facts['computes_on']}'s"
    if facts["tuning_seconds"]:
        size += f"; --tune takes about {timedelta(seconds=round(facts['tuning_seconds']))} (h:mm:ss) more"
    return [size, verdict(facts)] if facts["device"] else [size]


def verdict(facts: dict[str, Any]) -> str:
    """One line: whether the file with the default context fits the device, and the decode speed that its bandwidth allows."""
    found = facts["device"]
    fits = (
        f"{found['name']}: {found['needs'] / 1e9:.2f} GB with a context of {found['context']} "
        f"{'fits' if found['fits'] else 'does not fit'} in {found['has'] / 1e9:.1f} GB"
    )
    if found["tokens_per_second"] is None:
        return f"{fits}; this version runs on CPUs only, so no speed is promised there"
    return f"{fits}; at {found['bandwidth'] / 1e9:.1f} GB/s at most {found['tokens_per_second']:,.0f} tokens per second"


def summary(file: ModelFile) -> str:
    """Size, effective bits per weight and identity in one line."""
    bits = overall_bits(file.metadata)
    return f"{file.size / 1e6:,.1f} MB, {bits:.2f} bits per weight, identity {file.identity[:16]}"
