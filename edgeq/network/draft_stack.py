"""The layer that drafts tokens for a decoder (multi-token prediction), as a stack of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.rope import UNROTATED
from edgeq.network.stack import Stack

OWN = {"num_hidden_layers": 1, "sliding_windows": (), "layers_without_rope": (), "delta_net": None}
"""What it has otherwise than its decoder: one layer, of attention, that sees all positions."""
MAX_DRAFT_RUNS = 16
"""Runs of tokens that a layer may draft: each is a product of its own."""
BLOCK = 16
"""Tokens whose rows of a head lie in one block, which is read whole."""


def check_draft_tokens(bounds: tuple[int, ...], vocab_size: int) -> None:
    """FormatError unless `bounds` are begin and end, by turns, of ascending runs of whole blocks of the vocabulary with other
    tokens between them; none are allowed anywhere.

    vocab_size   0: there is no layer that drafts
    """
    ascending = all(type(bound) is int for bound in bounds) and list(bounds) == sorted(set(bounds))
    if not ascending or len(bounds) % 2 or len(bounds) > 2 * MAX_DRAFT_RUNS:
        raise FormatError(
            f"config draft_tokens must be begin and end of at most {MAX_DRAFT_RUNS} runs of tokens, all ascending"
        )
    if bounds and not 0 <= bounds[0] < bounds[-1] <= vocab_size:
        raise FormatError(f"config draft_tokens are {bounds[0]} to {bounds[-1]}; the layer can draft {vocab_size} tokens")
    if any(bound % BLOCK and bound != vocab_size for bound in bounds):
        raise FormatError(f"config draft_tokens must be multiples of {BLOCK}, or the end of the vocabulary")


@dataclass(frozen=True, kw_only=True)
class DraftStack(Stack):
    """A layer of the decoder's sizes that reads the next token and the decoder's state before it (Gloeckle et al. 2024, arXiv
    2404.19737; DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """

    prefix: ClassVar[str] = "draft."

    @classmethod
    def beside(cls, decoder: Stack) -> DraftStack:
        return cls(**{f.name: getattr(decoder, f.name) for f in fields(Stack)} | OWN)

    @staticmethod
    def check_beside(decoder: Stack, *others: Any) -> None:
        """UnsupportedError: a decoder beside which it is not run; `others`: true if it has what no Stack says."""
        plain = decoder.alike and decoder.pre_norms and decoder.rope.kind not in UNROTATED
        other = (
            *(decoder.layer_norm, decoder.post_norms, decoder.parallel, decoder.normed_residual != "none", *others),
            *(decoder.conv_layers, decoder.ssd, decoder.attention_sinks, decoder.layer_scalars, any(decoder.sliding_windows)),
        )
        if any(other) or not plain:
            raise UnsupportedError(
                "draft_layers are supported with layers of attention and delta_net, norms before their blocks and rotary "
                "positions, without sliding windows and pooling"
            )
