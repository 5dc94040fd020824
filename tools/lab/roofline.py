"""Upper bounds of this machine's speed: `python -m edgeq.tools.lab.roofline [--refresh] [--json]`.

Read bandwidth bounds decode, the integer peak bounds prefill.  Each is measured in about a second and kept per machine; run,
bench and peers use the same numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import click

from edgeq import targets
from edgeq.system import machine
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.terminal import progress


@dataclass(frozen=True)
class Roofline:
    """Limits by number of threads: read_bandwidth in bytes per second, integer_peak in 8-bit operations per second.
    decode_threads: the number of threads that decodes fastest.
    """

    processor: str
    arch: str
    cores: int
    big_cores: int
    memory: int
    read_bandwidth: dict[int, float]
    integer_peak: dict[int, float]
    decode_threads: int


def counts(cores: int) -> list[int]:
    """Numbers of threads worth a line: powers of two below `cores`, then `cores`."""
    return [*(1 << i for i in range(cores.bit_length()) if 1 << i < cores), cores]


def measure(refresh: bool) -> Roofline:
    """The limits, measured where they are not known yet or with `refresh`."""
    cpu, threads = machine.cpu(), counts(machine.cpu().cores)
    bandwidth: dict[int, float] = {}
    peak: dict[int, float] = {}
    # Imported here: where this target cannot run, these modules cannot be imported.
    from edgeq.targets.cpu import probes
    from edgeq.targets.cpu.choose_isa import choose

    isa, _ = choose()
    with progress() as report:
        for i, n in enumerate(threads):
            report(i, len(threads), f"{n} threads")
            bandwidth[n] = probes.read_bandwidth(n, refresh)
            peak[n] = probes.integer_peak(isa, n, refresh)
        decode = probes.decode_threads(isa, refresh)
    return Roofline(cpu.name, cpu.arch, cpu.cores, cpu.big_cores, machine.memory().total, bandwidth, peak, decode)


def text(result: Roofline) -> str:
    """A markdown table and the lines around it."""
    big = f", {result.big_cores} of them big" if result.big_cores != result.cores else ""
    lines = [f"{result.processor}, {result.arch}, {result.cores} cores{big}, {result.memory / 1e9:.1f} GB of memory", ""]
    lines += ["| threads | read GB/s | 8-bit GOPS |", "|---|---|---|"]
    lines += [f"| {n} | {read / 1e9:.2f} | {result.integer_peak[n] / 1e9:,.0f} |" for n, read in result.read_bandwidth.items()]
    return "\n".join([*lines, "", f"decode is fastest with {result.decode_threads} thread{'s' * (result.decode_threads > 1)}"])


@click.command(cls=Command)
@click.option("--refresh", is_flag=True, help="Measure again instead of showing the numbers kept for this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(refresh: bool, as_json: bool) -> None:
    """Print the read bandwidth and the integer peak of this machine by number of threads."""
    reason = targets.load("cpu").refusal()
    if reason is not None:
        raise click.ClickException(f"the CPU target, which measures, cannot run here: {reason}")
    found = measure(refresh)
    click.echo(json.dumps(asdict(found), indent=1) if as_json else text(found))


if __name__ == "__main__":
    main()
