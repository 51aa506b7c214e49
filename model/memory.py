"""How much of a GPU's memory the pool of rows may take: what a server at work leaves free."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from model.runner import SCORED_ROWS, Runner
from model.step import Sampling, Work

SHARE = 0.9  # of what is free; the rest is for fragments and for whoever else uses the GPU


def for_rows(
    make_runner: Callable[[int], Runner],
    n_ctx: int,
    *,
    max_running: int,
    step_tokens: int,
    free: Callable[[], int],
) -> int:
    """Bytes for the pool. A runner of few rows, which count as free, computes the steps that take
    the most memory, and all is given back. `make_runner` takes the number of rows; `free` tells
    how many bytes of the device nobody has, and what torch keeps in reserve counts as taken.

    torch's out-of-memory error passes through: there is no room for any pool.
    """
    runner = make_runner(n_ctx + step_tokens)
    runner.kv.zero_()
    for work in largest_steps(n_ctx, max_running, step_tokens):
        runner.run(work)
    left = free() + runner.kv.nbytes
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return int(left * SHARE)


def largest_steps(n_ctx: int, max_running: int, step_tokens: int) -> list[list[Work]]:
    """Steps that take the most memory beside the pool: all run at the end of their window while a
    prompt is read beside them, or one is scored. They share rows, which changes nothing here.
    """
    tokens, rows = np.zeros(n_ctx, np.int32), np.arange(n_ctx, dtype=np.int32)
    wanted = Sampling(top_p=0.9, logprobs=20)
    decoding = [
        Work(tokens, n_ctx - 1, np.append(rows[:-1], n_ctx + i).astype(np.int32), 1, wanted)
        for i in range(max_running)
    ]
    chunk = min(n_ctx, step_tokens - max_running)
    prompt = Work(tokens, n_ctx - chunk, rows, 1, wanted)
    n_scored = min(chunk, SCORED_ROWS)
    scored = Work(tokens, n_ctx - n_scored, rows, 1, score=20, targets=tokens[:n_scored])
    return [[*decoding, prompt], [scored]]
