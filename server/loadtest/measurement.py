"""Runs the trials, and stops early without losing what is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from server.loadtest.client import Client, Sample
from server.loadtest.workload import Trial


@dataclass(slots=True)
class Measurement:
    """The samples of a run, warm-up left out, and whether it ran to its end."""

    samples: list[Sample] = field(default_factory=list)
    interrupted: bool = False

    @property
    def failures(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is not None]


def measure(client: Client, trials: Iterable[Trial]) -> Measurement:
    """One trial after another. Ctrl-C ends the run, not the measurement."""
    measurement = Measurement()
    try:
        for trial in trials:
            sample = client.measure(trial)
            if trial.repeat or sample.error:
                measurement.samples.append(sample)
    except KeyboardInterrupt:
        measurement.interrupted = True
    return measurement
