"""Chooses the head's bit width and the default activation mode by measurement.

On a little of the calibration text the quantized layers, as they lie in the unfinished file, are run twice: with exact inputs
(a16), and with the inputs of every quantized layer rounded to 8 bits as a target does (a8).  After the last layer

    head    the smallest of 4, 6 and 8 bits whose mean KL divergence from the unrounded head stays under MAX_HEAD_KL
    mode    a8 if it raises the perplexity by no more than MAX_A8_RISE; not measured where the method or the options fix it

For a model that embeds texts, which has no head, the mode is a8 if the vectors of all beginnings of the rows then have a mean
cosine distance of at most MAX_A8_DISTANCE from those of a16.

Neither can be measured without text that the model was trained for; then the head has 8 bits and the mode is a16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.converters.calibration.compute import Compute
from edgeq.converters.calibration.forward import TokenForward, WholeReader
from edgeq.converters.calibration.head import LogSumExp, capped, head_slabs, last_norm, vectors
from edgeq.converters.calibration.staged import quantized_linears
from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import HEAD
from edgeq.converters.method import Method
from edgeq.converters.planning.plan import PrecisionChoice
from edgeq.converters.rounding.linears import RoundRows
from edgeq.converters.rounding.quantizer import quantize, restored
from edgeq.format.codec import Codec
from edgeq.format.quantization import activation_block, activation_limit
from edgeq.format.records import Mode
from edgeq.network.config import ModelConfig

MAX_HEAD_KL = 0.005
MAX_A8_RISE = 0.003
MAX_A8_DISTANCE = 0.001


def quantize_inputs(layer: nn.Module, codecs: Mapping[str, Codec]) -> None:
    """Round the inputs of the linear layers of `layer` to 8 bits from now on; `codecs`: of their weights, by module path."""

    def rounds(own: Codec) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        return lambda module, args: (rounded_activations(args[0], own), *args[1:])

    for path, module in quantized_linears(layer).items():
        if (own := codecs[path]).integer:
            module.register_forward_pre_hook(rounds(own))


def rounded_activations(x: Tensor, codec: Codec) -> Tensor:
    """x [..., channels] in integers up to activation_limit, a scale per block of activation_block channels."""
    size, limit = activation_block(codec), activation_limit(codec, "a8")
    channels = x.shape[-1]
    blocks = nn.functional.pad(x, (0, -channels % size)).unflatten(-1, (-1, size))
    scale = blocks.abs().amax(-1, keepdim=True) / limit
    blocks = (blocks / torch.where(scale > 0, scale, 1.0)).round().clamp(-limit, limit) * scale
    rounded: Tensor = blocks.flatten(-2)[..., :channels]
    return rounded


@torch.no_grad()
def choose(
    method: Method,
    tensors: Tensors,
    forward: Callable[[], TokenForward],
    stored: WholeReader,
    heads: Mapping[int, Codec | None],
    codecs: Mapping[str, Codec],
    *,
    on_share: Callable[[float], None] = lambda share: None,
    round_rows: RoundRows = quantize,
    compute: Compute | None = None,
) -> PrecisionChoice:
    """Measure on what `forward` holds, each time from the first layer on; `on_share` is called with the share of the work of
    the layers that is done.

    tensors      of the model;  stored: those of its decoder layers as the file has them
    heads        candidates, smallest first: bits -> codec, None for an unrounded head
    codecs       of the weights of decoder layers, by tensor
    round_rows   how rows of the head are rounded
    compute      where layers and head run; None: on the CPU
    """
    compute, config, began = compute or Compute(), method.stored_config, forward()
    tokens = began.tokens
    runs = 1 if method.mode else 2
    exact = _outputs(began, method, stored, None, lambda share: on_share(share / runs))
    rounded = exact
    if not method.mode:
        rounded = _outputs(forward(), method, stored, codecs, lambda share: on_share((1 + share) / 2))
    norm = last_norm(config, tensors)
    # What comes next is a picture's token at some positions: no model is asked for those.
    following = torch.cat([each[:, 1:].reshape(-1) for each in tokens])
    asked = following != (config.vision.image_token_id if config.vision else -1)
    # Inputs of the head at every position that has a next token: [tokens, hidden].
    states = [torch.cat([x[:, :-1].flatten(0, 1) for x in each])[asked] for each in (exact, rounded)]
    inputs = [compute.put(norm(x)) for x in states]
    kl, rise = _measure(config, head_slabs(tensors.rows, config, len(states[0])), inputs, following[asked], heads, round_rows)
    head = next((bits for bits in heads if kl[bits] <= MAX_HEAD_KL), list(heads)[-1])
    measured = {"tokens": sum(each.numel() for each in tokens), "head_kl": {str(bits): kl[bits] for bits in heads}}
    if method.mode:
        return PrecisionChoice(head, method.mode, measured)
    return PrecisionChoice(
        head, "a8" if rise[head] <= math.log1p(MAX_A8_RISE) else "a16", measured | {"a8_nll_rise": rise[head]}
    )


@torch.no_grad()
def choose_for_embedding(
    method: Method,
    tensors: Tensors,
    forward: Callable[[], TokenForward],
    stored: WholeReader,
    codecs: Mapping[str, Codec],
    on_share: Callable[[float], None] = lambda share: None,
) -> PrecisionChoice:
    """`choose` for a model that embeds texts; its embedding keeps the bits of the options."""
    config, began = method.stored_config, forward()
    head, tokens = method.options.head or 8, sum(each.numel() for each in began.tokens)
    if method.mode:
        return PrecisionChoice(head, method.mode, {"tokens": tokens})
    norm = last_norm(config, tensors)
    exact, rounded = (
        [vectors(norm(states), config, tensors) for states in _outputs(each, method, stored, given, share)]
        for each, given, share in (
            (began, None, lambda share: on_share(share / 2)),
            (forward(), codecs, lambda share: on_share((1 + share) / 2)),
        )
    )
    near = torch.cat([nn.functional.cosine_similarity(a, b, dim=-1).flatten() for a, b in zip(exact, rounded, strict=True)])
    distance = float((1 - near.double()).mean())
    mode: Mode = "a8" if distance <= MAX_A8_DISTANCE else "a16"
    return PrecisionChoice(head, mode, {"tokens": tokens, "a8_cosine_distance": distance})


def _outputs(
    forward: TokenForward,
    method: Method,
    stored: WholeReader,
    rounded: Mapping[str, Codec] | None,
    on_share: Callable[[float], None],
) -> Sequence[Tensor]:
    """Outputs of the last layer as stored, batch by batch; `rounded`: inputs rounded for these codecs, by tensor."""
    layers = method.config.num_hidden_layers
    for index in range(layers):
        on_share(index / layers)
        layer = forward.load(index, stored)
        method.install(index, layer)
        if rounded:
            prefix, ending = f"model.layers.{index}.", ".weight"
            quantize_inputs(
                layer, {n.removeprefix(prefix).removesuffix(ending): c for n, c in rounded.items() if n.startswith(prefix)}
            )
        forward.advance(index, layer)
        forward.unload(layer)
    return forward.states


def _measure(
    config: ModelConfig,
    head: Iterator[NDArray[np.float32]],
    inputs: list[Tensor],
    targets: Tensor,
    heads: Mapping[int, Codec | None],
    round_rows: RoundRows,
) -> tuple[dict[int, float], dict[int, float]]:
    """Per candidate: mean KL from the unrounded head, and mean rise of the negative log-likelihood from a16 to a8.

    KL(p || q) = sum p (l - m) - log sum exp l + log sum exp m for logits l and m, summed slab by slab of the vocabulary.
    """
    exact, rounded = inputs
    count, first = len(targets), 0
    everything = LogSumExp.of(count)
    totals = {bits: (LogSumExp.of(count), LogSumExp.of(count)) for bits in heads}
    gaps = {bits: torch.zeros(count, dtype=torch.float64) for bits in heads}
    wanted = {bits: torch.zeros(2, count, dtype=torch.float64) for bits in heads}
    for rows in head:
        own = torch.from_numpy(rows)
        weight = own.to(exact.device)
        here = ((targets >= first) & (targets < first + len(weight))).nonzero()[:, 0]
        at = here.to(exact.device), (targets[here] - first).to(exact.device)
        logits = capped(exact @ weight.T, config)
        share, inside = everything.add(logits), logits.softmax(1)
        for bits, codec in heads.items():
            candidate = weight if codec is None else restored(round_rows(own, codec, HEAD), codec).to(exact.device)
            views = (exact, rounded_activations(rounded, codec) if codec else rounded)
            for i, x in enumerate(views):
                approximate = capped(x @ candidate.T, config)
                totals[bits][i].add(approximate)
                wanted[bits][i, here] = approximate[at].cpu().double()
                if i == 0:
                    gap = (inside * (logits - approximate)).sum(1).cpu().double()
                    gaps[bits] += share * (gap - gaps[bits])
        first += len(own)
    kl = {bits: float((gaps[bits] - everything.value + totals[bits][0].value).mean()) for bits in heads}
    nll = {bits: [totals[bits][i].value - wanted[bits][i] for i in range(2)] for bits in heads}
    return kl, {bits: float((nll[bits][1] - nll[bits][0]).mean()) for bits in heads}
