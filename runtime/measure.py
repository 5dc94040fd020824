"""What a generation cost: one record for the command line, the benchmark and the profiler."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Measurement:
    """Seconds, tokens and bytes of one generation; filled while it runs.

    prompt_tokens        tokens of the prompt, of which cached_tokens were in the cache already
    generated_tokens     tokens drawn, a stop token included
    load_s               opening the file and compiling
    ttft_s               from the call to the first token (TTFT)
    prefill_s            of that, running the prompt
    decode_s             running and drawing the tokens behind the first
    decode_steps         runs of one row: generated_tokens - 1, unless one was interrupted
    context_positions    cache positions read by those runs, mean over the layers (a sliding window reads fewer)
    step_bytes           weights and head read by a run of one row
    position_bytes       cache bytes of a position over all layers
    """

    load_s: float
    step_bytes: int
    position_bytes: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    context_positions: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens run per second; those found in the cache do not count."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_s)

    @property
    def decode_rate(self) -> float:
        """Tokens per second behind the first; its inverse is the time per output token (TPOT)."""
        return _rate(self.decode_steps, self.decode_s)

    @property
    def decode_bytes(self) -> float:
        """Bytes that had to be read to decode: weights and head once a step, and the cache."""
        return self.decode_steps * self.step_bytes + self.context_positions * self.position_bytes

    @property
    def decode_bytes_per_s(self) -> float:
        return _rate(self.decode_bytes, self.decode_s)

    def as_dict(self) -> dict[str, float]:
        """Fields and rates, for JSON."""
        rates = ("prefill_rate", "decode_rate", "decode_bytes", "decode_bytes_per_s")
        return {**asdict(self), **{name: getattr(self, name) for name in rates}}


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
