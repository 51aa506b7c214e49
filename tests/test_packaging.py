"""What is installed is whole, and what README, CI and image say is one and the same."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from model import kernel

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUP = "python3 -m venv .venv && .venv/bin/pip install "


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of the working tree, built from a copy so that nothing is left behind here.

    Without build isolation: the build needs nothing but setuptools, and no network. Without
    optimisation: nobody runs these kernels, and it is most of the compiler's work.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    junk = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "tests")
    shutil.copytree(ROOT, source, ignore=junk)
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('"-O2"', '"-O0"'))
    build = "import setuptools.build_meta as b; print(b.build_wheel('..'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(folder / done.stdout.splitlines()[-1]) as archive:
        yield archive


def test_the_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    """All modules and data of the three packages, what was compiled, and nothing else."""
    packages = ("model", "server", "weights")
    here = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name for name in there if not name.endswith(".so")} == here


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_the_wheel_holds_a_kernel_for_every_instruction_set(wheel: zipfile.ZipFile) -> None:
    compiled = {name.split(".")[0] for name in wheel.namelist() if name.endswith(".so")}
    names = {"_kernel"}
    if platform.machine() == "x86_64":
        names |= set(kernel.LIBRARIES)
    assert compiled == {f"model/{name}" for name in names}


def test_the_wheel_holds_the_embedded_model(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    parts = ("config.json", "model.safetensors", "tokenizer.tiktoken", "README.md")
    assert {f"weights/stories/{part}" for part in parts} <= held
    assert sum(i.file_size for i in wheel.infolist()) < 24e6


def test_the_wheel_names_licence_and_command(wheel: zipfile.ZipFile) -> None:
    [info] = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert b"onerow = server.cli:main" in wheel.read(f"{info}/entry_points.txt")
    assert wheel.read(f"{info}/licenses/LICENSE").startswith(b"MIT License")


def test_an_installed_wheel_works_from_another_folder(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Unpacked as pip does it, imported where no checkout is near, the embedded model is found."""
    wheel.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = (
        "import server.cli, weights;"
        "from model.checkpoint import resolve;"
        "print(weights.__file__); print(sorted(p.name for p in resolve('stories').iterdir()))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    file, names = done.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert "tokenizer.tiktoken" in names


def test_torch_is_no_build_requirement() -> None:
    assert not [r for r in PROJECT["build-system"]["requires"] if "torch" in r]


def test_every_dependency_has_a_reason_and_a_lower_bound() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for dependency in PROJECT["project"]["dependencies"]:
        assert ">=" in dependency
        [line] = [line for line in lines if f'"{dependency}"' in line]
        assert re.search(r"#.*\w", line), f"{dependency}: no reason beside it"


def test_two_commands_set_up_everything() -> None:
    """The README has one line that serves and one that tests; both stand alone."""
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert commands == [
        f"{SETUP}. && .venv/bin/onerow serve",
        f"{SETUP}'.[test]' && .venv/bin/python -m pytest",
    ]


def test_ci_runs_the_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    [pattern] = re.findall(r"grep -m 1 -- '(.+)' README.md", script)
    found = [line for line in README.splitlines() if re.search(pattern, line)]
    assert found[0] == f"{SETUP}'.[test]' && .venv/bin/python -m pytest"


def test_no_place_of_the_internet_is_needed() -> None:
    """Indexes and hubs are the reader's to name."""
    files = ("README.md", "pyproject.toml", "Dockerfile", "docker-compose.yml", ".ci/run")
    for name in files:
        addresses = re.findall(r"https?://([\w.-]+)", (ROOT / name).read_text())
        assert set(addresses) <= {"localhost", "127.0.0.1"}, name
