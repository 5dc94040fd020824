"""Products of every width and group, compiled for every GPU; a file of its own, as it takes as long as half of the others."""

from __future__ import annotations

import itertools

import pytest

from edgeq.format.codec import BITS
from edgeq.targets.cuda.supply import nvrtc
from edgeq.targets.cuda.supply.pack import Variant
from tests.cuda.compiling import compiles_for_every_gpu
from tests.cuda.launching import GROUPS, in_half

pytestmark = pytest.mark.cuda

FLAGS, KERNELS = (False, True), ("matvec", "matmul")
PRODUCTS = [
    Variant(kernel, each) for kernel in KERNELS for each in itertools.product(BITS, FLAGS, FLAGS, GROUPS) if in_half(*each)
]
TABLES = [(1, "table", False, 32), (4, "table", True, 16), (4, "table", False, 128), (2, "trellis", False, 128)]
PRODUCTS += [
    Variant("matvec", each) for each in ((8, "half", False, 128), (2, "s4", True, 32), *TABLES, (3, "trellis", False, 16))
]
PRODUCTS += [Variant("matmul", each) for each in ((8, "s4", False, 128), (3, "trellis", False, 128))]
"""What takes the most registers of all that lies beside integers."""
SHARE = {Variant(kernel, (4, True, True, 128)) for kernel in KERNELS}
"""What `make test` compiles; the rest is for `make test-cuda`."""
EVERYWHERE = {*SHARE, *(Variant("matmul", (bits, True, bits % 2 == 0, 32)) for bits in BITS)}
VARIANTS = [pytest.param(v, marks=() if v in SHARE else pytest.mark.exhaustive, id=v.symbol) for v in PRODUCTS]


@pytest.mark.usefixtures("needs_generator")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_compiles_for_every_gpu_and_spills_nothing(variant: Variant) -> None:
    if reason := nvrtc.refusal():
        pytest.skip(reason)
    compiles_for_every_gpu(variant, every=variant in EVERYWHERE)
