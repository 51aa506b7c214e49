"""Choosing tokens, against plain-Python and NumPy oracles and transformers' own processors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model.sampler import _best, _kept, _keys, sample, score, uniform
from model.step import Draw, Sampling, Work
from tests.oracle import Array, log_softmax, softmax
from tests.tiny import GREEDY

FLAT = [0.0] * 12
PEAKED = [0.0] * 5 + [60.0] + [0.0] * 6
UNEVEN = np.random.default_rng(0).normal(0, 1.5, 12).tolist()


def at(position: int, sampling: Sampling | None, banned: tuple[int, ...] = ()) -> Work:
    """Work whose drawn token will stand at `position`."""
    text = np.zeros(position, np.int32)
    return Work(text, 0, text, n_prompt=position, sampling=sampling, banned=banned)


def draw(logits: list[float], *work: Work) -> list[Draw]:
    """One draw for each work, all from the same logits."""
    return sample(torch.tensor([logits] * len(work)), work)


def tokens(logits: list[float], sampling: Sampling, n: int = 500) -> list[int]:
    """Draws at `n` positions, that is with n numbers of the noise."""
    draws = draw(logits, *(at(i, sampling) for i in range(1, n + 1)))
    assert not any(d.failed for d in draws)
    return [d.token for d in draws if d.token is not None]


# Greedy and temperature


def test_greedy_takes_the_best_and_of_equal_ones_the_lowest_id() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -9.0, -1.0, -3.0]])
    assert [d.token for d in sample(rows, [at(1, GREEDY)] * 3)] == [1, 0, 2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-10, 1e-4])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_tiny_temperatures_are_finite_and_greedy(temperature: float, scale: float) -> None:
    logits = [x * scale for x in UNEVEN]
    assert set(tokens(logits, Sampling(temperature=temperature))) == {int(np.argmax(logits))}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0, 100.0])
def test_draws_follow_the_exact_distribution(temperature: float) -> None:
    check_distribution(UNEVEN, Sampling(temperature=temperature))


def test_seed_and_copy_give_the_exact_distribution_too() -> None:
    """Over 4,000 seeds, and over 4,000 copies, at one position."""
    for kinds in ([Sampling(seed=i) for i in range(4000)], [Sampling(copy=i) for i in range(4000)]):
        work = [at(9, sampling) for sampling in kinds]
        assert_chi_square([d.token for d in draw(UNEVEN, *work)], softmax(np.array(UNEVEN)))


# Top-k, top-p, min-p

CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 12},
    {"top_k": 10**9},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1.0},
    {"min_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cut_tails_follow_the_exact_distribution(cut: dict[str, Any]) -> None:
    check_distribution(UNEVEN, Sampling(**cut))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_peak_survives_every_cut(cut: dict[str, Any]) -> None:
    assert set(tokens(PEAKED, Sampling(**cut))) == {5}


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 5}, 5),
        ({"top_p": 0.0}, 1),
        ({"top_p": 1e-9}, 1),
        ({"top_p": 0.49}, 6),
        ({"top_p": 0.5}, 6),
        ({"top_p": 0.51}, 7),
        ({"top_p": 1.0}, 12),
        ({"min_p": 1.0}, 12),
        ({"top_k": 4, "top_p": 0.7}, 3),
    ],
)
def test_of_equal_tokens_the_lowest_ids_stay(cut: dict[str, Any], kept: int) -> None:
    """Exactly k of them, whatever the neighbours ask for."""
    sampling = Sampling(**cut)
    assert set(tokens(FLAT, sampling)) == set(range(kept))
    for neighbour in (Sampling(top_k=9), Sampling(top_k=2), Sampling(top_p=0.3), GREEDY):
        work = [w for i in range(1, 500) for w in (at(i, sampling), at(i, neighbour))]
        assert {d.token for d in draw(FLAT, *work)[::2]} == set(range(kept))


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 50_000), (0.5, 25_000)])
def test_sums_over_a_long_flat_tail_are_exact(top_p: float, kept: int) -> None:
    """Rounding moves the border of 50,000 equal tokens by none of them."""
    sampling = Sampling(top_k=10**6, top_p=top_p, min_p=1e-12)
    work = [at(i, sampling) for i in range(1, 20)]
    draws = sample(torch.zeros(len(work), 50_000), work)
    for w, found in zip(work, draws, strict=True):
        assert found.token == pytest.approx(uniform(sampling, w.position) * kept, abs=1)


@st.composite
def cuts(draw: st.DrawFn) -> Sampling:
    return Sampling(
        temperature=draw(st.floats(0.05, 5.0)),
        top_k=draw(st.integers(0, 40)),
        top_p=draw(st.floats(0.0, 1.0)),
        min_p=draw(st.floats(0.0, 1.0)),
        seed=draw(st.integers(-(2**63), 2**64)),
        copy=draw(st.integers(0, 9)),
    )


@settings(deadline=None, max_examples=100)
@given(st.lists(cuts(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_any_batch_draws_what_the_definition_says(batch: list[Sampling], seed: int) -> None:
    """The inverse of the cumulative distribution, in token order, at the row's own number."""
    logits = np.random.default_rng(seed).normal(0, 3, (len(batch), 32)).astype(np.float32)
    draws = sample(torch.from_numpy(logits), [at(3, s) for s in batch])
    for row, sampling, found in zip(logits, batch, draws, strict=True):
        probs = kept_probabilities(row.astype(np.float64), sampling)
        cumulative = np.cumsum(probs)
        noise = uniform(sampling, 3)
        expected = int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))
        if found.token != expected:  # float32 may fall on the other side of a border, no further
            between = cumulative[min(found.token or 0, expected)] / cumulative[-1]
            assert between == pytest.approx(noise, abs=1e-5)
            assert probs[found.token] > 0


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_of_many_tokens_the_right_ones_are_kept(spread: float, cut: dict[str, Any]) -> None:
    """From equal ones, where half of all may stay, to a peak; rounded, so that many are equal."""
    random = np.random.default_rng(4)
    logits = random.normal(0, spread, 5000).round(2).astype(np.float32)
    weights = np.exp(logits - logits.max())
    whole = Sampling(**cut | {"temperature": 1.0})
    kept = np.flatnonzero(kept_probabilities(logits.astype(np.float64), whole))
    found = _kept(weights, whole).tolist()
    assert found == sorted(found)
    # Where the share is reached, rounding may take one more or one less of those that are equal.
    for token in set(kept.tolist()) ^ set(found):
        assert logits[token] == logits[found].min() or logits[token] == logits[kept].min()
    assert abs(len(kept) - len(found)) <= 1


@pytest.mark.parametrize("n", [0, 1, 7, 99, 100, 500])
def test_the_best_are_the_same_on_any_device(n: int) -> None:
    """A CPU finds them in another way: by the least of them."""
    values = np.random.default_rng(5).normal(0, 1, (6, 100)).round(1).astype(np.float32)
    values += 0.0  # no minus zero: it sorts below zero
    values[0] = 0.0
    bits, ids = torch.from_numpy(values).view(torch.int32).long(), torch.arange(100)
    expected = _keys(bits, ids).topk(min(n, 100), dim=-1).indices
    assert _best(torch.from_numpy(values), n).tolist() == expected.tolist()
    assert expected.tolist() == [
        sorted(range(100), key=lambda i: (-row[i], i))[:n] for row in values.tolist()
    ]


def check_distribution(logits: list[float], sampling: Sampling) -> None:
    """4,000 draws against our oracle's probabilities, which are those of transformers."""
    expected = kept_probabilities(np.array(logits), sampling)
    np.testing.assert_allclose(expected, hf_probabilities(logits, sampling), atol=1e-6)
    assert_chi_square(tokens(logits, sampling, 4000), expected)


def assert_chi_square(found: list[Any], probs: Array) -> None:
    """Nothing of no probability was drawn, and the others as often as they should (p > 1e-4)."""
    counts = np.bincount(found, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    expected = len(found) * probs[probs > 0]
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson and Hilferty: the cube root of chi-square is nearly normal; 3.72 leaves 1e-4.
    limit = (
        freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
        if freedom
        else 0
    )
    assert statistic <= limit


def kept_probabilities(logits: Array, s: Sampling) -> Array:
    """Temperature, top-k, top-p, min-p one after another, each by its definition."""
    probs = softmax(logits / s.temperature)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if s.top_k:
        order = order[: s.top_k]
    total, before = sum(probs[i] for i in order), 0.0
    kept: list[int] = []
    for i in order:
        if kept and before >= s.top_p * total and s.top_p < 1:
            break
        kept.append(i)
        before += probs[i]
    kept = [i for i in kept if probs[i] >= s.min_p * probs[order[0]]]
    out = np.zeros(len(probs))
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def hf_probabilities(logits: list[float], s: Sampling) -> Array:
    processors = LogitsProcessorList([TemperatureLogitsWarper(s.temperature)])
    if s.top_k:
        processors.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        processors.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        processors.append(MinPLogitsWarper(s.min_p))
    scores = processors(torch.LongTensor([[0]]), torch.tensor([logits]).double())
    probs: Array = torch.softmax(scores[0], dim=-1).numpy()
    return probs


# Seeds


def test_noise_depends_on_seed_copy_and_position_alone() -> None:
    base = Sampling(seed=1, copy=0)
    same = replace(base, temperature=0.5, top_k=3, logprobs=2)
    assert uniform(base, 7) == uniform(same, 7)
    others = [(replace(base, seed=2), 7), (replace(base, copy=1), 7), (base, 8)]
    assert len({uniform(base, 7), *(uniform(s, p) for s, p in others)}) == 4
    assert all(0 <= uniform(replace(base, seed=-(2**63) + i), 1) < 1 for i in range(1000))


@pytest.mark.parametrize(("bits", "first"), [(b"\xff", False), (b"\x00", True)])
def test_noise_at_its_ends_draws_a_token_that_may_come(
    bits: bytes, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Digest:
        def digest(self) -> bytes:
            return bits * 8

    monkeypatch.setattr("hashlib.blake2b", lambda key, digest_size: Digest())
    assert 0 <= uniform(Sampling(), 1) < 1
    best = sorted(np.argsort(UNEVEN)[-3:].tolist())
    assert 0 not in best, "or the first token could come"
    assert 11 not in best, "or the last"
    assert tokens(UNEVEN, Sampling(top_k=3), 1) == [best[0 if first else -1]]


def test_a_seeded_draw_is_the_same_in_any_batch() -> None:
    """Alone, and in the middle of 20 others that want something else of other logits."""
    rng = np.random.default_rng(3)
    ours = [Sampling(seed=5, **cut) for cut in CUTS]
    logits = torch.tensor(rng.normal(0, 2, (len(ours), 300)).astype(np.float32))
    alone = [sample(logits[i : i + 1], [at(4, s)])[0].token for i, s in enumerate(ours)]
    for seed in range(5):
        others = [replace(ours[i % len(ours)], seed=100 * seed + i) for i in range(20)]
        noise = torch.tensor(rng.normal(0, 2, (20, 300)).astype(np.float32))
        draws = sample(
            torch.cat([noise[:7], logits, noise[7:]]),
            [at(4, s) for s in (*others[:7], *ours, *others[7:])],
        )
        assert [d.token for d in draws[7 : 7 + len(ours)]] == alone


def test_copies_differ() -> None:
    copies = [tokens(UNEVEN, Sampling(seed=1, copy=i), 30) for i in range(4)]
    assert len({tuple(copy) for copy in copies}) == 4


# Penalties, bias, forbidden ids


@st.composite
def penalised(draw: st.DrawFn) -> Work:
    ids = st.integers(0, 15)
    text = draw(st.lists(ids, min_size=1, max_size=30))
    penalty = st.sampled_from([0.0, 0.5, 2.0, -1.0])
    return Work(
        tokens=np.array(text, np.int32),
        start=0,
        rows=np.zeros(len(text), np.int32),
        n_prompt=draw(st.integers(1, len(text))),
        sampling=Sampling(
            temperature=0.0,
            presence_penalty=draw(penalty),
            frequency_penalty=draw(penalty),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7, 2.0])),
            logit_bias=tuple(draw(st.dictionaries(ids, st.floats(-100, 100), max_size=4)).items()),
            logprobs=1,
        ),
        banned=tuple(draw(st.sets(ids, max_size=4))),
    )


@settings(deadline=None, max_examples=100)
@given(st.lists(penalised(), min_size=1, max_size=5), st.integers(0, 2**32))
def test_penalties_bias_and_bans_by_their_definitions(batch: list[Work], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (len(batch), 16)).astype(np.float32)
    for row, work, found in zip(logits, batch, sample(torch.tensor(logits), batch), strict=True):
        adjusted = adjust(row.tolist(), work)
        assert found.token is not None
        assert adjusted[found.token] == pytest.approx(max(adjusted), abs=1e-4)
        assert found.score is not None
        raw = log_softmax(row.astype(np.float64))
        assert found.score.logprob == pytest.approx(raw[found.token], abs=1e-5)
        assert found.score.top[0][0] == int(row.argmax()), "raw, whatever was adjusted"


def adjust(logits: list[float], work: Work) -> list[float]:
    """CTRL's penalty on all tokens, OpenAI's two on the completion's, then bias, then bans."""
    s, out = work.sampling, list(logits)
    assert s is not None
    text = work.tokens.tolist()
    for token in set(text):
        out[token] *= 1 / s.repetition_penalty if out[token] > 0 else s.repetition_penalty
    made = text[work.n_prompt :]
    for token in set(made):
        out[token] -= s.presence_penalty + s.frequency_penalty * made.count(token)
    for token, bias in s.logit_bias:
        out[token] += bias
    for token in work.banned:
        out[token] = -math.inf
    return out


def test_a_forced_token_comes_and_a_banned_one_does_not() -> None:
    for temperature in (0.0, 1.0, 2.0):
        forced = Sampling(temperature=temperature, logit_bias=((3, 100.0),))
        assert set(tokens(UNEVEN, forced)) == {3}
        ban = [at(i, Sampling(temperature=temperature), banned=(2, 4)) for i in range(1, 500)]
        assert not {2, 4} & {d.token for d in draw(UNEVEN, *ban)}


# Faulty rows


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=2, logprobs=3)])
def test_a_number_that_is_not_finite_fails_its_row_alone(bad: float, sampling: Sampling) -> None:
    logits = torch.tensor([UNEVEN] * 4)
    good = sample(logits, [at(i, sampling) for i in range(1, 5)])
    logits[2, 7] = bad
    draws = sample(logits, [at(i, sampling) for i in range(1, 5)])
    assert draws.pop(2) == Draw(failed=True)
    good.pop(2)
    assert draws == good


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_p=0.5)])
def test_a_row_of_which_every_token_is_banned_fails_alone(sampling: Sampling) -> None:
    everything = tuple(range(12))
    first, second = draw(UNEVEN, at(1, sampling, banned=everything), at(1, sampling))
    assert first == Draw(failed=True)
    assert second.token is not None


def test_work_that_asks_for_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for no token"):
        draw(UNEVEN, at(1, None))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=3, top_p=0.5, min_p=0.1, logprobs=5)])
def test_a_vocabulary_of_one(sampling: Sampling) -> None:
    (only,) = draw([2.5], at(1, sampling))
    assert only.token == 0
    if only.score:
        assert only.score == (0, 0.0, ((0, 0.0),))


# Log-probabilities


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Of the model and not of the request, and the same bits alone as in the list."""
    logits = np.random.default_rng(1).normal(0, 4, (40, 1000)).astype(np.float32)
    hot = Sampling(temperature=1.8, top_k=400, presence_penalty=1.0, logit_bias=((1, 5.0),))
    work = [at(i + 1, replace(hot, logprobs=1000 if i % 2 else 3)) for i in range(40)]
    draws = sample(torch.tensor(logits), work)
    raw = log_softmax(logits.astype(np.float64))
    for row, found, w in zip(raw, draws, work, strict=True):
        assert found.score is not None
        assert found.score.token == found.token
        assert w.sampling is not None
        assert len(found.score.top) == w.sampling.logprobs
        assert [i for i, _ in found.score.top] == np.argsort(-row, kind="stable")[
            : w.sampling.logprobs
        ].tolist()
        for token, logprob in (found.score[:2], *found.score.top):
            assert logprob == pytest.approx(row[token], abs=1e-5)
        listed = dict(found.score.top)
        if found.token in listed:
            assert listed[found.token] == found.score.logprob
    assert sum(d.token in dict(d.score.top) for d in draws if d.score) > 20


def test_no_alternatives_and_no_numbers_are_not_the_same() -> None:
    chosen_only, nothing = draw(UNEVEN, at(1, replace(GREEDY, logprobs=0)), at(1, GREEDY))
    assert chosen_only.score is not None
    assert chosen_only.score.top == ()
    assert nothing.score is None


def test_of_equal_alternatives_the_lowest_ids_are_listed_first_in_any_batch() -> None:
    """So that the greedy choice heads its own list, also where bfloat16 makes ties common."""
    logits = torch.tensor([UNEVEN + [9.0, 3.0] * 30] * 2)
    for neighbour in (0, 1, 7, 40, 72):
        first, _ = score(logits, torch.tensor([12, 12]), [3, neighbour])
        assert [token for token, _ in first.top] == [12, 14, 16]
    (greedy,) = sample(logits[:1], [at(1, replace(GREEDY, logprobs=1))])
    assert greedy.score is not None
    assert greedy.score.top[0][0] == greedy.token == 12
