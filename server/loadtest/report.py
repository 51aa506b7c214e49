"""The numbers for people: tables in the terminal, and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from server.loadtest.figures import (
    MISSING,
    Cell,
    Comparison,
    Distribution,
    Spread,
    compare,
    digits,
    shown,
)
from server.loadtest.plots import Plot
from server.loadtest.workload import Arm


def context_rows(comparisons: Iterable[Comparison], arms: Sequence[Arm]) -> list[list[str]]:
    """Header and rows: what a token costs at each length."""
    names = ["context", *(arm.label for arm in arms), "ratio"]
    rows = [[*names, *(f"{arm.label} TTFT" for arm in arms), "failed"]]
    for c in comparisons:
        per_token, ttft = [c.per_token(arm) for arm in arms], [c.ttft(arm) for arm in arms]
        first = [t and t.median for t in ttft]
        failed = sum(cell.failed for cell in c.arms.values())
        rows.append([shown(v) for v in (c.load.context, *per_token, c.ratio, *first, failed)])
    return rows


def middle(spread: Spread | None) -> float | None:
    return spread.median if spread else None


def load_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """Header and rows: what each load came to."""
    rows = [["load", "arm", "TTFT p50 / p99", "ms per token", "end to end p50 / p99"]]
    limited = any(c.goodput for c in cells)
    rows[0] += ["tokens/s", "requests/s", *(["goodput/s"] if limited else [])]
    rows[0] += ["hit tokens", "failed"]

    def ends(d: Distribution | None) -> str:
        return f"{digits(d.p50)} / {digits(d.p99)}" if d else MISSING

    for c in cells:
        times = [ends(c.ttft), shown(c.tpot_repeats), ends(c.e2e), shown(c.tokens_per_second)]
        rates = [shown(middle(c.requests_per_second))]
        rates += [shown(middle(c.goodput))] if limited else []
        hits = f"{c.cached_tokens:,} of {c.prompt_tokens:,}"
        rows.append(
            [c.load.label, c.arm.label, *times, *rates, hits, f"{c.failed} of {c.requests}"]
        )
    return rows


def arm_rows(arms: dict[str, dict[str, int]]) -> list[list[str]]:
    """Header and rows: that both arms did the same work."""
    rows = [["arm", "requests", "failed", "prompt tokens", "hit tokens", "tokens generated"]]
    return rows + [[Arm(name).label, *map(shown, totals.values())] for name, totals in arms.items()]


def detail_rows(cells: Iterable[Cell]) -> list[list[str]]:
    """Header and rows: every distribution."""
    rows = [["load", "arm", "measure (ms)", "mean", "p50", "p90", "p99", "failed"]]
    for c in cells:
        measures = {
            "time to first token": c.ttft,
            "between tokens": c.itl,
            "per token": c.tpot,
            "end to end": c.e2e,
            "end to end, as sent": c.service,
            "client late": c.lateness,
            "client's clock late": c.lag,
        }
        for name, d in measures.items():
            numbers = (d.mean, d.p50, d.p90, d.p99) if d else (None,) * 4
            rows.append([c.load.label, c.arm.label, name, *map(shown, numbers), shown(c.failed)])
    return rows


def side_rows(cells: Iterable[Cell]) -> list[list[str]]:
    """Header and rows: the client's clock beside the server's, and what the client itself cost."""
    rows = [["load", "arm", "TTFT, client", "queue + prefill, server", "decode, server"]]
    rows[0] += ["rows computed", "client CPU", "CPU ms per event", "failed"]
    for c in cells:
        server = c.server
        before = server.get("queue_ms"), server.get("prefill_ms")
        first = None if before[0] is None or before[1] is None else before[0] + before[1]
        told = (first, server.get("decode_ms"), server.get("rows_computed"))
        cpu = MISSING if c.cpu_share is None else f"{c.cpu_share:.0%}"
        numbers = [shown(c.ttft and c.ttft.p50), *map(shown, told), cpu]
        numbers += [shown(c.ms_per_event), shown(c.failed)]
        rows.append([c.load.label, c.arm.label, *numbers])
    return rows


def table(rows: Sequence[Sequence[str]], title: str, caption: str | None = None) -> Table:
    result = Table(
        title=title, caption=caption, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    for i, name in enumerate(rows[0]):
        for unit in (" TTFT", " tokens/s"):  # on a line of its own: no number should be cut
            name = name.replace(unit, f"\n{unit.strip()}")
        result.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows[1:]:
        result.add_row(*row)
    return result


def tables(
    comparisons: Sequence[Comparison], cells: Sequence[Cell], summary: dict[str, Any]
) -> Group:
    """What the terminal shows."""
    model = summary["conditions"]["model"]
    spread = "milliseconds: median (least-greatest) of the repeats"
    arms = [Arm(name) for name in summary["arms"]]
    parts = []
    if comparisons:
        parts.append(table(context_rows(comparisons, arms), f"{model}: ms per token", spread))
    shown_above = {c.load for c in comparisons}
    others = list(dict.fromkeys(c.load for c in cells if c.load not in shown_above))
    if others:
        rows, common = other_rows(compare(cells, others), arms)
        parts.append(table(rows, f"{model}: {common}", "medians; TTFT in milliseconds"))
    parts.append(table(arm_rows(summary["arms"]), "the arms' work"))
    return Group(*parts)


def other_rows(
    comparisons: Sequence[Comparison], arms: Sequence[Arm]
) -> tuple[list[list[str]], str]:
    """Header and rows for a terminal, and what all of them have in common."""
    every = [c.load.words for c in comparisons]
    common = [word for word in every[0] if all(word in words for words in every)]
    if len(every) == 1:
        common = common[:1]  # the context: the rest tells it from the loads of other tables
    rows = [["load", *(f"{arm.label} TTFT" for arm in arms)]]
    rows[0] += [*(f"{arm.label} tokens/s" for arm in arms), "failed"]
    for c, words in zip(comparisons, every, strict=True):
        own = ", ".join(word for word in words if word not in common) or "one at a time"
        mine = [c.arms.get(arm) for arm in arms]
        first = [cell and cell.ttft and cell.ttft.p50 for cell in mine]
        speed = [cell and middle(cell.tokens_per_second) for cell in mine]
        failed = sum(cell.failed for cell in mine if cell)
        rows.append([own, *map(shown, first), *map(shown, speed), shown(failed)])
    return rows, ", ".join(common)


_safe = html.escape
WORDS = ("load", "arm", "context", "measure (ms)", "what")  # columns that begin at the left

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  color: #1f1d1a; background: #faf8f4; margin: 0 auto; padding: 1rem; max-width: 60rem; }
h1 { font-size: 1.6rem; margin: .5rem 0 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; max-width: 42rem; } .muted { color: #625d54; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; border-bottom: 1px solid #ddd8cc;
  white-space: nowrap; }
th { color: #625d54; font-weight: 600; } .word { text-align: left; }
.scroll th:first-child, .scroll td:first-child { position: sticky; left: 0; background: #faf8f4; }
.finding { font-size: 1.15rem; }
.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.words th { text-align: left; vertical-align: top; }
figcaption { color: #625d54; font-size: .9rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
.plots figure { flex: 1 1 22rem; max-width: 40rem; margin: 0; }
img { width: 100%; height: auto; background: white; border: 1px solid #ddd8cc; border-radius: 6px;
  box-sizing: border-box; }
.warning { border-left: 4px solid #a3122a; padding-left: .75rem; }
summary { cursor: pointer; }
@media print { body { background: white; padding: 0; max-width: none; font-size: 11px; }
  figure, tr { break-inside: avoid; } .scroll { overflow: visible; } h2 { break-after: avoid; }
  table { font-size: 8px; } th, td { white-space: normal; } figcaption { font-size: 9px; }
  .scroll th:first-child, .scroll td:first-child { position: static; background: none; }
  .finding { font-size: 12px; } .plots figure { flex-basis: 40%; } }
"""


def html_report(
    comparisons: Sequence[Comparison],
    cells: Sequence[Cell],
    pictures: Sequence[Plot],
    summary: dict[str, Any],
) -> str:
    """One page without scripts and without anything from elsewhere."""
    conditions = summary["conditions"]
    arms = [Arm(name) for name in summary["arms"]]
    title = f"{conditions['model']}: a load test"
    parts = [f"<h1>{_safe(title)}</h1>", f'<p class="muted">{_safe(_when(conditions))}</p>']
    parts += [f'<p class="finding">{_safe(words)}</p>' for words in summary["findings"]]
    parts += [f'<p class="warning">{_safe(words)}</p>' for words in summary["warnings"]]
    if comparisons:
        words = "Milliseconds: the median of the repeats' medians (least-greatest)."
        parts += ["<h2>What a token costs</h2>", _html(context_rows(comparisons, arms), words)]
    parts += ["<h2>Pictures</h2>", '<div class="plots">', *map(_picture, pictures), "</div>"]
    words = (
        "Milliseconds over all requests. A latency begins when the request was due. Hit tokens are "
        "prompt tokens whose rows were there already; with fresh prompts there are next to none, "
        "but for shared beginnings and further turns."
    )
    parts += ["<h2>All loads</h2>", _html(load_rows(cells), words)]
    words = "Equal work, asked for with ignore_eos and counted by the server."
    parts += ["<h2>The arms' work</h2>", _html(arm_rows(summary["arms"]), words)]
    words = "Medians, in milliseconds. What the server does not tell is missing."
    parts += ["<h2>Client and server</h2>", _html(side_rows(cells), words)]
    errors = [
        [c.load.label, c.arm.label, str(n), words] for c in cells for words, n in c.errors.items()
    ]
    if errors:
        parts += ["<h2>Errors</h2>", _html([["load", "arm", "times", "what"], *errors])]
    details = _html(detail_rows(cells))
    parts.append(f"<h2>Every distribution</h2><details><summary>Show</summary>{details}</details>")
    facts = [[name.replace("_", " "), shown(value)] for name, value in conditions.items()]
    parts += ["<h2>Conditions</h2>", _facts(facts)]
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_safe(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _when(conditions: dict[str, Any]) -> str:
    return f"{conditions['date']}, onerow {conditions['onerow']}, {conditions['machine']}"


def _picture(plot: Plot) -> str:
    data = base64.b64encode(plot.png).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{_safe(plot.words)}">'
        f"<figcaption>{_safe(plot.words)}</figcaption></figure>"
    )


def _html(rows: Sequence[Sequence[str]], words: str = "") -> str:
    kinds = [' class="word"' if name in WORDS else "" for name in rows[0]]

    def cells(tag: str, row: Sequence[str]) -> str:
        pairs = zip(kinds, row, strict=True)
        return "".join(f"<{tag}{kind}>{_safe(cell)}</{tag}>" for kind, cell in pairs)

    head = cells("th", rows[0])
    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows[1:])
    note = f'<p class="muted">{_safe(words)}</p>' if words else ""
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'{note}<div class="scroll" tabindex="0">{table}</div>'


def _facts(facts: Iterable[Sequence[str]]) -> str:
    rows = (
        f'<tr><th scope="row">{_safe(name)}</th><td>{_safe(value)}</td></tr>'
        for name, value in facts
    )
    return f'<table class="words">{"".join(rows)}</table>'
