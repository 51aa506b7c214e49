"""What a completion costs with the cache and without, in closed form; see `GPTConfig` for one row.

A completion is a prompt of P tokens, computed in one step, and N new ones. The last token that is
drawn is not computed: nobody asks what comes after it.
"""

from __future__ import annotations

from typing import NamedTuple

from model.config import GPTConfig


class Work(NamedTuple):
    """What is computed: rows, pairs of a query and a key, and rows that need logits."""

    rows: int
    pairs: int
    logits: int

    def flops(self, config: GPTConfig) -> int:
        """Floating-point operations, 2 per multiply-add."""
        row, logits = config.flops(0, rows=1, logits=0), config.flops(0, rows=0, logits=1)
        pair = config.flops(1, rows=1, logits=0) - row
        return self.rows * row + self.pairs * pair + self.logits * logits


def cached(prompt: int, new: int) -> Work:
    """P^2 pairs for the prompt, then one row a token: its context is P + 1, P + 2, ... rows."""
    return Work(
        rows=prompt + new - 1,
        pairs=prompt**2 + (new - 1) * (2 * prompt + new) // 2,
        logits=new,
    )


def uncached(prompt: int, new: int) -> Work:
    """All rows for every token: the sums of t and of t^2 over the contexts P, ..., P + N - 1."""
    last = prompt + new - 1
    return Work(
        rows=new * (prompt + last) // 2,
        pairs=_sum_of_squares(last) - _sum_of_squares(prompt - 1),
        logits=new,
    )


def decode(streams: int, context: int) -> Work:
    """One token for each of `streams` sequences, which attends to `context` rows."""
    return Work(rows=streams, pairs=streams * context, logits=streams)


def whole(streams: int, context: int) -> Work:
    """All rows of `streams` sequences and logits of the last of each: the least that a prompt, or a
    token without a cache, takes. What a mask hides need not be computed, so it is not counted.
    """
    pairs = context * (context + 1) // 2
    return Work(rows=streams * context, pairs=streams * pairs, logits=streams)


def _sum_of_squares(n: int) -> int:
    return n * (n + 1) * (2 * n + 1) // 6


def attention_weights(config: GPTConfig, batch: int, length: int) -> int:
    """Numbers in the weights of one layer if they are kept, as training by hand does: B H T T."""
    return batch * config.n_head * length * length


def bytes_read(
    config: GPTConfig, context: int, itemsize: int, row_itemsize: int | None = None
) -> int:
    """The least that one token of one cached sequence reads: the weights and all its rows, whose
    numbers are as large as the weights' unless it is said.
    """
    return weights_read(config, itemsize) + context * config.row_bytes(row_itemsize or itemsize)


def weights_read(config: GPTConfig, itemsize: int) -> int:
    """Bytes of the weights that one step reads at least.

    Of a table that is only looked up, one row is read; a tied embedding is the head as well.
    """
    tables = config.n_ctx if config.tied_head else config.n_ctx + config.n_vocab_padded
    looked_up = 1 if config.tied_head else 2
    return (config.parameters - (tables - looked_up) * config.d_model) * itemsize


def pays_from(
    config: GPTConfig, itemsize: int, balance: float, row_itemsize: int | None = None
) -> int | None:
    """The shortest context in which one cached token is faster; None if no context is that long.

    `balance` is what the machine can compute while it reads a byte, in FLOP. A cached token mostly
    waits for the weights; as long as all rows can be computed in that time, the cache saves work
    but no time.
    """
    for context in range(1, config.n_ctx + 1):
        read = bytes_read(config, context, itemsize, row_itemsize)
        kept = max(read * balance, config.flops(context))
        afresh = max(bytes_read(config, 0, itemsize) * balance, config.flops(context, rows=context))
        if afresh > kept:
            return context
    return None
