"""How fast this machine reads memory and multiplies matrices, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model import kernel
from model.packed import PackedLinear

SECONDS = 1.0  # of each measurement; its best moment counts
READ_BYTES, MOST_BYTES = 2**28, 2**32  # by a thread, far more than a cache holds; by all
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
SLOW = 0.25  # of float32's speed in a small product: not worth a large one


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`bandwidth` in bytes per second; `matmul` in operations per second, by type of numbers."""

    bandwidth: float
    matmul: dict[str, float]

    def compute(self, dtype: str) -> float:
        """The most operations per second that weights of a type allow: in the type itself, or in a
        wider one that they are converted to.
        """
        wider = list(PRECISIONS)[: list(PRECISIONS).index(dtype) + 1]
        return max(self.matmul[name] for name in wider if name in self.matmul)

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of each: when the machine is disturbed, a measurement is only too low."""
        names = self.matmul.keys() | other.matmul.keys()
        return Ceilings(
            max(self.bandwidth, other.bandwidth),
            {
                name: max(c.matmul.get(name, 0.0) for c in (self, other))
                for name in PRECISIONS
                if name in names
            },
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "read_GB_s": round(self.bandwidth / 1e9, 2),
            "matmul_GFLOP_s": {name: round(n / 1e9, 1) for name, n in self.matmul.items()},
        }


def measure(threads: int, device: str) -> Ceilings:
    """With as many threads as the engine has, or on the GPU. Takes seconds."""
    before = torch.get_num_threads()
    try:
        bandwidth = _read(threads) if device == "cpu" else _read_gpu(device)
        torch.set_num_threads(threads)
        return Ceilings(bandwidth, _matmuls(device))
    finally:
        torch.set_num_threads(before)


def _read(threads: int) -> float:
    """Each thread sums numbers of its own: one sum that torch deals out to its threads does not
    fill the memory bus.
    """
    size = min(READ_BYTES, MOST_BYTES // threads)
    buffers = [torch.ones(size // 4) for _ in range(threads)]
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return _best(lambda: list(pool.map(torch.sum, buffers)), threads * size)


def _read_gpu(device: str) -> float:
    buffer = torch.ones(8 * READ_BYTES // 4, device=device)
    return _best(partial(_finished, buffer.sum), buffer.nbytes)


def _matmuls(device: str) -> dict[str, float]:
    small, large = (256, 2048) if device == "cpu" else (1024, 8192)
    first = _multiply(small, torch.float32, device)
    speeds = {}
    for name, dtype in PRECISIONS.items():
        if device == "cpu" and kernel.library():
            speeds[name] = _multiply_packed(large, dtype)
        # Where the processor has no instructions for a type, a large product takes many seconds.
        try:
            if name == "float32" or _multiply(small, dtype, device) > SLOW * first:
                speeds[name] = max(_multiply(large, dtype, device), speeds.get(name, 0.0))
        except RuntimeError:  # this build of torch cannot do it
            continue
    return speeds


def _multiply(n: int, dtype: torch.dtype, device: str) -> float:
    """By torch."""
    a = torch.ones(n, n, dtype=dtype, device=device)
    product = torch._int_mm if dtype is torch.int8 else torch.matmul
    return _best(partial(_finished, partial(product, a, a)), 2 * n**3)


def _multiply_packed(n: int, dtype: torch.dtype) -> float:
    """By our own kernels."""
    scale = torch.ones(n) if dtype is torch.int8 else None
    layer = PackedLinear(torch.ones(n, n, dtype=dtype), scale, None)
    return _best(partial(layer, torch.ones(n, n)), 2 * n**3)


def _finished(operation: Callable[[], Tensor]) -> None:
    if operation().is_cuda:
        torch.cuda.synchronize()


def _best(operation: Callable[[], object], amount: int) -> float:
    """The most of `amount` in a second; the first time is warm-up."""
    operation()
    best, end = 0.0, time.perf_counter() + SECONDS
    while not best or time.perf_counter() < end:
        began = time.perf_counter()
        operation()
        best = max(best, amount / (time.perf_counter() - began))
    return best
