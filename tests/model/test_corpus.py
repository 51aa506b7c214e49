"""The corpus: which stories are held out, what vocabulary comes of them, how they fill rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.corpus import Shelf, learn_vocabulary, read_stories, split_held_out


def write(path: Path, stories: list[str]) -> Path:
    path.write_text("".join(f"{story}\n<|endoftext|>\n" for story in stories), encoding="utf-8")
    return path


def test_stories_are_read_as_they_were_written(tmp_path: Path) -> None:
    stories = ["One.\n\nTwo.", "  Indented, and a cat \U0001f408.", "Last"]
    assert read_stories(write(tmp_path / "a.txt", stories)) == stories
    (tmp_path / "b.txt").write_text("<|endoftext|>\n\n<|endoftext|>No end")
    assert read_stories(tmp_path / "b.txt") == ["No end"]


def test_every_fiftieth_story_of_the_first_file_is_held_out(tmp_path: Path) -> None:
    first = [f"story {i}" for i in range(120)]
    others = [[f"{name} {i}" for i in range(25)] for name in "bc"]
    files = [write(tmp_path / f"{i}.txt", s) for i, s in enumerate([first, *others])]
    training, held_out = split_held_out(files, others_every=10)
    assert held_out == ["story 0", "story 50", "story 100"]
    share = [f"{name} {i}" for name in "bc" for i in (0, 10, 20)]
    assert training == [story for story in first if story not in held_out] + share


def test_a_vocabulary_of_bytes_merges_and_end_of_text() -> None:
    stories = ["the cat sat on the mat", "the other cat"] * 20
    tokenizer = learn_vocabulary(stories, 270)
    assert tokenizer.n_vocab == 270
    assert tokenizer.end_of_text == 269
    assert sorted(tokenizer.token_bytes[:256]) == [bytes([i]) for i in range(256)]
    for text in (stories[0], "\U0001f408 unseen \x00 é\n\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the cat")) < 4
    assert tokenizer.token_bytes == learn_vocabulary(stories, 270).token_bytes


def test_too_few_stories_for_a_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"make \d+ tokens, not 5000"):
        learn_vocabulary(["the cat"], 5000)


LENGTHS = st.lists(st.integers(1, 25), min_size=1, max_size=12)


def stories_of(lengths: list[int]) -> list[np.ndarray[tuple[int], np.dtype[np.uint16]]]:
    """Token i stands at i, so that a piece says where it is from."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype=np.uint16) for a, b in pairwise(starts)]


@settings(deadline=None, max_examples=30)
@given(LENGTHS, st.integers(1, 10), st.integers(0, 3))
def test_rows_are_pieces_of_stories_and_each_epoch_begins_every_piece_once(
    lengths: list[int], length: int, seed: int
) -> None:
    shelf = Shelf(stories_of(lengths), length, seed)
    starts = {int(piece[0]): len(piece) for piece in shelf.pieces}
    assert sorted(np.concatenate(shelf.pieces).tolist()) == list(range(sum(lengths)))
    begun: list[int] = []
    while shelf.epoch < 3:
        row = shelf.row()
        assert row.dtype == np.int64
        assert len(row) == length
        place = 0
        while place < length:
            first = int(row[place])
            whole = np.arange(first, first + starts[first])[: length - place]
            assert row[place : place + len(whole)].tolist() == whole.tolist()
            begun.append(first)
            place += len(whole)
    for epoch in range(2):
        taken = begun[epoch * len(starts) : (epoch + 1) * len(starts)]
        assert sorted(taken) == sorted(starts)


@settings(deadline=None, max_examples=20)
@given(LENGTHS, st.integers(1, 10), st.integers(0, 30))
def test_a_shelf_goes_on_from_any_place(lengths: list[int], length: int, n: int) -> None:
    shelf, again, other = (Shelf(stories_of(lengths), length, seed) for seed in (0, 0, 1))
    for _ in range(n):
        shelf.row()
    again.seek(shelf.epoch, shelf.taken)
    for _ in range(10):
        np.testing.assert_array_equal(again.row(), shelf.row())
    assert (again.epoch, again.taken) == (shelf.epoch, shelf.taken)
    other.row()


@pytest.mark.parametrize("change", ["seed", "epoch"])
def test_another_seed_and_another_epoch_are_another_order(change: str) -> None:
    shelf = Shelf(stories_of([1] * 40), 40, seed=0)
    first = shelf.row()
    second = (shelf if change == "epoch" else Shelf(stories_of([1] * 40), 40, seed=1)).row()
    assert first.tolist() != second.tolist()
    assert sorted(first.tolist()) == sorted(second.tolist())
