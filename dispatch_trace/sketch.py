"""A sketch of a tensor: 251 numbers from which ||a - b|| and cos(a, b) can be told without a and b.

The sketch is a *sign-fold*. Every element gets a fixed sign and a bucket, both functions of its global
position i in logical order, and each of the `K` buckets is the sum of its signed elements:

    chunk, rest = divmod(i, CHUNK);  q, p = divmod(rest, BLOCK)       # 16 blocks in a chunk
    sign = 1
    for L in LENGTHS:                                                 # 6 lengths, the last is K
        if p >= L:
            sign *= +-1 by the top bit of mix(SEED_POSITION + q * BLOCK + p)
            p -= L
    sign *= 1 if chunk == q == 0 else +-1 by the top bit of mix(mix(SEED_BLOCK + 16 * chunk + q) + p)
    bucket = q * K + p
    for L in LENGTHS:
        if bucket >= L: bucket -= L

Why so:

* Within a chunk the signs are independent: each element past the first K of its block is the upper
  half of exactly one folding step, and that step has a table entry of its own. Folding a half at a time
  does half the arithmetic of multiplying by a table of signs and adding up rows afterwards.
* The table repeats with every chunk; the signs by (block, bucket) do not. A table that merely repeats
  overestimates a constant difference several times over.
* The lengths are primes a little below twice each other, so that elements at a fixed stride
  (one channel of a matrix) spread over the buckets whatever the stride, also when K divides it.
  These primes were searched for: over all strides up to 4096 (with 100 elements or more of 16384, 65536
  or a million) the variance of the squared norm is at most 2.9 times the ideal 2/K, its median 0.97.
* Signs come from an integer hash written out here, never from a library's random stream.
* Sums run by elementwise additions in a fixed order (float32 within a block, float64 above it), so
  the result has the same bits for every thread count, CPU and process.

A tensor of at most K elements is its own sketch, so its norms and distances are exact. Non-finite
elements count as 0. Values beyond the range of float32 saturate. torch is imported by `fold` only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[Any]
Sketch = npt.NDArray[np.float32]

K = 251
LENGTHS = (6781, 3623, 1879, 977, 499, K)
BLOCK = 2 * LENGTHS[0]
BLOCKS_PER_CHUNK = 16
CHUNK = BLOCK * BLOCKS_PER_CHUNK
NARROW = 63  # of a sketch that is folded once more, for traces that have to be small
_FLOAT32_MAX = float(np.finfo(np.float32).max)
SEED_POSITION = 0x9E3779B9
SEED_BLOCK = 0x85EBCA6B
SEED_NARROW = 0xC2B2AE3D

SKETCH_PARAMETERS: dict[str, Any] = {
    "kind": "sign-fold",
    "version": 1,
    "k": K,
    "lengths": list(LENGTHS),
    "block": BLOCK,
    "blocks_per_chunk": BLOCKS_PER_CHUNK,
    "seed_position": SEED_POSITION,
    "seed_block": SEED_BLOCK,
    "check": 3594324927,  # crc32 of the sketch of the integers of `check_values`, as little-endian float32
}


NARROW_PARAMETERS: dict[str, Any] = {**SKETCH_PARAMETERS, "narrowed_to": NARROW, "seed_narrow": SEED_NARROW}


def check_values() -> npt.NDArray[np.float32]:
    """Small integers over two chunks and a part, whose sketch is exact and gives the check value."""
    i = np.arange(2 * CHUNK + 100_003, dtype=np.int64)
    return ((i * i + 3 * i) % 13 - 6).astype(np.float32)


def mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The finaliser of MurmurHash3 (public domain, Austin Appleby): a bijection on 32-bit integers."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _signs(hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    return np.float32(1) - np.float32(2) * (hashes >> np.uint32(31)).astype(np.float32)


@lru_cache(maxsize=1)
def position_signs() -> npt.NDArray[np.float32]:
    """Signs by position in the chunk, [BLOCKS_PER_CHUNK, BLOCK] of +-1 (0.8 MB, made on first use)."""
    positions = np.arange(CHUNK, dtype=np.uint32) + np.uint32(SEED_POSITION)
    return _signs(mix(positions)).reshape(BLOCKS_PER_CHUNK, BLOCK)


@lru_cache(maxsize=64)
def block_signs(chunk: int) -> npt.NDArray[np.float64]:
    """Signs by (block, bucket) of one chunk, [BLOCKS_PER_CHUNK * K] of +-1."""
    blocks = np.arange(BLOCKS_PER_CHUNK, dtype=np.uint32) + np.uint32(
        (SEED_BLOCK + chunk * BLOCKS_PER_CHUNK) & 0xFFFFFFFF
    )
    buckets = np.arange(K, dtype=np.uint32)
    signs = _signs(mix(np.add.outer(mix(blocks), buckets)))
    if chunk == 0:
        signs[0] = 1.0
    return signs.reshape(-1).astype(np.float64)


def fold_block(values: Floats, block: int = 0) -> Floats:
    """Folds at most one block, in place, with the signs by position.

    Args:
      values: [n] with n <= BLOCK, float32 or float64, finite; overwritten.
      block: which block of its chunk it is.
    Returns: [min(n, K)], a view of `values`.
    """
    n = values.shape[0]
    signs = position_signs()[block]
    for length in LENGTHS:
        if n > length:
            values[: n - length] += values[length:n] * signs[length:n]
            n = length
    return values[:n]


def fold_buckets(buckets: Floats, chunk: int) -> npt.NDArray[np.float64]:
    """Folds the bucket rows of a chunk's blocks, laid end to end, into one: [m] -> [K], m <= 16 K."""
    n = buckets.shape[0]
    signed = buckets.astype(np.float64)
    if chunk or n > K:
        signed *= block_signs(chunk)[:n]
    for length in LENGTHS:
        if n > length:
            signed[: n - length] += signed[length:n]
            n = length
    if n == K:
        return signed[:K]
    whole = np.zeros(K)
    whole[:n] = signed[:n]
    return whole


def fold_small(values: Floats) -> Sketch:
    """The sketch of at most one block of finite values [n], float32 or float64, from position 0."""
    if values.dtype != np.float32:
        return finish(fold_buckets(fold_block(values.copy()), 0))
    folded = values if values.shape[0] <= K else fold_block(values.copy())
    if not math.isfinite(folded.dot(folded)) and not np.isfinite(folded).all():  # sums beyond 3.4e38
        return finish(fold_buckets(fold_block(values.astype(np.float64)), 0))
    whole = np.zeros(K, np.float32)
    whole[: folded.shape[0]] += folded  # adding to 0: no negative zeros
    return whole


def finish(total: npt.NDArray[np.float64]) -> Sketch:
    """Rounds the sums to what is stored: float32, saturated, no negative zeros."""
    if not total @ total < _FLOAT32_MAX**2:
        total = np.clip(np.nan_to_num(total, nan=0.0), -_FLOAT32_MAX, _FLOAT32_MAX)
    return (total + 0.0).astype(np.float32)


def fold(tensor: Tensor, start: int = 0) -> Sketch:
    """The sketch of a tensor.

    Args:
      tensor: strided, any real or complex dtype, any strides and device. Complex goes by its real view.
      start: global position of its first element, for a shard or part of a larger sequence.
    Returns: [K]. Sketches of the parts of a sequence add up to the sketch of the whole.
    """
    from dispatch_trace import stats

    sketch = stats.accumulate(tensor, start=start).sketch
    assert sketch is not None, "only views of more than 2^28 repeated elements have no sketch"
    return sketch


_AT_ONCE = 1024  # rows in double, of 2 kB each


@lru_cache(maxsize=1)
def _narrow_signs() -> npt.NDArray[np.float64]:
    buckets = np.arange(K, dtype=np.uint32) + np.uint32(SEED_NARROW)
    return _signs(mix(buckets)).astype(np.float64)


def narrow(sketch: Floats) -> Sketch:
    """Folds sketches once more: bucket j, with a fixed sign, adds to bucket j mod `NARROW`.

    What is linear stays so; norms and distances are known to 9 % instead of 4.5 %, and exactly for tensors of
    at most `NARROW` elements.

    Args:
      sketch: [..., K] or [..., NARROW], which is returned as it is.
    Returns: [..., NARROW] float32.
    """
    if sketch.shape[-1] == NARROW:
        return sketch.astype(np.float32)
    signed = sketch.astype(np.float64) * _narrow_signs()
    padded = np.zeros((*sketch.shape[:-1], -(-K // NARROW) * NARROW))
    padded[..., :K] = signed
    folded = padded.reshape(*sketch.shape[:-1], -1, NARROW).sum(-2)
    found: Sketch = (np.clip(folded, -_FLOAT32_MAX, _FLOAT32_MAX) + 0.0).astype(np.float32)
    return found


def alike(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Two sketches, of which one may be narrow, in one width."""
    return (a, b) if a.shape[-1] == b.shape[-1] else (narrow(a), narrow(b))


def norm(sketch: Floats) -> float:
    """Estimate of ||a||: unbiased for ||a||^2, relative sd 1/sqrt(2 K) = 4.5 % (exact for n <= K)."""
    values = sketch.astype(np.float64)
    return math.sqrt(float(values @ values))


def distance(a: Floats, b: Floats) -> float:
    """Estimate of ||a - b|| from the sketches of a and b, with the error of `norm`."""
    a, b = alike(a, b)
    return norm(a.astype(np.float64) - b.astype(np.float64))


def cosine(a: Floats, b: Floats) -> float:
    """Estimate of cos(a, b) = <a, b> / (||a|| ||b||); sd about sqrt(1/K) = 6.3 % at 0, 0 at 1.

    Returns: in [-1, 1]; 1 when both are zero, 0 when only one is.
    """
    a, b = alike(a, b)
    first, second = a.astype(np.float64), b.astype(np.float64)
    norms = norm(first) * norm(second)
    if norms == 0.0:
        return 1.0 if norm(first) == norm(second) else 0.0
    return max(-1.0, min(1.0, float(first @ second) / norms))


def relative_distance(target: Floats, ref: Floats) -> float:
    """Estimate of ||target - ref|| / ||ref||: 0 when both are zero, inf when only ref is."""
    return float(relative_distances(target[None], ref[None])[0])


def relative_distances(target: Floats, ref: Floats) -> npt.NDArray[np.float64]:
    """`relative_distance` of many: [n, K] each, [n]. A pair comes out the same whatever stands beside it."""
    target, ref = alike(target, ref)
    found = np.empty(len(ref))
    for start in range(0, len(ref), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        scale = ref[rows].astype(np.float64)
        error = target[rows].astype(np.float64) - scale
        # Not by BLAS, which adds in another order for one row than for many.
        norms = [np.sqrt(np.einsum("ij,ij->i", x, x)) for x in (error, scale)]
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = norms[0] / norms[1]
        found[rows] = np.where(norms[1] == 0.0, np.where(norms[0] == 0.0, 0.0, np.inf), quotient)
    return found


def add(sketches: Sequence[Floats]) -> Sketch:
    """The sketch of a whole from the sketches of its parts (each folded at its global positions)."""
    return finish(np.sum([part.astype(np.float64) for part in sketches], axis=0))
