"""What a token costs against what it might depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D

from server.loadtest.engine.cells import POOL, Cell, Kind
from server.loadtest.engine.figures import Figure, Figures
from server.loadtest.plots import Plot, blank, rendered

# Told apart by colour-blind eyes, and by their shapes in black and white.
STYLES = (("#0b6e8a", "o"), ("#c2410c", "s"), ("#6b4c9a", "^"), ("#4d7c0f", "D"), ("#8b8478", "v"))
Points = Sequence[tuple[float, Figure]]


def plots(found: Figures, names: Sequence[str], pools: Mapping[str, int]) -> list[Plot]:
    """Those that have two points at least. `pools` are variants by their bytes of rows."""

    def along(
        x: Callable[[Cell], int], kind: Kind, fixed: Callable[[Cell], bool]
    ) -> dict[str, Points]:
        cells = sorted((c for c in found if c.kind is kind and fixed(c)), key=x)
        return {n: [(x(c), found[c][n]) for c in cells if n in found[c]] for n in names}

    single = along(lambda c: c.prompt, Kind.DECODE, lambda c: c.streams == 1)
    without = along(lambda c: c.prompt, Kind.UNCACHED, lambda c: c.streams == 1)
    streams = along(lambda c: c.streams, Kind.DECODE, lambda c: c.prompt == Cell.read(POOL).prompt)
    both = {f"{n}, cached": p for n, p in single.items() if without.get(n)}
    both |= {f"{n}, uncached": p for n, p in without.items() if p}
    of = found.get(Cell.read(POOL), {})
    pool = sorted((size / 2**20, of[name]) for name, size in pools.items() if name in of)
    drawn = [
        _plot("engine-context", "prompt (tokens)", "ms per cached token, 1 stream", single),
        _plot(
            "engine-streams", "streams", f"ms per step, prompt {Cell.read(POOL).prompt}", streams
        ),
        _plot(
            "engine-pool",
            "pool, full of idle rows (MiB)",
            "ms per cached token, 1 stream",
            {"onerow": pool},
        ),
        _plot("engine-cache", "prompt (tokens)", "ms per token, 1 stream", both, log=True),
    ]
    return [plot for plot in drawn if plot]


def _plot(
    name: str, x: str, y: str, lines: Mapping[str, Points], *, log: bool = False
) -> Plot | None:
    lines = {label: points for label, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    figure, (axes,) = blank(1, 4.2)
    for (label, points), (colour, marker) in zip(lines.items(), STYLES * 9, strict=False):
        _line(axes, label, points, colour, marker)
    axes.set(xlabel=x, ylabel=y)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    handles = [bars for bars in axes.containers if isinstance(bars, ErrorbarContainer)]
    floor = Line2D([], [], color="#625d54", linestyle=":", label="its floor")
    axes.legend(handles=[*handles, floor], frameon=False, fontsize=9)
    words = f"{y}, against {x}; the bars span the repeats, the dotted line is the floor."
    return rendered(name, words, figure)


def _line(axes: Axes, label: str, points: Points, colour: str, marker: str) -> None:
    xs = [x for x, _ in points]
    middle = [figure.ms.median for _, figure in points]
    below = [figure.ms.median - figure.ms.least for _, figure in points]
    above = [figure.ms.greatest - figure.ms.median for _, figure in points]
    axes.errorbar(xs, middle, (below, above), color=colour, marker=marker, capsize=3, label=label)
    floors = [figure.floor.ms for _, figure in points if figure.floor]
    if len(floors) == len(xs):
        axes.plot(xs, floors, ":", color=colour)
