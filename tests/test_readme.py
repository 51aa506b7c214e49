"""What the README tells its reader to type works, on the embedded model."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ByteSize

from server.loadtest.host import own_server
from server.settings import Settings

README = (Path(__file__).parent.parent / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
SHELL = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
CURL = [block for block in SHELL if block.startswith("curl")]
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with own_server(["--device=cpu"]) as url:
        yield url


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
@pytest.mark.parametrize("block", CURL)
def test_curl(block: str, address: str) -> None:
    assert ADDRESS in block
    command = block.replace(ADDRESS, address).replace("curl ", "curl --fail --silent ")
    done = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
    assert '"rows"' in done.stdout or '"text"' in done.stdout
    assert ("data: [DONE]" in done.stdout) == ('"stream": true' in block)


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON)
def test_python(block: str, address: str) -> None:
    assert ADDRESS in block
    code = block.replace(ADDRESS, address)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    counts = re.findall(r"(\d+) prompt tokens, (\d+) cached", done.stdout)
    if "session_id" in block:
        assert len(counts) == 3
        assert int(counts[0][1]) < int(counts[1][1]) < int(counts[2][1])
    else:
        assert len(done.stdout) > 20


def test_there_are_blocks() -> None:
    assert len(CURL) == 5
    assert len(PYTHON) == 2


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_in_the_table(name: str) -> None:
    field = Settings.model_fields[name]
    default = field.get_default(call_default_factory=True)
    shown = {None: "", False: "off", True: "on"}.get(default, str(default))
    if isinstance(default, ByteSize):
        shown = default.human_readable().replace(".0", "")
    if name == "threads":
        shown = "CPUs"
    assert f"| `--{name.replace('_', '-')}` | {shown} | {field.description} |" in README
