"""Tensors on large pages of memory, where the system has them.

A step walks through all weights and many rows, and the table of small pages does not fit the
processor: on two cores, reading from large pages is up to half as fast again.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

LARGE = 2**21  # bytes of a page
CPU = torch.device("cpu")


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """As `torch.empty`. On a CPU memory is taken page by page, where it is first written. Raises
    MemoryError, or what torch raises.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has a switch of its own
    try:
        memory = mmap.mmap(-1, -(-size // LARGE) * LARGE, flags=private)
    except OSError as error:
        raise MemoryError(f"no room for {size} bytes") from error
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
