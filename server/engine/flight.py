"""A step in flight: begun, its tokens not known yet. Where a model can, the next one follows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from model.step import Draw, Launched, Model, RunsAhead, Work
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence

Launch = Callable[[list[Work]], Launched]


def launches(model: Model) -> Launch:
    """How a model's steps are launched. One that cannot run ahead computes what is read."""
    if isinstance(model, RunsAhead):
        return model.launch
    return lambda work: Launched(partial(model.run, work))


class Flight:
    """A step that has been launched: each sequence and its work.

    A sequence may end, fail or be aborted while its step is in flight. The draw is then dropped;
    its rows are free at once, though the step may be about to write one of them: whoever takes that
    row writes it in a later step, and steps are computed in the order in which they were launched.
    """

    def __init__(self, launch: Launch, sequences: list[Sequence], work: list[Work]) -> None:
        self.sequences, self.work = sequences, work
        self._launch, self._launched = launch, launch(work)

    def read(self) -> list[Draw]:
        """Wait for the step: one Draw each, in order. Raises what the model raises."""
        return self._launched.read()

    def follow(self, scheduler: Scheduler) -> Flight | None:
        """Launch the step behind this one, which nobody has read; None if that one must wait. It
        computes the tokens that this one draws, for all that do not end with them for certain.
        """
        if not self._launched.leads:
            return None
        lanes = scheduler.follow(self.sequences)
        if not lanes:
            return None
        sequences = [self.sequences[i] for i in lanes]
        work = [
            Work(q.head(q.taken), q.taken - 1, q.rows, q.n_prompt, self.work[i].sampling)
            for i, q in zip(lanes, sequences, strict=True)
        ]
        return Flight(self._launch, sequences, work)
