"""What a run looks like. Figures are narrow, so that they can be read on a phone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from server.loadtest.figures import Cell, Comparison, Spread, compare, crossing
from server.loadtest.measurement import Record
from server.loadtest.workload import Arm, Load

WIDTH = 6.4
# Told apart by colour-blind eyes, and by their shapes in black and white.
COLOURS = {Arm.CACHED: "#0b6e8a", Arm.UNCACHED: "#c2410c", Arm.AS_SERVED: "#0b6e8a"}
MARKERS = {Arm.CACHED: "o", Arm.UNCACHED: "s", Arm.AS_SERVED: "o"}
WAIT, PROMPT = "#d8d2c4", "#8b8478"
NAMES = {
    "context": "context (prompt tokens)",
    "tokens": "tokens generated in each answer",
    "concurrency": "conversations at the same time",
    "rate": "arrivals (conversations per second)",
    "shared": "share of the prompt that is common",
    "turns": "turns of a conversation",
}
MOST_LANES = 40
NARROWEST = 0.03  # inches between two lines that can be told apart

Measure = Callable[[Cell], Spread | None]


@dataclass(frozen=True, slots=True)
class Plot:
    name: str
    words: str  # what is to be seen, for those who do not see it, too
    png: bytes


def plots(
    cells: Sequence[Cell], sweeps: dict[str, list[Load]], records: Sequence[Record]
) -> list[Plot]:
    """All plots that the measurement has points for."""
    result = []
    for name, loads in sweeps.items():
        comparisons = compare(cells, loads)
        if len(comparisons) < 2 or not any(c.ttft for x in comparisons for c in x.arms.values()):
            continue
        if name == "context":
            result.append(context_plot(comparisons))
        else:
            result.append(sweep_plot(name, comparisons))
    shown = timeline_runs(records)
    if shown:
        result.append(timeline_plot(shown))
    return result


def context_plot(comparisons: Sequence[Comparison]) -> Plot:
    """Time per token against context: the one line that is flat and the one that rises."""
    figure, (axes,) = blank(1, 4.2)
    _lines(axes, "context", comparisons, lambda cell: cell.tpot_repeats)
    axes.set(xlabel=NAMES["context"], ylabel="ms per token")
    both = all(len(c.arms) == 2 for c in comparisons)
    words = "Time per token against the length of the prompt; the bars span the repeats."
    if both:
        words += " " + crossing_words(comparisons)
        axes.set_title(crossing_words(comparisons), fontsize=10, loc="left")
        x = crossing(comparisons)
        if x is not None:
            axes.axvline(x, color="#625d54", linestyle="--", linewidth=1)
    _legend(axes)
    return rendered("context", words + _failures(comparisons), figure)


def crossing_words(comparisons: Sequence[Comparison]) -> str:
    x = crossing(comparisons)
    if x is not None:
        return f"The lines cross at a context of {x:,.0f} tokens."
    ratios = [c.ratio for c in comparisons if c.ratio is not None]
    if not ratios:
        return "Only one of the two was measured."
    if min(ratios) > 1:
        return "The lines do not cross: the cache is faster at every length."
    if max(ratios) <= 1:
        return "The lines do not cross: the cache is never faster here."
    return "The lines do not cross once: the cache is faster at some lengths only."


def sweep_plot(name: str, comparisons: Sequence[Comparison]) -> Plot:
    """Two measures against one thing that was varied."""
    latency: tuple[str, Measure] = ("99th percentile\nof the whole answer (ms)", _p99)
    if name in ("shared", "turns"):
        latency = ("first token (ms, median)", lambda cell: cell.ttft_repeats)
    figure, (upper, lower) = blank(2, 5.4)
    _lines(upper, name, comparisons, lambda cell: cell.tokens_per_second)
    _lines(lower, name, comparisons, latency[1])
    upper.set(ylabel="tokens per second")
    lower.set(xlabel=NAMES[name], ylabel=latency[0])
    _legend(upper)
    words = f"Throughput above, latency below, against: {NAMES[name]}." + _failures(comparisons)
    return rendered(name, words, figure)


def _failures(comparisons: Sequence[Comparison]) -> str:
    """Beside every number, and so beside every picture."""
    cells = [cell for c in comparisons for cell in c.arms.values()]
    failed = sum(cell.failed for cell in cells)
    return f" {failed} of {sum(c.requests for c in cells)} requests failed." if failed else ""


def _p99(cell: Cell) -> Spread | None:
    return cell.p99_repeats


def timeline_runs(records: Sequence[Record]) -> list[Record]:
    """The last runs, one of each arm, of the load with the most conversations at once."""
    last = {(r.run.load, r.run.arm): r for r in records if any(s.times for s in r.samples)}
    if not last:
        return []
    load = max((load for load, _ in last), key=lambda load: (load.concurrency or 0, load.turns))
    return [last[load, arm] for arm in Arm if (load, arm) in last]


def timeline_plot(records: Sequence[Record]) -> Plot:
    """Each request of one run as a bar: waiting, reading the prompt, writing."""
    lanes = [min(MOST_LANES, len(r.samples)) for r in records]
    narrowest = max(s.end for r in records for s in r.samples) / WIDTH * NARROWEST
    figure, panels = blank(len(records), 1.2 + sum(0.9 + 0.11 * n for n in lanes))
    for axes, record in zip(panels, records, strict=True):
        arm = record.run.arm
        for lane, s in enumerate(sorted(record.samples, key=lambda s: s.due)[:MOST_LANES]):
            if not s.times:
                axes.plot(s.due, lane, "x", color="#a3122a")
                continue
            bars = [(s.due, s.sent - s.due), (s.sent, s.times[0] - s.sent)]
            bars.append((s.times[0], s.end - s.times[0]))
            axes.broken_barh(bars, (lane - 0.35, 0.7), facecolors=(WAIT, PROMPT, COLOURS[arm]))
            if s.times[-1] - s.times[0] > narrowest * len(s.times):
                axes.vlines(s.times, lane - 0.35, lane + 0.35, color="white", linewidth=0.5)
        axes.set_title(arm.label, loc="left", fontsize=10)
        axes.set(ylabel="request", ylim=(-0.6, None))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    panels[-1].set_xlabel("seconds since the run began")
    handles: list[Artist] = [
        Patch(color=WAIT, label="waits to be sent"),
        Patch(color=PROMPT, label="first token"),
    ]
    handles += [
        Patch(color=COLOURS[r.run.arm], label=f"writes, {r.run.arm.label}") for r in records
    ]
    if any(s.error for r in records for s in r.samples):
        handles.append(Line2D([], [], color="#a3122a", marker="x", ls="", label="failed"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    words = (
        "One run, request by request; each white line is a token that arrived, where there is room "
        "for lines."
    )
    return rendered("timeline", words, figure)


def blank(panels: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `panels` above each other that share one x axis; `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = [figure.add_subplot(panels, 1, 1)]
    axes += [figure.add_subplot(panels, 1, i + 1, sharex=axes[0]) for i in range(1, panels)]
    for each in axes:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _lines(axes: Axes, name: str, comparisons: Sequence[Comparison], measure: Measure) -> None:
    """A line for each arm, from zero, with the least and greatest of the repeats."""
    for arm in Arm:
        points = [
            (float(getattr(c.load, name)), spread)
            for c in comparisons
            if arm in c.arms and (spread := measure(c.arms[arm]))
        ]
        if not points:
            continue
        middle = [spread.median for _, spread in points]
        below = [spread.median - spread.least for _, spread in points]
        above = [spread.greatest - spread.median for _, spread in points]
        axes.errorbar(
            [x for x, _ in points],
            middle,
            (below, above),
            color=COLOURS[arm],
            marker=MARKERS[arm],
            capsize=3,
            label=arm.label,
        )
    values = [float(getattr(c.load, name)) for c in comparisons]
    if name in ("concurrency", "tokens", "rate") and max(values) > 8 * min(values) > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, labels=[f"{value:g}" for value in values], minor=False)
    axes.set_xticks([], minor=True)
    if name == "shared":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:  # no line where a measure is never defined
        axes.legend(frameon=False)


def rendered(name: str, words: str, figure: Figure) -> Plot:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return Plot(name, words, file.getvalue())
