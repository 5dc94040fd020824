"""Integer products of the cpu target whose groups have half a chunk, or the whole row, against numpy."""

import pytest

from tests.targets.cases import INTEGER_CODECS, product_cases
from tests.targets.products.integer_product import check_extremes, check_product

CODECS = [codec for codec in INTEGER_CODECS if codec.group_size in (0, 16)]


@pytest.mark.parametrize(("isa", "codec", "mode"), product_cases(CODECS))
def test_integer_product_equals_the_reference(isa, codec, mode):
    check_product(isa, codec, mode)


@pytest.mark.parametrize(("isa", "codec", "mode"), product_cases(CODECS))
def test_extreme_values_do_not_overflow(isa, codec, mode):
    check_extremes(isa, codec, mode)
