"""The tests that run under compute-sanitizer, marked `sanitize`: each kind of kernel once or twice, where it has edges.

A sanitizer makes a kernel ten to a hundred times slower, so all tests under four of them would take hours.  Chosen are odd
sizes, every barrier, the kernels whose blocks of threads tell each other by counters, and whole tokens with their recordings.
A run of all tests fails at its end if a name is none of a test, or if a kind of kernel is left out (conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from edgeq.format.codec import Codec
from edgeq.targets.cuda.supply.pack import Variant

I4, I8, ROW4 = (
    f"{codec}-{columns}"
    for codec, columns in ((Codec("int", 4, 32), 192), (Codec("int", 8, 16, False), 64), (Codec("int", 4), 320))
)
PRODUCT = "test_products.py::test_a_product_is_that_of_numpy_for_few_and_for_many"
PART = "test_linear.py::test_every_part_equals_the_reference"
CUT = "test_cuda_cache.py::test_attention_equals_the_reference_however_it_is_cut"
SIDE_BY_SIDE = "test_attention_parts.py::test_parts_side_by_side_give_the_bits_of_parts_in_turn_alone_and_together"
TESTS = frozenset(
    {
        f"{PRODUCT}[i4-g128-zero-int8-random]",
        f"{PRODUCT}[i3-g16-f16-random]",
        # Counters of arrival, and what is read after them.
        f"{SIDE_BY_SIDE}[kv1-1100-1]",
        "test_attention_parts.py::test_sessions_in_a_block_of_threads_do_not_touch_each_other[f16]",
        f"{PART}[low_rank-{I4}]",
        f"{PART}[thin-{I8}]",
        f"{PART}[transform and all-{ROW4}]",
        f"{PART}[input_order-{I8}]",
        "test_linear.py::test_weights_of_floats[37-33-bf16]",
        "test_linear.py::test_token_activations_of_every_width_and_of_extreme_rows[i3 g128 zero]",
        "test_linear.py::test_a_channel_whose_weights_are_kept_apart[codec2-f32-63-parts2]",
        "test_linear.py::test_constant_scales_by_modality[codec1-scales1-32]",
        f"{CUT}[6-1-70-150-f16-20]",
        f"{CUT}[4-2-0-70-int8-72]",
        f"{CUT}[4-2-0-70-int4+3-72]",
        "test_cuda_cache.py::test_rotated_heads_equal_the_reference[head-norm-72]",
        "test_cuda_cache.py::test_a_rotation_of_heads_gives_the_bits_of_the_reference[72]",
        "test_cuda_layers.py::test_norms[centered-300]",
        "test_cuda_layers.py::test_activations_over_the_whole_range_of_floats[True-gelu]",
        "test_cuda_layers.py::test_scale_and_learned_positions[f16]",
        "test_cuda_layers.py::test_rows_of_a_tied_head_of_floats[31-f16]",
        "test_cuda_layers.py::test_vectors_that_rows_bring[True]",
        "test_cuda_layers.py::test_a_gated_addition",
        "test_cuda_layers.py::test_a_clamped_swiglu[300]",
        "test_cuda_layers.py::test_a_norm_of_values[beside-18]",
        "test_cuda_layers.py::test_a_cap[300]",
        "test_cuda_layers.py::test_factors_of_a_stream_sums_and_gates[sigmoid-300]",
        "test_cuda_layers.py::test_limits_of_some_columns_and_means_that_are_scaled_and_shifted[300]",
        "test_cuda_experts.py::test_shares_are_multiplied_by_numbers_of_their_experts",
        "test_cuda_experts.py::test_experts_without_a_gate_of_a_router_of_sigmoids",
        "test_cuda_experts.py::test_experts_of_two_layers_and_of_other_codecs_and_parts",
        "test_cuda_requantization.py::test_a_master_is_rounded_to_the_same_bits[i3-g32-i8-row-zero]",
        "test_cuda_requantization.py::test_sums_have_the_bits_of_the_reference_in_any_chunks",
        "test_cuda_states.py::test_a_convolution_computes_what_the_reference_does[True-33-7]",
        "test_cuda_states.py::test_a_convolution_computes_what_the_reference_does[False-16-3]",
        "test_cuda_states.py::test_a_row_gets_the_one_before[40-False]",
        "test_cuda_states.py::test_a_delta_rule_computes_the_step_form"
        "[Sizes(key_heads=1, value_heads=2, key_dim=40, value_dim=128, beta_scale=1.0)]",
        "test_cuda_states.py::test_a_norm_with_a_gate_computes_its_formula[True-3-20-7]",
        "test_largest.py::test_drawn_tokens_are_those_of_the_sampler[0]",
        "test_times.py::test_memory_is_read_to_its_last_word",
        # Fused products with their prefetches, and recordings.
        "test_cuda_fused.py::test_a_token_by_every_kind_of_method[ttq]",
        "test_program.py::test_greedy_tokens_are_those_of_the_reference_but_for_ties",
    }
)


def chosen(nodeid: str) -> bool:
    return nodeid.rpartition("/")[2] in TESTS


@dataclass
class Seen:
    """What the chosen tests of a run, or of one of its processes, did.

    running   whether one of them runs now
    tests     those that passed
    kinds     of the kernels that they launched
    files     of tests that ran, by their names without .py
    """

    running: bool = False
    tests: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)

    def launched(self, variant: Variant) -> None:
        if self.running:
            self.kinds.add(variant.kernel)

    def told(self) -> list[list[str]]:
        """What a process tells the one that started it."""
        return [sorted(each) for each in (self.tests, self.kinds, self.files)]

    def add(self, told: list[list[str]]) -> None:
        for mine, theirs in zip((self.tests, self.kinds, self.files), told, strict=True):
            mine.update(theirs)

    def missing(self, asked: Iterable[Variant], partly: Iterable[str]) -> str:
        """What sanitizers would not see; "" where nothing is missing, or where not all of their files ran.

        asked    the kernels of all tests
        partly   files of which only some tests ran
        """
        if not {name.partition(".py")[0] for name in TESTS} <= self.files - set(partly):
            return ""
        absent = sorted(TESTS - self.tests), sorted({variant.kernel for variant in asked} - self.kinds)
        return "; ".join(
            f"{what}: {', '.join(names)}"
            for what, names in zip(("sanitized.py names no test with", "no test of sanitized.py launches"), absent, strict=True)
            if names
        )
