"""The documents keep their word: code runs, answers come out, links lead to what they name."""

from __future__ import annotations

import ast
import doctest
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A block of code and the line it starts on."""

    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page: Path) -> None:
    """In order and in one namespace: python must not fail, pycon must print what it says."""
    names: dict[str, Any] = {"__name__": page.stem}
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    for block in blocks(page):
        if block.language == "python":
            padded = "\n" * (block.line - 1) + block.code  # so that a traceback names the line
            exec(compile(padded, str(page), "exec", dont_inherit=True), names)
            continue
        assert block.language == "pycon", f"{page}:{block.line}: neither python nor pycon"
        example = parser.get_doctest(block.code, names, page.name, str(page), block.line - 1)
        assert example.examples, f"{page}:{block.line}: nothing to run"
        report: list[str] = []
        runner.run(example, out=report.append, clear_globs=False)
        names |= example.globs  # get_doctest works on a copy
        assert not report, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_what_it_names(page: Path) -> None:
    """`[`name`](file.py)` is a function, class or method there; `[`folder/file`](...)` the file."""
    links = LINK.findall(FENCE.sub("", page.read_text()))
    assert links
    for text, target in links:
        if target.startswith("https://"):
            continue
        file = (page.parent / target).resolve()
        assert file.is_file(), f"{page.name}: {target} is not there"
        name = text.strip("`")
        named = file.relative_to(ROOT).with_suffix("").as_posix() == name.removesuffix(".py")
        assert named or name in {file.stem, *definitions(file)}, f"{target} has no {name}"


@cache
def definitions(file: Path) -> frozenset[str]:
    """Functions and classes of a module, and methods as Class.method."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{member.name}"
                for member in node.body
                if isinstance(member, ast.FunctionDef)
            }
    return frozenset(found)


def test_the_mathematics_are_there() -> None:
    assert "mathematics" in {page.stem for page in PAGES}
