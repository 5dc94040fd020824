"""Hadamard matrices of any order K * 2^m, built and not copied, and their fast application.

A Hadamard matrix of order K > 2 can exist only if 4 divides K.  Constructions, all orders here checked orthogonal by tests:

    Paley I      K = q + 1,     q a prime power, q = 3 mod 4      (Paley 1933, On orthogonal matrices)
    Paley II     K = 2 (q + 1), q a prime power, q = 1 mod 4
    Williamson   K = 156, 172: four symmetric circulants          (Williamson 1944, Baumert and Hall 1965)

and the Kronecker product with Sylvester's of order 2^m.  An order that 4 does not divide takes a fixed random orthogonal matrix
for its odd part, scaled to rows of norm sqrt(K), as in ResQ's and QuaRot's code for 37 and 231.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from edgeq.converters.rotation.orthogonal import haar
from edgeq.errors import UnsupportedError

MAX_BASE = 1024
"""The dense factor costs K multiplications a channel, online."""
RANDOM_SEED = 20
# Offsets of the entries -1 in the first rows of Williamson's circulants A, B, C, D, at both signs; the rest is +1.
WILLIAMSON = {
    156: (
        (3, 4, 6, 8, 9, 10, 11, 12, 14, 15, 18, 19),
        (4, 5, 6, 8, 9, 12, 13, 14, 15, 17, 19),
        (3, 4, 7, 9, 10, 11, 13, 15, 16, 18, 19),
        (1, 2, 3, 6, 8, 10, 11, 12, 13, 14, 18),
    ),
    172: (
        (1, 2, 3, 6, 7, 12, 14, 18, 21),
        (2, 9, 10, 11, 12, 14, 16, 17, 20),
        (3, 5, 8, 9, 11, 13, 18, 20, 21),
        (2, 3, 4, 9, 11, 12, 14, 15, 18, 19, 20, 21),
    ),
}


@dataclass(frozen=True, eq=False)
class Hadamard:
    """The orthogonal y = (B (x) H_2^m) v / sqrt(size) on columns v of `size` = K * 2^m channels; base B float64 [K, K], rows of
    norm sqrt(K), None for K = 1.

    For K > 1 it need not be symmetric.  Calling it on the rows of x and on the rows of a weight W leaves x W^T as it was.
    """

    size: int
    base: Tensor | None

    def __call__(self, x: Tensor, stride: int = 1) -> Tensor:
        """Transforms every run of `size` channels `stride` apart of x [..., channels], in x's own type."""
        runs = x.unflatten(-1, (-1, self.size, stride)).transpose(-1, -2)
        order = 1 if self.base is None else len(self.base)
        y = _walsh(runs.unflatten(-1, (order, self.size // order)))
        if self.base is not None:
            y = self.base.to(x) @ y
        return (y / math.sqrt(self.size)).flatten(-2).transpose(-1, -2).flatten(-3)

    @property
    def inverse(self) -> Hadamard:
        """The transform that undoes this one."""
        return Hadamard(self.size, None if self.base is None else self.base.T.contiguous())

    def matrix(self) -> Tensor:
        """Q float64 [size, size] with x Q = the transform of a row x."""
        return self(torch.eye(self.size, dtype=torch.float64))


@lru_cache(maxsize=64)
def hadamard(size: int, constant_row: bool = False) -> Hadamard:
    """The transform of `size` channels with the smallest base.

    constant_row   its first output is the sum of all inputs over sqrt(size), as without a base: columns of the base change sign

    UnsupportedError: no construction with a base of at most MAX_BASE, and the odd part of `size` is larger than that.
    """
    odd = size // (size & -size)
    if odd == 1:
        return Hadamard(size, None)
    if constant_row:
        found = hadamard(size)
        assert found.base is not None
        if bool((found.base[0].abs() != 1).any()):
            raise UnsupportedError(f"{size} channels have no transform with a constant row; convert without --split-row")
        return Hadamard(size, found.base * found.base[0].sign())
    order = 4 * odd
    while size % order == 0 and order <= MAX_BASE:
        base = base_matrix(order)
        if base is not None:
            return Hadamard(size, base)
        order *= 2
    if odd > MAX_BASE:
        raise UnsupportedError(
            f"{size} channels have no fast orthogonal transform: no known Hadamard matrix of at most {MAX_BASE} rows "
            "divides them; choose a method without rotations"
        )
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    return Hadamard(size, haar(odd, generator) * math.sqrt(odd))


BASE_COST, STEP_COST = 3, 28
"""What a channel costs in a transform for each row of the base and for each doubling, in multiplications of 4 by 8 bits: 8,960
channels by base 140 were measured to take 11 % of a layer of Qwen2-VL-2B, 9,216 by base 36 take 6 %."""
MAX_PADDING = 1.15


def best_size(channels: int, products: int) -> int:
    """At least `channels`: the size at which a transform and the products behind it cost least, the channels added being zeros.

    products   multiplications that each channel takes in the layers before and after

    UnsupportedError: there is none up to 1.15 times as many channels.
    """
    costs = {}
    for odd in range(1, MAX_BASE, 2):
        size = odd
        while size < channels:
            size *= 2
        order = base_order(size)
        if size <= MAX_PADDING * channels and order:
            costs[size] = size * (products + BASE_COST * order + STEP_COST * (size // order).bit_length())
    if not costs:
        raise UnsupportedError(
            f"{channels} channels have no fast orthogonal transform near them; choose a method without rotations"
        )
    return min(costs, key=lambda size: costs[size])


def base_order(size: int) -> int | None:
    """Rows of the base of Hadamard matrices that `hadamard` would take; 1: it takes none, None: no such matrix is known."""
    odd = size // (size & -size)
    if odd == 1:
        return 1
    order = 4 * odd
    while size % order == 0 and order <= MAX_BASE:
        if _construction(order):
            return order
        order *= 2
    return None


def base_matrix(order: int) -> Tensor | None:
    """A Hadamard matrix of `order` as float64 of +1 and -1 by Paley or Williamson; None: neither gives one."""
    kind = _construction(order)
    if kind == "paley1":
        return _paley1(order - 1)
    if kind == "paley2":
        return _paley2(order // 2 - 1)
    return _williamson(order) if kind else None


def _construction(order: int) -> str | None:
    if (order - 1) % 4 == 3 and _prime_power(order - 1):
        return "paley1"
    q = order // 2 - 1
    if order % 2 == 0 and q % 4 == 1 and _prime_power(q):
        return "paley2"
    return "williamson" if order in WILLIAMSON else None


def _paley1(q: int) -> Tensor:
    """I + S with S skew: [[0, 1], [-1, chi(i - j)]]."""
    s = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, -1, _characters(q)
    return s + torch.eye(q + 1, dtype=torch.float64)


def _paley2(q: int) -> Tensor:
    """S symmetric: [[0, 1], [1, chi(i - j)]], its zeros and its signs replaced by matrices of order 2."""
    s = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, 1, _characters(q)
    zero = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64)
    sign = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    return torch.kron(torch.eye(q + 1, dtype=torch.float64), zero) + torch.kron(s, sign)


def _williamson(order: int) -> Tensor:
    n = order // 4
    a, b, c, d = (_circulant(n, offsets) for offsets in WILLIAMSON[order])
    rows = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(row, 1) for row in rows])


def _circulant(n: int, offsets: tuple[int, ...]) -> Tensor:
    first = torch.ones(n, dtype=torch.float64)
    for offset in offsets:
        first[offset] = first[n - offset] = -1
    return first[(torch.arange(n)[None] - torch.arange(n)[:, None]) % n]


def _characters(q: int) -> Tensor:
    """chi(i - j) over GF(q), float64 [q, q]: +1 for squares, -1 for other elements, 0 for zero.

    An element is the number whose digits to the base p are its coefficients.
    """
    p = _smallest_factor(q)
    digits = round(math.log(q, p))
    chi = torch.full((q,), -1.0, dtype=torch.float64)
    chi[0] = 0
    chi[_powers(p, digits)[::2]] = 1
    elements = torch.arange(q)
    difference = torch.zeros(q, q, dtype=torch.int64)
    for k in range(digits):
        digit = elements // p**k % p
        difference += (digit[:, None] - digit[None]) % p * p**k
    return chi[difference]


def _powers(p: int, digits: int) -> list[int]:
    """1, x, x^2 ... of a generator x of the multiplicative group of GF(p^digits).

    Tries x^digits = c(x) for c after c until the powers run through all elements but zero: then c makes it a field, too.
    """
    q = p**digits
    for code in range(1, q):
        c = [code // p**k % p for k in range(digits)]
        element, seen = [1] + [0] * (digits - 1), list[int]()
        for _ in range(q - 1):
            seen.append(sum(v * p**k for k, v in enumerate(element)))
            top = element[-1]
            element = [(v + top * w) % p for v, w in zip([0, *element[:-1]], c, strict=True)]
            if element == [1] + [0] * (digits - 1):
                break
        if len(set(seen)) == q - 1:
            return seen
    raise AssertionError(f"no field of {q} elements")


def _prime_power(q: int) -> bool:
    if q < 2:
        return False
    p = _smallest_factor(q)
    while q % p == 0:
        q //= p
    return q == 1


def _smallest_factor(n: int) -> int:
    return next((d for d in range(2, math.isqrt(n) + 1) if n % d == 0), n)


def _walsh(x: Tensor) -> Tensor:
    """Sylvester's H_2^m over the last axis, unscaled."""
    half, size = 1, x.shape[-1]
    while half < size:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x
