"""A generation as records: the time to the first token, the prompt, and the tokens after the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeq.runtime import Measurement as Cost
from edgeq.runtime import Model
from edgeq.system import machine
from edgeq.tools.commands.bench import Test
from edgeq.tools.measure.measurement import MeasuredTest
from edgeq.tools.measure.report import facts, read_bandwidth


def records(model: Model, cost: Cost, draft: str) -> Iterator[MeasuredTest]:
    """What was measured of one generation, each thing once; those that did not happen are left out.

    cost    of a generation that has ended, or was ended;  draft: what proposed tokens, "off" for nothing
    """
    memory = machine.process_memory()
    about: dict[str, Any] = {"batch": 1, "context": model.context, "facts": facts(model)}
    sizes: dict[str, Any] = {"rss": memory.get("VmRSS"), "peak_rss": memory.get("VmHWM")}
    fresh = Test("pp", cost.prompt_tokens - cost.cached_tokens, cost.cached_tokens)
    prompt: dict[str, Any] = {"tokens": fresh.count, "depth": fresh.depth, **about, **sizes}
    if cost.ttft_s > 0:
        yield MeasuredTest("ttft", f"ttft {fresh.name}", samples_s=[cost.ttft_s], **prompt)
        yield MeasuredTest("pp", fresh.name, samples_s=[cost.prefill_s], **prompt)
    if cost.decode_tokens:
        tg = Test("tg", cost.decode_tokens, cost.prompt_tokens)
        rate = cost.decode_bytes_per_s
        bandwidth = read_bandwidth(model, reached=rate)
        yield MeasuredTest(
            "tg",
            tg.name,
            tg.count,
            tg.depth,
            samples_s=[cost.decode_s],
            step_s=list(cost.token_s),
            bytes_per_s=rate,
            read_bandwidth=bandwidth,
            bandwidth_share=rate / bandwidth if bandwidth else None,
            draft=draft,
            tokens_per_run=None if draft == "off" else cost.speculation.tokens_per_cycle,
            **about,
            **sizes,
        )
