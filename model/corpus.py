"""The text that a model learns from: stories, a vocabulary, and rows of tokens in random order."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import ByteLevelBPETokenizer

from model.tokenizer import END_OF_TEXT, Tokenizer

HELD_OUT_EVERY = 50  # stories 0, 50, 100, ... of the first file are never trained on

Story = NDArray[np.uint16]


def read_stories(path: Path) -> list[str]:
    """Stories of a corpus file, which ends each with a line `<|endoftext|>`."""
    parts = path.read_text(encoding="utf-8").split(END_OF_TEXT)
    return [story for part in parts if (story := part.strip("\n"))]


def split_held_out(files: Sequence[Path], others_every: int) -> tuple[list[str], list[str]]:
    """(training, held-out) stories: all of the first file but every 50th, a share of the others."""
    first = read_stories(files[0])
    held_out = first[::HELD_OUT_EVERY]
    training = [story for i, story in enumerate(first) if i % HELD_OUT_EVERY]
    for path in files[1:]:
        training += read_stories(path)[::others_every]
    return training, held_out


def learn_vocabulary(stories: Sequence[str], n_vocab: int) -> Tokenizer:
    """Byte-level BPE of `n_vocab` tokens: 256 bytes, the merges in their order, end of text.

    Raises ValueError where the stories are too few to make so many of them.
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(stories, vocab_size=n_vocab - 1, show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        bpe.save_model(folder)
        tokenizer = Tokenizer.load_gpt2_files(Path(folder))
    if tokenizer.n_vocab != n_vocab:
        raise ValueError(f"the stories make {tokenizer.n_vocab} tokens, not {n_vocab}")
    return tokenizer


class Shelf:
    """Stories in a new order each epoch, laid end to end in rows of `length` tokens.

    A row begins with a story, as a prompt does, and the story that its end cuts is not carried
    over: the next epoch cuts elsewhere. A story longer than a row is kept in pieces of a row.
    """

    def __init__(self, stories: Sequence[Story], length: int, seed: int) -> None:
        self.pieces = [s[i : i + length] for s in stories for i in range(0, len(s), length)]
        self.length = length
        self.seed = seed
        self.epoch = 0
        self.taken = 0
        self._order = self._shuffle()

    def _shuffle(self) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self.pieces))

    def seek(self, epoch: int, taken: int) -> None:
        self.epoch, self.taken = epoch, taken
        self._order = self._shuffle()

    def row(self) -> NDArray[np.int64]:
        """The next row, int64 `(length,)`."""
        row: list[Story] = []
        missing = self.length
        while missing > 0:
            if self.taken == len(self.pieces):
                self.seek(self.epoch + 1, 0)
            piece = self.pieces[self._order[self.taken]][:missing]
            self.taken += 1
            missing -= len(piece)
            row.append(piece)
        return np.concatenate(row).astype(np.int64)
