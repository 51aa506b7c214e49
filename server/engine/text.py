"""From tokens to text: whole characters only, and stop strings that never leak."""

from __future__ import annotations

from collections.abc import Sequence

from model.tokenizer import utf8_decoder


class TextStream:
    """The text of one choice, as it may be shown.

    Bytes wait until their character is complete. Text that may be the head of a stop string waits
    until it has become one or cannot any more. Offsets are characters of the choice's text.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stop = tuple(stop)
        self.stopped = False
        self.cut = 0  # where the text ended, if a stop string ended it
        self._decoder = utf8_decoder()
        self._held = ""  # decoded, but not shown yet
        self._shown = 0
        # Where there are stop strings, to encode anew what one of them cuts:
        self._ends: list[int | None] = []  # text after each token; None: inside a character
        self._decoded = ""  # all generated text

    @property
    def offset(self) -> int:
        """Where the text of the next token begins."""
        return self.cut if self.stopped else self._shown + len(self._held)

    def echo(self, piece: bytes) -> str:
        """Show prompt bytes: they come before the answer and stop nothing."""
        text = self._decoder.decode(piece)
        self._shown += len(text)
        return text

    def push(self, piece: bytes) -> str:
        """Add the bytes of a generated token; returns the text that may be shown now."""
        text = self._decoder.decode(piece)
        if not self.stop:
            self._shown += len(text)
            return text
        shown = self._add(text)
        inside = bool(self._decoder.getstate()[0])
        self._ends.append(None if inside else self._start + len(self._decoded))
        return shown

    def finish(self) -> str:
        """The answer is over: what was held back is text after all (half a character: U+FFFD)."""
        if self.stopped:
            return ""
        text = self._add(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        return text + self._show(len(self._held))

    def kept(self) -> tuple[int, str]:
        """After a stop string: how many tokens lie wholly before it, and the text behind them."""
        for n in range(len(self._ends), 0, -1):
            end = self._ends[n - 1]
            if end is not None and end <= self.cut:
                return n, self._decoded[end - self._start : self.cut - self._start]
        return 0, self._decoded[: self.cut - self._start]

    @property
    def _start(self) -> int:
        """Offset of the first generated character."""
        return self._shown + len(self._held) - len(self._decoded)

    def _add(self, text: str) -> str:
        self._held += text
        self._decoded += text
        found = [at for stop in self.stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self.cut = self._shown + min(found)
            return self._held[: min(found)]
        return self._show(len(self._held) - self._head_of_stop())

    def _show(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        self._shown += n
        return text

    def _head_of_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self.stop:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest
