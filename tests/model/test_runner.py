"""What makes one row at a time safe: neither the cut of a sequence, nor what lies in other rows,
nor the neighbours in a batch change an answer.

Each proof is given twice: for torch's network and for the one that the compiled kernels run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.attention import Plan
from model.gpt import GPT
from model.step import Sampling, Work
from tests import oracle
from tests.tiny import GREEDY, Driver, Text, arrays, config, gpt, packed_copy, prompt
from tests.tiny import runner as tiny_runner

N_VOCAB = 97
TOKENS = prompt(150, N_VOCAB)


@pytest.fixture(scope="module", params=["torch", "kernels"])
def model(request: pytest.FixtureRequest) -> GPT:
    plain = gpt(config(n_kv_head=2))
    return plain if request.param == "torch" else packed_copy(plain)


@pytest.fixture(scope="module")
def expected() -> oracle.Array:
    """Log-probabilities of every token after every position of TOKENS."""
    plain = gpt(config(n_kv_head=2))
    return oracle.log_softmax(oracle.logits(arrays(plain), plain.config, TOKENS))


def splits(n: int) -> st.SearchStrategy[list[int]]:
    """Chunk lengths that add up to n."""
    cuts = st.sets(st.integers(1, n - 1), max_size=20)
    return cuts.map(lambda at: np.diff([0, *sorted(at), n]).tolist())


def check_split(model: GPT, expected: oracle.Array, lengths: list[int]) -> None:
    """Score and draw after every chunk: all log-probabilities of all positions, and the tokens."""
    driver, text = Driver(model, n_rows=160), Text([])
    for length in lengths:
        end = len(text.rows) + length
        text.tokens = TOKENS[:end]
        new_rows = driver.pool.take(length)
        work = text.work(new_rows)
        work.score = N_VOCAB
        work.targets = np.array(TOKENS[work.start + 1 : end + 1], np.int32)
        (draw,) = driver.runner.run([work])
        assert draw.token == expected[end - 1].argmax()
        assert len(draw.prompt_scores) == len(work.targets)
        for i, score in enumerate(draw.prompt_scores, start=work.start):
            assert score.token == TOKENS[i + 1]
            assert score.logprob == dict(score.top)[score.token]
            found = np.zeros(N_VOCAB)
            for token, logprob in score.top:
                found[token] = logprob
            np.testing.assert_allclose(found, expected[i], rtol=0, atol=1e-4)


@settings(deadline=None, max_examples=15)
@given(lengths=splits(150))
def test_b001_any_split_gives_the_same_logits(
    model: GPT, expected: oracle.Array, lengths: list[int]
) -> None:
    check_split(model, expected, lengths)


@pytest.mark.parametrize("lengths", [[1] * 150, [150], [149, 1], [1, 149], [64, 64, 22]])
def test_b002_row_by_row_and_in_one_piece_too(
    model: GPT, expected: oracle.Array, lengths: list[int]
) -> None:
    check_split(model, expected, lengths)


def test_a_step_writes_its_rows_only(model: GPT) -> None:
    """Five sequences decode and one computes a chunk of 9: 14 rows change and no other."""
    driver = Driver(model)
    texts = [Text(prompt(n, N_VOCAB)) for n in (1, 2, 30, 90, 31)]
    driver.step(texts)
    chunk = Text(prompt(50, N_VOCAB), chunk=9)
    held = [text.rows.copy() for text in texts]
    before = driver.runner.kv.clone()
    driver.step([*texts, chunk])
    new = [text.rows[len(rows) :].tolist() for text, rows in zip(texts, held, strict=True)]
    assert [len(rows) for rows in new] == [1] * 5
    written = sorted(sum(new, chunk.rows.tolist()))
    bits, bits_before = driver.runner.kv.view(torch.int32), before.view(torch.int32)
    changed = (bits != bits_before).any(dim=(0, 1, 3, 4)).nonzero().flatten()
    changed = changed[changed != driver.pool.scratch]  # which the driver itself poisons
    assert changed.tolist() == written


def test_a_step_computes_its_tokens_only() -> None:
    """The same step: 14 tokens pass each linear layer of each block, 5 pass the head."""
    model = gpt(config(n_kv_head=2))
    driver = Driver(model)
    texts = [Text(prompt(n, N_VOCAB)) for n in (1, 2, 30, 90, 31)]
    driver.step(texts)
    linear: dict[torch.nn.Module, str] = {
        m: name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)
    }
    passed: dict[str, int] = {}

    def count(module: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        passed[linear[module]] = len(inputs[0])

    for module in linear:
        module.register_forward_hook(count)
    driver.step([*texts, Text(prompt(50, N_VOCAB), chunk=9)])
    assert passed.pop("lm_head") == 5
    assert passed == {f"h.{i}.{n}": 14 for i in range(3) for n in LINEAR}


LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

# Every kind of request at once, of very different lengths.
KINDS: list[dict[str, Any]] = [
    {},
    {"chunk": 5},
    {"cached": False},
    {"cached": False, "chunk": 40},
    {"sampling": Sampling(seed=7)},
    {"sampling": Sampling(seed=7, copy=1), "chunk": 1},
    {"sampling": Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=3)},
    {"sampling": Sampling(temperature=1.5, min_p=0.05, seed=4), "cached": False},
    {"sampling": Sampling(seed=5, presence_penalty=1.0, logit_bias=((3, 2.0),))},
    {"sampling": Sampling(temperature=0.0, repetition_penalty=1.3)},
]


def mixture() -> list[Text]:
    lengths = (1, 2, 3, 30, 33, 60, 100, 129, 140, 141)
    texts = [Text(prompt(n, N_VOCAB), **kind) for n, kind in zip(lengths, KINDS, strict=True)]
    for text in texts:
        text.sampling = replace(text.sampling or GREEDY, logprobs=2)
    return texts


def test_neighbours_do_not_matter(model: GPT) -> None:
    together = Driver(model).generate(mixture(), 40)
    alone = [Driver(model).generate([text], 40)[0] for text in mixture()]
    assert together == alone
    assert len({tuple(text) for text in together}) == len(together)


def test_a_poisoned_pool_changes_nothing(model: GPT) -> None:
    """NaN in every row without a reference and in scratch, against zeros: the same tokens and the
    same log-probabilities, bit by bit."""
    answers = []
    for poison in (np.nan, 0.0):
        driver, texts = Driver(model, poison=poison), mixture()
        draws = [driver.step(texts) for _ in range(40)]
        answers.append((draws, [text.tokens for text in texts]))
    assert answers[0] == answers[1]
    assert not any(draw.failed for draws in answers[0][0] for draw in draws)


def test_the_mixture_pads_groups_of_several_lengths() -> None:
    """So that the reference's padding is among what the poison would spoil."""
    driver, texts = Driver(gpt(config(n_kv_head=2))), mixture()
    plans = watch_plans(driver)
    for _ in range(60):
        driver.step(texts)
    decoding = [group for group in plans[-1].groups if group.rows.shape[0] > 1]
    assert len(decoding) > 1
    assert any(group.mask is not None for group in decoding)


def watch_plans(driver: Driver) -> list[Plan]:
    """The plan of every call of the backend from now on."""
    plans: list[Plan] = []
    backend = driver.runner.backend

    def watched(q: Tensor, k: Tensor, v: Tensor, pool_layer: Tensor, plan: Plan) -> Tensor:
        plans.append(plan)
        return backend(q, k, v, pool_layer, plan)

    driver.runner.backend = watched
    return plans


def test_a_shared_prefix_is_read_by_all_and_written_by_none(model: GPT) -> None:
    driver = Driver(model)
    parent = Text(prompt(70, N_VOCAB))
    driver.step([parent])
    children = [Text(parent.tokens[:60] + prompt(5, N_VOCAB, seed)) for seed in range(3)]
    for child in children:
        child.rows = parent.rows[:60].copy()
        driver.pool.share(child.rows)
        driver.pool.pin(child.rows)
    prefix = driver.runner.kv[:, :, parent.rows].clone()
    together = driver.generate(children, 20)
    assert torch.equal(driver.runner.kv[:, :, parent.rows], prefix)
    fresh = [Text(child.tokens[:65]) for child in children]
    assert together == [Driver(model).generate([text], 20)[0] for text in fresh]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_read_and_written_elsewhere_are_the_same_rows(
    model: GPT, kv_dtype: torch.dtype
) -> None:
    """Also in another runner, as after a restart; `row_bytes` each."""
    first, second = Driver(model, 128, kv_dtype=kv_dtype), Driver(model, 128, kv_dtype=kv_dtype)
    text = Text(prompt(50, N_VOCAB))
    first.step([text])
    data = first.runner.read_rows(text.rows)
    assert data.shape == (50, model.config.row_bytes(kv_dtype.itemsize))
    second.pool.take(13)
    moved = Text(text.tokens)
    moved.rows = second.pool.take(50)[::-1].copy()
    before = second.runner.kv.clone()
    second.runner.write_rows(moved.rows, data)
    np.testing.assert_array_equal(second.runner.read_rows(moved.rows), data)
    before[:, :, moved.rows] = first.runner.kv[:, :, text.rows]
    assert torch.equal(second.runner.kv.view(torch.uint8), before.view(torch.uint8))
    assert second.generate([moved], 20) == first.generate([Text(text.tokens)], 20)


def test_padded_vocabulary_is_never_chosen_nor_listed() -> None:
    """Columns of the padding would win everywhere if they were looked at."""
    model = gpt(config(n_vocab_padded=128, tied_head=False))
    model.lm_head.weight[N_VOCAB:] *= 1000
    driver = Driver(model)
    texts = [
        Text([1], Sampling(temperature=0.0, logprobs=200)),
        Text([2], Sampling(temperature=2.0, seed=1, logprobs=200)),
        Text([3], Sampling(temperature=0.0, logit_bias=((N_VOCAB - 1, 100.0),), logprobs=0)),
    ]
    for _ in range(20):
        for draw in driver.step(texts):
            assert draw.token is not None
            assert draw.score is not None
            assert draw.token < N_VOCAB
            ids = sorted(token for token, _ in draw.score.top)
            assert ids in ([], list(range(N_VOCAB)))
    assert texts[2].made == [N_VOCAB - 1] * 20


def test_not_a_number_fails_one_request_and_leaves_no_trace(model: GPT) -> None:
    """One sequence's rows go bad in mid-text; it fails, alone, in drawing and in scoring; the
    others' texts are those of a run without it, also when they take over its rows."""
    driver = Driver(model, n_rows=125)  # just enough for all
    texts = [Text(prompt(n, N_VOCAB)) for n in (20, 21, 22)]
    driver.step(texts)
    bad = texts.pop(1)
    driver.runner.kv[1, 1, bad.rows[3]] = np.nan
    bad.score = 1
    draws = driver.step([texts[0], bad, texts[1]])
    assert [draw.failed for draw in draws] == [False, True, False]
    assert draws[1].token is None
    bad_rows = bad.rows.tolist()
    driver.trim(bad)
    heir = Text(prompt(23, N_VOCAB))
    assert set(driver.pool.free_rows()[-23:]) & set(bad_rows)
    made = driver.generate([*texts, heir], 20)
    clean = Driver(model).generate([Text(prompt(n, N_VOCAB)) for n in (20, 22, 23)], 20)
    assert made == clean


def test_scoring_fails_on_its_own_where_nothing_is_drawn(model: GPT) -> None:
    driver = Driver(model)
    texts = [Text(prompt(n, N_VOCAB), sampling=None, score=2, chunk=10) for n in (30, 31)]
    driver.step(texts)
    driver.runner.kv[0, 0, texts[0].rows[0]] = np.nan
    draws = driver.step(texts)
    assert [draw.failed for draw in draws] == [True, False]
    assert [draw.token for draw in draws] == [None, None]


def test_an_answer_stands_where_its_work_stood(model: GPT) -> None:
    """Work is packed in another order than it came in; some of it asks for nothing."""
    texts = [
        Text(prompt(40, N_VOCAB), chunk=8),
        Text(prompt(3, N_VOCAB)),
        Text(prompt(1, N_VOCAB), sampling=None),
        Text(prompt(20, N_VOCAB), score=0),
        Text(prompt(2, N_VOCAB), Sampling(temperature=0.0, logprobs=1)),
    ]
    draws = Driver(model).step(texts)
    assert [draw.token is None for draw in draws] == [True, False, True, False, False]
    assert [len(draw.prompt_scores) for draw in draws] == [0, 0, 0, 19, 0]
    assert [draw.score is None for draw in draws] == [True, True, True, True, False]


def test_bfloat16_rows_stay_near(model: GPT, expected: oracle.Array) -> None:
    runner = tiny_runner(model, 150, torch.bfloat16)
    tokens, rows = np.array(TOKENS, np.int32), np.arange(150, dtype=np.int32)
    worst = 0.0
    for start, end in [(0, 140), *((i, i + 1) for i in range(140, 150))]:
        work = Work(
            tokens[:end], start, rows[:end], 1, GREEDY, score=0, targets=tokens[start + 1 : end + 1]
        )
        for i, score in enumerate(runner.run([work])[0].prompt_scores, start=start):
            worst = max(worst, abs(score.logprob - expected[i, TOKENS[i + 1]]))
    assert 1e-4 < worst < 0.5


@pytest.mark.parametrize(("number", "fails"), [(3e38, False), (torch.inf, True), (torch.nan, True)])
def test_a_sum_too_large_is_no_failure(
    model: GPT, monkeypatch: pytest.MonkeyPatch, number: float, fails: bool
) -> None:
    """Only numbers that are not finite themselves fail a work, and they fail theirs alone."""
    runner = tiny_runner(model, 9)
    hidden = torch.ones(4, model.config.d_model)
    hidden[1, :8] = number
    monkeypatch.setattr(runner, "hidden", lambda batch: hidden)
    rows = np.arange(9, dtype=np.int32)
    work = [Work(np.zeros(2, np.int32), 0, rows[2 * i :][:2], 2) for i in range(2)]
    assert [draw.failed for draw in runner.run(work)] == [fails, False]
