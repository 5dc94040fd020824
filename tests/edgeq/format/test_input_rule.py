"""Which rule rounds the input of a weight block: one decision, which the reference follows and both compilers read."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.quantization import (
    InputRule,
    input_rule,
    quantize_blocks,
    quantize_static,
    quantize_tokens,
    quantized_input,
)
from edgeq.format.records import Activation, ArrayRef, LinearSpec, Mode, Weight

SCALES = ArrayRef("f32", (2,), 7)
INT4, INT8, FLOAT = Codec("int", 4, 32, True), Codec("int", 8, 32, True), Codec("f16")
NOTHING = ArrayRef("u8", (0,), 0)


def layer(activation: Activation | None, *codecs: Codec) -> LinearSpec:
    weights = tuple(Weight(codec, 16, 64, {part: NOTHING for part in codec.parts(16, 64)}) for codec in codecs)
    return LinearSpec("qkv", weights, activation=activation)


@pytest.mark.parametrize(
    ("activation", "codec", "mode", "expected"),
    [
        (None, INT4, "a16", None),
        (None, FLOAT, "a8", None),
        (Activation(8), INT4, "a16", None),
        (Activation(8), FLOAT, "a4", None),
        (None, INT4, "a8", InputRule("block", 8, 120)),
        (None, INT8, "a8", InputRule("block", 8, 127)),
        (None, INT8, "a4", InputRule("block", 4, 7)),
        (Activation(8, symmetric=True), INT8, "a8", InputRule("token", 8, 127)),
        (Activation(4, symmetric=True), INT8, "a8", InputRule("token", 4, 7)),
        (Activation(8, symmetric=False), INT8, "a4", InputRule("token_zero", 8, 255)),
        (Activation(6, symmetric=False), INT4, "a8", InputRule("token_zero", 6, 63)),
        (Activation(8, scales=SCALES), INT8, "a8", InputRule("static", 8, 127, SCALES)),
        (Activation(8, scales=SCALES), INT4, "a8", InputRule("static", 8, 120, SCALES)),
        (Activation(4, scales=SCALES), INT4, "a8", InputRule("static", 4, 7, SCALES)),
    ],
)
def test_activation_part_weights_and_mode_decide(
    activation: Activation | None, codec: Codec, mode: Mode, expected: InputRule | None
) -> None:
    assert input_rule(layer(activation, codec), 0, mode) == expected


def test_the_second_block_has_bits_of_its_own() -> None:
    two = layer(Activation(4, symmetric=False, high_bits=8), INT4, INT8)
    assert [rule and rule.limit for rule in (input_rule(two, 0, "a8"), input_rule(two, 1, "a8"))] == [15, 255]


def test_the_rounded_input_follows_the_rule() -> None:
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    scales = np.full(3, 0.05, np.float32)
    assert quantized_input(x, layer(None, INT4), 0, "a16") is x
    assert np.array_equal(quantized_input(x, layer(None, INT4), 0, "a8"), quantize_blocks(x, 32, 120))
    tokens = layer(Activation(4, symmetric=False), INT4)
    assert np.array_equal(quantized_input(x, tokens, 0, "a8"), quantize_tokens(x, 4, False))
    static = layer(Activation(8, scales=SCALES), INT8)
    assert np.array_equal(quantized_input(x, static, 0, "a8", scales), quantize_static(x, scales, 127))
