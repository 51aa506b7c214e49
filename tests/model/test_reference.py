"""The plain mathematics against itself, PyTorch and the server: one result, however computed.

The numbers are the documents' own: 3 tokens of width 5, keys of 7, values of 11, 2 heads.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import Plan, attend
from model.reference import (
    Array,
    Attended,
    Cache,
    Mask,
    Projections,
    append_rows,
    attention,
    attention_by_loops,
    causal_mask,
    combine_heads,
    heads_one_by_one,
    multi_head,
    padding_mask,
    scores,
    scores_by_loops,
    share_heads,
    softmax,
    split_heads,
)

T, D_MODEL, D_K, D_V, N_HEAD = 3, 5, 7, 11, 2
CAUSAL = causal_mask(T, T)
Form = Callable[[Array, Array], Array]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def w(rng: np.random.Generator) -> Projections:
    return Projections.random(rng, D_MODEL, D_K, D_V, N_HEAD, N_HEAD)


@pytest.fixture
def x(rng: np.random.Generator) -> Array:
    return rng.normal(size=(2, T, D_MODEL))


def close(a: Array | Tensor, b: Array | Tensor) -> bool:
    return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=0, atol=1e-12)


def sdpa(q: Array, k: Array, v: Array, mask: Mask | None = None) -> Tensor:
    tensors = [torch.from_numpy(part.copy()) for part in (q, k, v)]
    attn_mask = None if mask is None else torch.from_numpy(mask)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        tensors[0], tensors[1], tensors[2], attn_mask, enable_gqa=grouped
    )


class TestScores:
    Q = np.array([[1.0, 0], [0, 1], [1, 1]])

    @pytest.mark.parametrize("form", [scores_by_loops, scores])
    def test_the_worked_grid(self, form: Form) -> None:
        assert form(self.Q, self.Q).tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 2]]

    @pytest.mark.parametrize("form", [scores_by_loops, scores])
    def test_an_added_key_adds_a_column(self, form: Form) -> None:
        grid = form(self.Q, np.vstack([self.Q, [2, 0]]))
        assert grid[:, :3].tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 2]]
        assert grid[1, 3] == 0 < grid[1, 1]  # q2 shares nothing with k4, and something with k2
        assert grid[:, 3].tolist() == [2, 0, 2]

    def test_sentences_and_heads_are_kept_apart(self, rng: np.random.Generator) -> None:
        q, k = rng.normal(size=(2, N_HEAD, T, D_K)), rng.normal(size=(2, N_HEAD, 4, D_K))
        grid = scores(q, k)
        assert grid.shape == (2, N_HEAD, T, 4)
        for b, h in np.ndindex(2, N_HEAD):
            assert close(grid[b, h], scores_by_loops(q[b, h], k[b, h]))


class TestMasks:
    def test_the_upper_triangle_is_hidden(self) -> None:
        grid = np.where(CAUSAL, np.arange(1.0, 10).reshape(3, 3), -np.inf)
        assert grid.tolist() == [[1, -math.inf, -math.inf], [4, 5, -math.inf], [7, 8, 9]]

    def test_fewer_queries_than_keys_are_the_last_ones(self) -> None:
        assert causal_mask(1, 4).tolist() == [[True] * 4]
        assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True] * 4]

    def test_padding_is_as_good_as_absent(
        self, x: Array, w: Projections, rng: np.random.Generator
    ) -> None:
        """Whatever stands in the padding, each sequence gets what it gets alone, in every head."""
        x[0, 2] = rng.normal(size=D_MODEL) * 1e6
        both = multi_head(x, x, x, w, padding_mask([2, 3], T))
        short, full = (multi_head(part, part, part, w) for part in (x[:1, :2], x[1:]))
        assert close(both.y[0, :2], short.y[0])
        assert close(both.y[1], full.y[0])
        assert (both.heads.weights[0, :, :, 2] == 0).all()

    def test_causal_and_padding_masks_combine(self, x: Array, w: Projections) -> None:
        both = CAUSAL & padding_mask([2, 3], T)
        assert both.shape == (2, 1, T, T)
        weights = multi_head(x, x, x, w, both).heads.weights
        hidden = np.broadcast_to(~both, weights.shape)
        assert (weights[hidden] == 0).all()
        assert (weights[~hidden] > 0).all()
        assert close(weights.sum(axis=-1), np.ones((2, N_HEAD, T)))

    def test_a_query_that_sees_nothing_gets_zeros(self, rng: np.random.Generator) -> None:
        q, k, v = (rng.normal(size=(T, D_K)) for _ in range(3))
        mask = causal_mask(T, T)
        mask[0] = False
        made = attention(q, k, v, mask)
        assert (made.out[0] == 0).all()
        assert close(made.out, attention_by_loops(q, k, v, mask))


class TestSoftmax:
    def test_positive_and_summing_to_one(self, rng: np.random.Generator) -> None:
        weights = softmax(rng.normal(size=(4, 5)))
        assert (weights > 0).all()
        assert close(weights.sum(axis=-1), np.ones(4))

    def test_nothing_overflows(self) -> None:
        assert softmax(np.array([1e4, 1e4, -1e4])).tolist() == [0.5, 0.5, 0.0]


class TestOneResult:
    def test_shapes_of_the_documents(self, rng: np.random.Generator, w: Projections) -> None:
        x = rng.normal(size=(1, T, D_MODEL))
        made = multi_head(x, x, x, w, CAUSAL)
        assert w.q.shape == w.k.shape == (5, 14)
        assert (w.v.shape, w.o.shape) == ((5, 22), (22, 5))
        assert made.heads.q.shape == made.heads.k.shape == (1, 2, 3, 7)
        assert made.heads.weights.shape == (1, 2, 3, 3)
        assert made.heads.v.shape == made.heads.out.shape == (1, 2, 3, 11)
        assert made.joined.shape == (1, 3, 22)
        assert made.y.shape == x.shape == (1, 3, 5)

    @pytest.mark.parametrize("n_kv_head", [1, 2, 4])
    def test_heads_one_by_one_and_batched(self, rng: np.random.Generator, n_kv_head: int) -> None:
        w = Projections.random(rng, D_MODEL, D_K, D_V, 4, n_kv_head)
        x = rng.normal(size=(2, T, D_MODEL))
        batched = multi_head(x, x, x, w, CAUSAL)
        for b in range(2):
            assert close(heads_one_by_one(x[b], w, CAUSAL), batched.y[b])

    def test_nested_matrix_batched_and_pytorch(self, rng: np.random.Generator) -> None:
        q, k = (rng.normal(size=(2, N_HEAD, T, D_K)) for _ in range(2))
        v = rng.normal(size=(2, N_HEAD, T, D_V))
        batched = attention(q, k, v, CAUSAL).out
        assert close(batched, sdpa(q, k, v, CAUSAL))
        for at in np.ndindex(2, N_HEAD):
            assert close(batched[at], attention(q[at], k[at], v[at], CAUSAL).out)
            assert close(batched[at], attention_by_loops(q[at], k[at], v[at], CAUSAL))

    @pytest.mark.parametrize("n_kv_head", [1, 2, 4])
    def test_shared_key_heads_and_pytorch(self, rng: np.random.Generator, n_kv_head: int) -> None:
        q = rng.normal(size=(2, 4, T, D_K))
        k, v = rng.normal(size=(2, n_kv_head, T, D_K)), rng.normal(size=(2, n_kv_head, T, D_V))
        ours = attention(q, share_heads(k, 4), share_heads(v, 4), CAUSAL).out
        assert close(ours, sdpa(q, k, v, CAUSAL))

    @pytest.mark.parametrize("n_kv_head", [1, 2, 4])
    def test_the_servers_attend(self, rng: np.random.Generator, n_kv_head: int) -> None:
        """A prompt, a chunk behind cached rows, one decoded token: each out of a shuffled pool."""
        total, n_head = 6, 4
        w = Projections.random(rng, D_MODEL, D_K, D_K, n_head, n_kv_head)
        x = rng.normal(size=(1, total, D_MODEL))
        expected = multi_head(x, x, x, w, causal_mask(total, total)).heads.out[0]
        q, k, v = (
            torch.from_numpy(split_heads(x @ matrix, n)[0].transpose(1, 0, 2).copy())
            for matrix, n in ((w.q, n_head), (w.k, n_kv_head), (w.v, n_kv_head))
        )
        rows = torch.from_numpy(rng.permutation(9)[:total])
        pool = torch.full((2, 9, n_kv_head, D_K), math.nan, dtype=torch.float64)
        for start, end in ((0, 3), (3, 5), (5, 6)):
            new = slice(start, end)
            plan = Plan(rows[new], np.array([0, end - start]), np.array([0, end]), rows[:end])
            out = attend(q[new], k[new], v[new], pool, plan)
            assert close(out.transpose(0, 1), expected[:, new])

    def test_cross_attention(self, rng: np.random.Generator, w: Projections) -> None:
        """Queries of one sequence, keys and values of a longer one; no mask."""
        x_q, x_k = rng.normal(size=(2, T, D_MODEL)), rng.normal(size=(2, 4, D_MODEL))
        x_v = rng.normal(size=(2, 4, D_MODEL))
        made = multi_head(x_q, x_k, x_v, w)
        assert made.heads.weights.shape == (2, N_HEAD, T, 4)
        q, k, v = (split_heads(x @ m, N_HEAD) for x, m in ((x_q, w.q), (x_k, w.k), (x_v, w.v)))
        heads = sdpa(q, k, v)
        assert close(made.y, combine_heads(heads.numpy()) @ w.o)


class TestHeads:
    def test_combining_undoes_splitting(self, rng: np.random.Generator) -> None:
        x = rng.normal(size=(2, T, 22))
        heads = split_heads(x, N_HEAD)
        assert heads.shape == (2, N_HEAD, T, D_V)
        assert (heads[:, 0] == x[:, :, :D_V]).all()  # the first columns are the first head
        assert (combine_heads(heads) == x).all()

    def test_an_indivisible_width_is_an_error(self, x: Array) -> None:
        with pytest.raises(ValueError, match="width 5 is not divisible by 2 heads"):
            split_heads(x, N_HEAD)


class TestPermutations:
    """Each axis by itself: what is shuffled on the way in is shuffled on the way out."""

    def test_sentences(self, rng: np.random.Generator, w: Projections) -> None:
        x, order = rng.normal(size=(4, T, D_MODEL)), [2, 0, 3, 1]
        shuffled = x[order]
        y = multi_head(x, x, x, w, CAUSAL).y
        assert close(multi_head(shuffled, shuffled, shuffled, w, CAUSAL).y, y[order])

    def test_heads(self, x: Array, rng: np.random.Generator) -> None:
        w, order = Projections.random(rng, D_MODEL, D_K, D_V, 3, 3), [2, 0, 1]

        def columns(matrix: Array) -> Array:
            return np.hstack([np.split(matrix, 3, axis=1)[head] for head in order])

        shuffled = replace(w, q=columns(w.q), k=columns(w.k), v=columns(w.v), o=columns(w.o.T).T)
        before, after = (multi_head(x, x, x, each, CAUSAL) for each in (w, shuffled))
        assert close(after.heads.out, before.heads.out[:, order])
        assert close(after.heads.weights, before.heads.weights[:, order])
        assert close(after.y, before.y)  # they are mixed: nobody can tell which was which

    def test_positions_unless_masked(self, x: Array, w: Projections) -> None:
        order = [2, 0, 1]
        shuffled = x[:, order]
        y = multi_head(x, x, x, w).y
        assert close(multi_head(shuffled, shuffled, shuffled, w).y, y[:, order])
        masked = multi_head(x, x, x, w, CAUSAL).y
        assert not close(multi_head(shuffled, shuffled, shuffled, w, CAUSAL).y, masked[:, order])


class TestRows:
    """Row N of the output comes from rows 1..N of the input; so a 4th row is only a 4th row."""

    @pytest.mark.parametrize("changed", range(T))
    def test_a_later_row_changes_no_earlier_one(
        self, x: Array, w: Projections, changed: int
    ) -> None:
        before = multi_head(x, x, x, w, CAUSAL).y
        x[:, changed] += 1.0
        after = multi_head(x, x, x, w, CAUSAL).y
        assert (after[:, :changed] == before[:, :changed]).all()  # bit for bit
        assert (after[:, changed:] != before[:, changed:]).all()

    def test_the_fourth_row_is_one_row_of_everything(
        self, rng: np.random.Generator, w: Projections
    ) -> None:
        x = rng.normal(size=(1, 4, D_MODEL))
        _, cache = append_rows(x[:, :3], w, Cache.empty(1, w))
        made, longer = append_rows(x[:, 3:], w, cache)
        whole = multi_head(x, x, x, w, causal_mask(4, 4))
        computed = {
            "q": (made.heads.q, whole.heads.q),
            "k": (longer.k[:, :, 3:], whole.heads.k),
            "v": (longer.v[:, :, 3:], whole.heads.v),
            "weights": (made.heads.weights, whole.heads.weights),
            "out": (made.heads.out, whole.heads.out),
            "joined": (made.joined, whole.joined),
            "y": (made.y, whole.y),
        }
        assert Attended._fields == ("q", "k", "v", "weights", "out")  # none is left out above
        for name, (one, four) in computed.items():
            assert one.shape[-2] == 1, name
            assert close(one, four[..., 3:, :]), name
        assert (longer.k[:, :, :3] == cache.k).all()
        assert (longer.v[:, :, :3] == cache.v).all()

    @pytest.mark.parametrize("n_kv_head", [1, 2, 4])
    @pytest.mark.parametrize("sizes", [(6,), (1, 1, 1, 1, 1, 1), (3, 1, 2)])
    def test_any_split_into_appended_rows(
        self, rng: np.random.Generator, n_kv_head: int, sizes: tuple[int, ...]
    ) -> None:
        w = Projections.random(rng, D_MODEL, D_K, D_V, 4, n_kv_head)
        x = rng.normal(size=(2, 6, D_MODEL))
        cache, parts = Cache.empty(2, w), []
        for rows in np.split(x, np.cumsum(sizes)[:-1], axis=1):
            made, cache = append_rows(rows, w, cache)
            parts.append(made.y)
        assert close(np.concatenate(parts, axis=1), multi_head(x, x, x, w, causal_mask(6, 6)).y)

    def test_queries_are_not_kept(self, x: Array, w: Projections) -> None:
        """Keys of 7 and values of 11 for each head: a query would show in the width."""
        _, cache = append_rows(x, w, Cache.empty(2, w))
        assert sum(part.size for part in cache) == 2 * T * N_HEAD * (D_K + D_V)
        k, v = split_heads(x @ w.k, N_HEAD), split_heads(x @ w.v, N_HEAD)
        assert (cache.k == k).all()
        assert (cache.v == v).all()


def test_nothing_that_serves_imports_the_oracle() -> None:
    """Only each other, their tests and the document may: followed through every import."""
    root = Path(__file__).parents[2]
    oracle = {"model.reference", "model.gradients"}
    for file in [*root.glob("model/**/*.py"), *root.glob("server/**/*.py")]:
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        if name not in oracle:
            assert not oracle & imported(file), name


def imported(file: Path) -> set[str]:
    """Full names of what a file imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
