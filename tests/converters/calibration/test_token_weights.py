"""What single tokens count in the moments of GPTQ: those that all others look at count more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edgeq.converters.calibration import torch_decoder
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.staged import staged
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.families.network import described, open_tensors
from edgeq.converters.importers import open_source

Checkpoint = Callable[..., Path]


def of_tokens(folder: Path) -> BlockForward:
    source = open_source(str(folder), HubAccess())
    family, config = described(source)
    tokens = torch.randint(config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(4))
    return BlockForward(open_tensors(source, family), family, config, tokens)


@pytest.mark.parametrize("family", ["llama_gqa", "qwen3", "mistral", "gpt_oss"])
def test_a_token_counts_by_what_attention_takes_of_it(
    checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_decoder, "SCORES", 500)
    forward = of_tokens(checkpoint(family))
    layer = forward.load(0)
    assert isinstance(layer, torch_decoder.DecoderLayer)
    attention, arguments = layer.self_attn, forward.attention_arguments(0)
    assert isinstance(attention, torch_decoder.TorchAttention)
    normed = layer.input_layernorm(forward.hidden)
    received = attention.received(normed, **arguments)
    # The output projection reads a value that only one token has: the shares of the queries in it.
    heads, shares = forward.config.num_attention_heads, torch.zeros(3, 40)
    for token in range(40):
        values = torch.zeros(3, 40, attention.v_proj.out_features)
        values[:, token] = 1
        attention.v_proj.forward = lambda x, values=values: values  # type: ignore[method-assign]
        seen = list[torch.Tensor]()
        handle = attention.o_proj.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        attention(normed, **arguments)
        handle.remove()
        of_heads = seen[0].unflatten(-1, (heads, -1))[..., 0]
        shares[:, token] = of_heads.square().sum((1, 2)) / heads
    assert torch.allclose(received, shares, atol=1e-4)


def test_moments_of_queries_keys_and_values_are_weighed(checkpoint: Checkpoint) -> None:
    # Each advances the states of its own.
    forwards = [of_tokens(checkpoint("llama_gqa")) for _ in range(2)]
    plain, weighed = (staged(each, 0, each.load(0), weighed=each is forwards[1]) for each in forwards)
    for path in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"):
        x = torch.cat([x for x, _ in plain.inputs(path)])
        weights = weighed.weights(path)
        assert (weights is None) == (path != "self_attn.q_proj")
        each = torch.ones(len(x)) if weights is None else torch.cat(weights)
        assert len(each) == len(x) and bool((each >= 1).all())
        expected = x.T @ (x * each[:, None])
        found = weighed.moments(path).matrix
        assert float((found - expected).norm() / expected.norm()) < 0.01
