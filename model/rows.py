"""The pool of rows: which are free, who holds the others. Bookkeeping only; it holds no tensor.

A row is what one token position leaves behind, its key and value in every layer. Rows are taken
free, written once, and from then on only read, so that any number of sequences may hold the same
row: there is nothing to copy and nothing to hash.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model.step import Ids


class OutOfRows(Exception):
    """More rows were asked for than are free."""


class RowPool:
    """`n_rows` rows of `row_bytes` bytes, counted by reference.

    A sequence that runs also pins its rows: `running` counts rows with a pin, `idle` those that are
    only referenced. Row number `scratch` is one past the last: padded lanes write to it and nobody
    reads it.
    """

    def __init__(self, n_rows: int, row_bytes: int) -> None:
        self.n_rows = n_rows
        self.row_bytes = row_bytes
        self.references = np.zeros(n_rows, np.int32)
        self.pins = np.zeros(n_rows, np.int32)
        self.running = 0
        self.shared = 0
        self.sharing_changes = 0  # counts up whenever `shared` may have changed
        # A stack, lowest row on top: rows that are taken together lie together.
        self._free = np.arange(n_rows - 1, -1, -1, dtype=np.int32)
        self.free = n_rows

    @property
    def scratch(self) -> int:
        return self.n_rows

    @property
    def idle(self) -> int:
        return self.n_rows - self.free - self.running

    def take(self, n: int) -> Ids:
        """`n` free rows, referenced once and pinned. Raises OutOfRows and takes none."""
        if n > self.free:
            raise OutOfRows(f"{n} rows asked for, {self.free} free")
        taken = self._free[self.free - n : self.free][::-1].copy()
        self.free -= n
        self.references[taken] = 1
        self.pins[taken] = 1
        self.running += n
        return taken

    def share(self, rows: Ids) -> None:
        """One more reference to each of `rows`, which are not free."""
        self.references[rows] += 1
        self.shared += int(np.count_nonzero(self.references[rows] == 2))
        self.sharing_changes += 1

    def give_back(self, rows: Ids) -> int:
        """One reference less for each of `rows`, which are not pinned by the caller any more.

        Returns how many of them are free now.
        """
        left = self.references[rows] - 1
        self.references[rows] = left
        if unshared := int(np.count_nonzero(left == 1)):
            self.shared -= unshared
            self.sharing_changes += 1
        freed = rows[left == 0]
        self._free[self.free : self.free + len(freed)] = freed[::-1]
        self.free += len(freed)
        return len(freed)

    def pin(self, rows: Ids) -> None:
        """A running sequence holds `rows` from now on."""
        self.pins[rows] += 1
        self.running += int(np.count_nonzero(self.pins[rows] == 1))

    def unpin(self, rows: Ids) -> None:
        self.pins[rows] -= 1
        self.running -= int(np.count_nonzero(self.pins[rows] == 0))

    def shared_among(self, rows: Ids) -> int:
        """How many of `rows` another sequence holds, too."""
        return int(np.count_nonzero(self.references[rows] > 1))

    def free_rows(self) -> NDArray[np.int32]:
        """The numbers of all free rows, for tests that poison them."""
        return self._free[: self.free].copy()
