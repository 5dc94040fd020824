"""The expert of a policy as it is calibrated, in torch, is the network that runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edgeq.converters.calibration.expert_forward import ExpertForward, drawn
from edgeq.converters.calibration.forward import BlockForward
from edgeq.converters.calibration.staged import StagedLayer
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import ConvertOptions
from edgeq.converters.families.network import described, open_tensors
from edgeq.converters.importers import open_source
from edgeq.converters.planning.preflight import planned
from edgeq.errors import UnsupportedError
from edgeq.runtime import Model
from tests.runtime.policy.cases import Case

TOKENS = torch.tensor([[0, 70, 81, 92, 103, 114, 125], [0, 501, 33, 44, 700, 66, 21]])


def test_velocities_after_texts_are_those_of_the_runtime(case: Case) -> None:
    """Masks, positions, times, and the texts' keys and values, layer by layer."""
    source = open_source(str(case.folder), HubAccess())
    family, config = described(source)
    tensors, expert = open_tensors(source, family), config.policy
    assert expert is not None and family.policy is not None
    decoder = BlockForward(tensors, family, config, TOKENS)
    forward = ExpertForward(family.policy, expert, decoder, tensors, None)
    for index in range(expert.num_hidden_layers):
        layer = forward.load(index)
        third = torch.cat(forward.few(3).outputs(index, layer))
        assert torch.allclose(third, torch.cat(forward.outputs(index, layer))[::3], atol=1e-5)
        if index == 1:
            # The way in which methods go through it.
            run = StagedLayer(forward, index, layer, weighed=True)
            weights = run.weights("self_attn.q_proj")
            assert weights is not None and all(len(each) == each.numel() and (each > 1).all() for each in weights)
            assert sum(len(each) for each in weights) == len(TOKENS) * expert.steps * (1 + expert.actions)
            run.finish()
        else:
            forward.advance(index, layer)
    x = torch.cat(list(forward.states))[:, 1:]
    gain = torch.from_numpy(tensors.whole("expert.norm.weight"))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + expert.rms_norm_eps) * gain
    out, bias = (torch.from_numpy(tensors.whole(f"expert.action_out.{part}")) for part in ("weight", "bias"))
    found = (x @ out.T + bias).numpy()
    states, actions, times = drawn(expert, len(TOKENS))
    with Model.load(case.path, target="reference", mode="a16", context=64) as model:
        policy, length = model.policy, TOKENS.shape[1]
        assert policy is not None
        for row in range(len(found)):
            with model.session() as session:
                session.prefill(TOKENS[row // expert.steps].tolist())
                with session.lock:
                    session.reserve(1 + expert.actions)
                    policy._state.run(policy._rows(session, length, states[row][None].numpy()))
                    wanted = policy.velocity(session, length + 1, actions[row].numpy(), times[row])
                    assert np.abs(found[row] - wanted).max() < 2e-3 * wanted.std(), row


@pytest.mark.parametrize("options", [{"method": "quarot"}, {"method": "awq", "rotate": True}])
def test_rotations_of_values_that_an_expert_reads_are_refused(case: Case, options: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="reads the decoder's values, which are rotated"):
        planned(open_source(str(case.folder), HubAccess()), ConvertOptions(**options))  # type: ignore[arg-type]


def test_no_scale_is_folded_into_values_that_an_expert_reads(case: Case) -> None:
    family, config = described(open_source(str(case.folder), HubAccess()))
    assert config.policy is not None and family.policy is not None
    heads = replace(config, num_attention_heads=config.num_key_value_heads)
    assert any(each.absorber == "v" for each in replace(family, config=replace(heads, policy=None)).mappings)
    expert = replace(config.policy, num_attention_heads=config.num_key_value_heads)
    for stack in (heads, expert):
        assert stack.kv_size == stack.query_size
        assert not any(each.absorber == "v" for each in replace(family, config=stack).mappings)
