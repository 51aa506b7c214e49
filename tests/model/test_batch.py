"""Work becomes packed tensors: every token once, each sequence's groups over its own rows only."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention import PADDING
from model.batch import pack
from model.step import Work

CPU = torch.device("cpu")
SPANS = st.tuples(st.integers(0, 60), st.one_of(st.just(1), st.integers(1, 20)))


def batch(spans: list[tuple[int, int]]) -> list[Work]:
    """Work of `n` tokens after `start`; no two sequences have a token or a row in common."""
    made, first = [], 0
    for start, n in spans:
        numbers = np.arange(first, first + start + n, dtype=np.int32)
        made.append(Work(tokens=numbers + 10_000, start=start, rows=numbers[::-1], n_prompt=1))
        first += start + n
    return made


@settings(deadline=None, max_examples=100)
@given(st.lists(SPANS, min_size=1, max_size=12))
def test_each_sequence_finds_its_tokens_positions_and_rows(spans: list[tuple[int, int]]) -> None:
    work = batch(spans)
    packed = pack(work, CPU)
    for w, span in zip(work, packed.spans, strict=True):
        assert packed.tokens[span].tolist() == w.tokens[w.start :].tolist()
        assert packed.positions[span].tolist() == list(range(w.start, w.end))
        assert packed.plan.write[span].tolist() == w.rows[w.start :].tolist()
    covered = sorted(i for span in packed.spans for i in range(span.start, span.stop))
    assert covered == list(range(len(packed.tokens)))
    assert len(covered) == sum(n for _, n in spans)


@settings(deadline=None, max_examples=100)
@given(st.lists(SPANS, min_size=1, max_size=12))
def test_each_query_sees_its_own_rows_and_padding_is_its_own(spans: list[tuple[int, int]]) -> None:
    """Groups cover every query once; what the mask shows is rows[: position + 1], and what it
    hides belongs to the same sequence, so that no poison of others can be read."""
    work = batch(spans)
    packed = pack(work, CPU)
    owner = {
        query: i for i, span in enumerate(packed.spans) for query in range(len(packed.tokens))[span]
    }
    positions = packed.positions.tolist()
    covered = []
    for group in packed.plan.groups:
        queries = group.queries.tolist()
        covered += queries
        n_sequences, n_keys = group.rows.shape
        each = len(queries) // n_sequences
        mask = torch.ones(1, dtype=torch.bool) if group.mask is None else group.mask[:, 0]
        mask = mask.expand(n_sequences, each, n_keys)
        for at, query in enumerate(queries):
            rows, seen = group.rows[at // each], mask[at // each, at % each]
            w = work[owner[query]]
            assert rows[seen].tolist() == w.rows[: positions[query] + 1].tolist()
            assert set(rows.tolist()) <= set(w.rows.tolist())
    assert sorted(covered) == list(range(len(owner)))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_decoding_is_padded_by_no_more_than_its_share(lengths: list[int]) -> None:
    groups = pack(batch([(n - 1, 1) for n in lengths]), CPU).plan.groups
    for group in groups:
        if group.mask is not None:
            assert (~group.mask).sum() <= PADDING * group.mask.numel()
    assert sum(len(group.rows) for group in groups) == len(lengths)


def test_equal_lengths_need_neither_padding_nor_mask() -> None:
    (group,) = pack(batch([(30, 1)] * 5), CPU).plan.groups
    assert group.rows.shape == (5, 31)
    assert group.mask is None
