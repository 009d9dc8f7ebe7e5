"""Tensors as they lie in a file, paged in as they are read, and checked by whoever reads all of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dispatch_trace.errors import TraceFormatError
from dispatch_trace.store.dtypes import SHARD_DTYPES


@dataclass(frozen=True, slots=True)
class Mapped:
    """The bytes of one tensor.

    Attributes:
      dtype, shape: torch's.
      data: [num bytes] uint8, read-only, in logical order.
      hash: of the tensor, in hexadecimal; "" where there is nothing to check.
      where: the file and the tensor, in words.
      sound: called once it was found to be what its hash says.
    """

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    hash: str
    where: str
    sound: Callable[[], None]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return SHARD_DTYPES[self.dtype].itemsize

    @property
    def is_aligned(self) -> bool:
        """Whether elements lie where a processor may expect them."""
        return self.data.ctypes.data % self.itemsize == 0

    def check(self) -> Check:
        """A check that takes in the bytes in order."""
        return Check(self)


class Check:
    """Whether the bytes of a tensor are what its hash says."""

    def __init__(self, mapped: Mapped) -> None:
        self._mapped = mapped
        data: Any = mapped.data  # NumPy does not say that it is a buffer
        self._data = memoryview(data)
        self._hasher = hash_of(mapped.dtype, mapped.shape) if mapped.hash else None

    def add(self, begin: int, end: int) -> None:
        """Takes in the next bytes, from `begin` on."""
        if self._hasher is not None:
            self._hasher.update(self._data[begin:end])

    def finish(self) -> None:
        """
        Raises:
          TraceFormatError: they are not.
        """
        if self._hasher is None:
            return
        if self._hasher.hexdigest() != self._mapped.hash:
            raise TraceFormatError(f"{self._mapped.where} does not match its hash")
        self._mapped.sound()


def hash_of(dtype: str, shape: tuple[int, ...]) -> Any:
    """The hash of a tensor before its bytes: over dtype and shape (docs/format.md)."""
    return xxhash.xxh3_128(f"{dtype}[{','.join(map(str, shape))}]".encode())


__all__ = ["Check", "Mapped", "hash_of"]
