"""Tensors on large pages, and on a system that has none."""

from __future__ import annotations

import mmap

import pytest
import torch

from model import pages


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_tensor_like_any(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, large: bool
) -> None:
    if not large:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    made = pages.empty((3, 5, 7), dtype)
    made.copy_(torch.arange(105).view(3, 5, 7))
    assert made.dtype is dtype
    assert made.is_contiguous()
    assert made[1, 2].tolist() == list(range(49, 56))
    assert pages.empty((0, 4), dtype).shape == (0, 4)


@pytest.mark.parametrize("n", [2**45, 2**61])
def test_what_no_machine_has(n: int) -> None:
    with pytest.raises((MemoryError, RuntimeError)):
        pages.empty((n,), torch.float32)
