"""The dashboard, the documents and /metrics speak of the same numbers.

Queries are evaluated by promtool, Prometheus' own tool, on the series of a server that has worked.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Serve

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "monitoring"
README = (ROOT / "README.md").read_text()
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/onerow.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
IN_README = [q for block in re.findall(r"^```promql\n(.*?)^```", README, re.M | re.S)
             for q in block.strip().split("\n\n")]  # fmt: skip
QUERIES = [target["expr"] for target in TARGETS] + IN_README

VARIABLES = {"$__rate_interval": "1m", "$instance": "a:1|b:1"}
OF_PROMETHEUS = {"up"}  # a series that it makes itself
ADDED = {"instance", "job"}  # labels that it adds

SELECTOR = re.compile(r"\b((?:onerow|process)_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def concrete(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


@pytest.fixture
def families(serve: Serve) -> list[Metric]:
    """What /metrics says after some work: two turns of a session, another text, a refusal."""
    if sys.platform != "linux":
        pytest.skip("prometheus_client describes the process on Linux only")
    client = serve()
    for prompt, tokens in (("abcd", 3), ("abcdefgh", 5), ("xyz", 2)):
        body = {"prompt": prompt, "max_tokens": tokens, "session_id": "s", "ignore_eos": True}
        assert client.post("/v1/completions", json=body).is_success
    client.post("/v1/completions", json={"max_tokens": -1})
    found = list(text_string_to_metric_families(client.get("/metrics").text))
    assert {family.name for family in found} >= {"onerow_requests", "process_cpu_seconds"}
    return found


def labels(families: list[Metric]) -> dict[str, dict[str, set[str]]]:
    """The values of each label of each exposed name."""
    found: dict[str, dict[str, set[str]]] = {name: {} for name in OF_PROMETHEUS}
    for family in families:
        for sample in family.samples:
            of_name = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                of_name.setdefault(label, set()).add(value)
    return found


class TestNames:
    """B107: a query of a name that is not exposed returns nothing, and nothing looks like 0."""

    def test_every_name_and_label_is_exposed(self, families: list[Metric]) -> None:
        known = labels(families)
        for query in QUERIES:
            used = SELECTOR.findall(query)
            assert used, query
            allowed = ADDED.union(*(known[name] for name, _ in used if name in known))
            for name, matchers in used:
                assert name in known, query
                for label, _, value in MATCHER.findall(matchers):
                    if label not in ADDED:
                        assert set(value.split("|")) <= known[name].get(label, set()), query
            for group in GROUPING.findall(query):
                assert set(re.split(r"\s*,\s*", group)) <= allowed, query

    def test_every_exposed_name_is_shown(self, families: list[Metric]) -> None:
        shown = {name for query in QUERIES for name, _ in SELECTOR.findall(query)}
        for family in families:
            if family.name.startswith("onerow_"):
                names = {sample.name for sample in family.samples}
                assert names & shown or family.name == "onerow_steps", family.name

    def test_b108_no_share_is_a_gauge(self, families: list[Metric]) -> None:
        """Over which time? That is for the query to say."""
        assert not [f.name for f in families if f.name.endswith(("_rate", "_ratio", "_share"))]

    def test_quantiles_are_of_buckets(self, families: list[Metric]) -> None:
        for query in QUERIES:
            buckets = [name for name, _ in SELECTOR.findall(query) if name.endswith("_bucket")]
            assert len(buckets) == query.count("histogram_quantile(") == query.count("(le)")

    def test_counters_are_asked_for_their_rate(self, families: list[Metric]) -> None:
        kinds = {s.name: family.type for family in families for s in family.samples}
        for query in QUERIES:
            for match in SELECTOR.finditer(query):
                rated = query[: match.start()].endswith(("rate(", "increase("))
                assert rated == (kinds.get(match[1], "gauge") != "gauge"), query

    def test_the_variable_and_the_legends(self, families: list[Metric]) -> None:
        known = labels(families)
        source, instance = DASHBOARD["templating"]["list"]
        assert (source["name"], instance["name"]) == ("source", "instance")
        query = re.fullmatch(r"label_values\((\w+), (\w+)\)", instance["query"]["query"])
        assert query is not None
        assert query[1] in known
        assert query[2] == "instance"
        for target in TARGETS:
            assert target["expr"].count('{instance=~"$instance"') == len(
                SELECTOR.findall(target["expr"])
            ), target["expr"]
            for label in re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")):
                grouped = {g for group in GROUPING.findall(target["expr"]) for g in group.split()}
                assert label in (grouped or ADDED)


def promtool(*arguments: str | Path) -> None:
    if not shutil.which("promtool"):
        pytest.skip("there is no promtool; it is in Debian's package prometheus")
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def series(families: list[Metric]) -> Iterator[dict[str, str]]:
    """Ten minutes of two servers: counters grow by what they counted, each minute."""
    for instance in ("a:1", "b:1"):
        yield {"series": f'up{{instance="{instance}"}}', "values": "1+0x10"}
        for family in families:
            for sample in family.samples:
                pairs = {**sample.labels, "instance": instance}
                inside = ",".join(f"{name}={json.dumps(value)}" for name, value in pairs.items())
                gauge = family.type == "gauge"
                start, step = (sample.value, 0) if gauge else (0, sample.value)
                values = f"{start:.9f}+{step:.9f}x10"
                yield {"series": f"{sample.name}{{{inside}}}", "values": values}


class TestPromtool:
    def evaluate(self, folder: Path, families: list[Metric], expected: dict[str, float]) -> None:
        """Prometheus' own engine finds these values."""
        cases = [
            {"expr": query, "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": value}]}
            for query, value in expected.items()
        ]
        test = {
            "interval": "1m",
            "input_series": list(series(families)),
            "promql_expr_test": cases,
        }
        file = folder / "test.yml"
        file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
        promtool("test", "rules", file)

    def test_every_query_answers(self, tmp_path: Path, families: list[Metric]) -> None:
        """With a number, of which NaN is none."""
        rows = {f"count(({concrete(query)}) >= 0) > bool 0": 1.0 for query in QUERIES}
        self.evaluate(tmp_path, families, rows)

    def test_b107_b108_the_hit_share(self, tmp_path: Path, families: list[Metric]) -> None:
        """Of two counters, in any time one likes; it is that of the answers' usage."""
        [panel] = [panel for panel in PANELS if panel["title"] == "Prefix hits"]
        [target] = panel["targets"]
        # Of "abcd", "abcdefgh" and "xyz" the second found the first one's rows.
        share = {f"round(15 * {concrete(target['expr'])}, 0.001)": 4.0}
        self.evaluate(tmp_path, families, share)

    def test_the_scrape_file(self, tmp_path: Path) -> None:
        shutil.copy(FOLDER / "prometheus.yml", tmp_path)
        (tmp_path / "onerow.key").touch()
        promtool("check", "config", tmp_path / "prometheus.yml")

    def test_the_exposition(self, serve: Serve) -> None:
        """Its linter has nothing to say about names, units and descriptions."""
        if not shutil.which("promtool"):
            pytest.skip("there is no promtool; it is in Debian's package prometheus")
        text = serve().get("/metrics").text
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


class TestDashboard:
    def test_ids_last(self) -> None:
        assert DASHBOARD["uid"] == "onerow"
        ids = [panel["id"] for panel in DASHBOARD["panels"]]
        assert ids == list(range(1, len(ids) + 1))
        for panel in PANELS:
            refs = [target["refId"] for target in panel["targets"]]
            assert refs == list("ABCDEF"[: len(refs)])

    def test_every_panel_explains_itself(self) -> None:
        for panel in PANELS:
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
            if panel["type"] == "stat":
                assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None

    def test_the_grid_has_no_holes(self) -> None:
        lines: dict[int, list[dict[str, int]]] = {}
        for panel in DASHBOARD["panels"]:
            lines.setdefault(panel["gridPos"]["y"], []).append(panel["gridPos"])
        y = 0
        for top, line in sorted(lines.items()):
            assert top == y
            assert len({place["h"] for place in line}) == 1
            assert line[0]["x"] == 0
            assert all(a["x"] + a["w"] == b["x"] for a, b in pairwise(line))
            assert line[-1]["x"] + line[-1]["w"] == 24
            y += line[0]["h"]

    def test_its_files_are_found(self) -> None:
        provider = yaml.safe_load((FOLDER / "grafana/dashboards/provider.yml").read_text())
        assert provider["apiVersion"] == 1
        source: dict[str, Any] = yaml.safe_load(
            (FOLDER / "grafana/datasources/prometheus.yml").read_text()
        )
        assert source["apiVersion"] == 1
        assert [s["type"] for s in source["datasources"]] == ["prometheus"]


def test_the_table_of_the_readme(families: list[Metric]) -> None:
    """Each metric with its labels, its type and the words of /metrics; and no other."""
    rows = []
    for family in families:
        if family.name.startswith("onerow_"):
            name = family.name + "_total" * (family.type == "counter")
            own = dict.fromkeys(k for s in family.samples for k in s.labels if k != "le")
            tail = f"{{{', '.join(own)}}}" if own else ""
            rows.append(f"| `{name}{tail}` | {family.type} | {family.documentation} |")
    assert re.findall(r"^\| `onerow_\w+.*$", README, re.M) == rows
