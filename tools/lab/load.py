"""Load of any server with OpenAI's interface: `python -m edgeq.tools.lab.load URL --clients 1,4 --prompt 128 --tokens 128`.

Clients of a closed loop each send a request, read its stream to the end and send the next.  Prompts are token ids, so that
every server gets the same; each request has others, so that no cache knows them, but for the first `--shared` tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import click

from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.params import Count, Several

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Answer:
    """Times of the pieces of one answer, from its request on, in seconds; tokens: as the server counted them."""

    client: int
    pieces: list[float]
    tokens: int


@dataclass(frozen=True)
class Load:
    """One run.  Seconds; gap: the longest between two pieces of an answer; client_s: each client's own, from its first request
    to its last answer; cpu_s: of the server's process; failed: requests without an answer.
    """

    clients: int
    seconds: float
    tokens: int
    requests: int
    failed: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    gap_p50: float
    gap_p99: float
    fairness: float
    cpu_s: float | None
    rss_mib: float | None


async def ask(address: tuple[str, int], path: str, body: dict[str, Any], client: int) -> Answer | None:
    """None: the server did not answer with a whole stream."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    lines = f"POST {path} HTTP/1.1", f"Host: {address[0]}", "Content-Type: application/json", f"Content-Length: {len(data)}"
    started = perf_counter()
    writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + data)
    pieces, tokens, done = list[float](), 0, False
    try:
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if any(choice.get("text") for choice in event.get("choices", ())):
                    pieces.append(perf_counter() - started)
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
    finally:
        writer.close()
    return Answer(client, pieces, tokens) if done and tokens else None


async def run(url: str, clients: int, requests: int, make: Any, process: int | None) -> Load:
    """Every client sends `requests` requests, one after another."""
    parts = urlsplit(url)
    address, path = (parts.hostname or "127.0.0.1", parts.port or 80), parts.path.rstrip("/") + "/completions"
    answers, failed, own = list[Answer](), 0, list[float]()

    async def client(number: int) -> None:
        nonlocal failed
        began = perf_counter()
        for _ in range(requests):
            answer = await ask(address, path, make(), number)
            if answer:
                answers.append(answer)
            else:
                failed += 1
        own.append(perf_counter() - began)

    cpu, started = _cpu(process), perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    seconds = perf_counter() - started
    if not answers:
        raise click.ClickException(f"{url}: no request was answered")
    tokens = sum(answer.tokens for answer in answers)
    # A model with random weights may say bytes that are no text.
    firsts = [answer.pieces[0] for answer in answers if answer.pieces]
    gaps = [max(b - a for a, b in zip(each.pieces, each.pieces[1:], strict=False)) for each in answers if len(each.pieces) > 1]
    paces = [(a.pieces[-1] - a.pieces[0]) / (a.tokens - 1) for a in answers if len(a.pieces) > 1 and a.tokens > 1]
    used = _cpu(process)
    return Load(
        clients,
        seconds,
        tokens,
        len(answers),
        failed,
        tokens / seconds,
        quantile(firsts, 0.5),
        quantile(firsts, 0.95),
        quantile(paces, 0.5),
        quantile(gaps, 0.5),
        quantile(gaps, 0.99),
        max(own) / min(own),
        None if cpu is None or used is None else used - cpu,
        _rss(process),
    )


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of them lies; 0 of none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def _cpu(process: int | None) -> float | None:
    """Seconds of processor time of a process."""
    if process is None:
        return None
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _rss(process: int | None) -> float | None:
    """MiB of a process that are not mapped from files."""
    if process is None:
        return None
    found = [line.split()[1] for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(found[0]) / 1024


@click.command("load", cls=Command)
@click.argument("url")
@click.option(
    "--clients", type=Several(Count(1)), default="1,4", show_default=True, help="Clients at once; each number is a run."
)
@click.option("--requests", type=click.IntRange(1), default=4, show_default=True, help="Requests of each client.")
@click.option("--prompt", type=click.IntRange(1), default=128, show_default=True, help="Tokens of a prompt.")
@click.option("--shared", type=click.IntRange(0), default=0, show_default=True, help="Of these, tokens that all begin with.")
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens of an answer.")
@click.option("--vocabulary", type=click.IntRange(2), default=1000, show_default=True, help="Prompts have tokens below this.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="The runs, so often, alternating.")
@click.option("--process", type=int, help="Id of the server's process, for its processor time and memory.")
def main(
    url: str,
    *,
    clients: tuple[int, ...],
    requests: int,
    prompt: int,
    shared: int,
    tokens: int,
    vocabulary: int,
    rounds: int,
    process: int | None,
) -> None:
    """Load URL, such as http://127.0.0.1:8080/v1, and print a JSON object for every run."""
    draw = random.Random(0)
    common = [draw.randrange(1, vocabulary) for _ in range(shared)]

    def make() -> dict[str, Any]:
        mine = common + [draw.randrange(1, vocabulary) for _ in range(max(1, prompt - shared))]
        fixed = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}
        return {"prompt": mine, "max_tokens": tokens, **fixed}

    for _ in range(rounds):
        for count in clients:
            click.echo(json.dumps(asdict(asyncio.run(run(url, count, requests, make, process)))))


if __name__ == "__main__":
    main()
