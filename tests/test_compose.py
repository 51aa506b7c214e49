"""The image and the compose file, read as their tools read them. Nothing here needs an engine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import Settings

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def compose_command() -> list[str]:
    """`docker compose`, or its predecessor; skips where there is neither."""
    if shutil.which("docker"):
        plugin = ["docker", "compose"]
        asked = subprocess.run([*plugin, "version"], capture_output=True, check=False)
        if asked.returncode == 0:
            return plugin
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor `docker-compose` is installed")


def services(*profiles: str) -> dict[str, Any]:
    """The services of the compose file as compose itself resolves them."""
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    done = subprocess.run(
        [*compose_command(), "-f", str(ROOT / "docker-compose.yml"), *chosen, "config"],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return found


def seconds(duration: str) -> int:
    """Compose's `1m30s`, `60s` or `2m0s`."""
    parts = re.findall(r"(\d+)([hms])", duration)
    assert parts, duration
    return sum(int(n) * {"h": 3600, "m": 60, "s": 1}[unit] for n, unit in parts)


def test_profiles() -> None:
    gpu = services("gpu")
    assert set(gpu) == {"onerow", "onerow-gpu"}
    assert gpu["onerow-gpu"]["profiles"] == ["gpu"]
    assert "profiles" not in gpu["onerow"]
    assert gpu["onerow"]["environment"]["ONEROW_DEVICE"] == "cpu"
    assert gpu["onerow-gpu"]["environment"]["ONEROW_DEVICE"] == "cuda"


def test_only_the_gpu_profile_reserves_a_device() -> None:
    gpu = services("gpu")
    [device] = gpu["onerow-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert "deploy" not in gpu["onerow"]


@pytest.mark.parametrize("name", ["onerow", "onerow-gpu"])
def test_a_service_is_confined(name: str) -> None:
    """Loopback, another user than root, nothing writable but /tmp, weights read-only."""
    service = services("gpu")[name]
    assert "127.0.0.1" in json.dumps(service["ports"])
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    [volume] = service["volumes"]
    assert "/models" in json.dumps(volume)
    assert volume.endswith(":ro") if isinstance(volume, str) else volume["read_only"]


@pytest.mark.parametrize("name", ["onerow", "onerow-gpu"])
def test_a_service_is_given_time(name: str) -> None:
    """To load before it counts as unwell, and to finish what it serves before it is killed."""
    service = services("gpu")[name]
    assert "/ready" in service["healthcheck"]["test"][-1]
    assert seconds(service["healthcheck"]["start_period"]) >= 60
    assert seconds(service["stop_grace_period"]) > Settings().grace + 10


def test_settings_in_the_environment_exist() -> None:
    """A misspelt ONEROW_ variable would be ignored without a word."""
    known = {f"ONEROW_{name.upper()}" for name in Settings.model_fields}
    named = {key for service in services("gpu").values() for key in service["environment"]}
    named |= set(re.findall(r"\bONEROW_\w+", DOCKERFILE))
    assert named <= known


class TestDockerfile:
    def test_runs_the_install_line_of_the_readme(self) -> None:
        readme = (ROOT / "README.md").read_text()
        [install] = re.findall(r"^(python3 -m venv .*pip install) \. && ", readme, re.MULTILINE)
        [run] = re.findall(r"^RUN (python3 -m venv .*)$", DOCKERFILE, re.MULTILINE)
        assert run.replace(" --no-cache-dir", "") == f"{install} ."

    def test_its_index_is_an_argument_without_a_default(self) -> None:
        arguments = re.findall(r"^ARG (.*)$", DOCKERFILE, re.MULTILINE)
        assert arguments == ["PIP_EXTRA_INDEX_URL"]
        assert "://" not in DOCKERFILE.replace("http://127.0.0.1", "")

    def test_the_server_is_not_root(self) -> None:
        users = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
        assert users == ["10001:10001"]

    def test_its_health_is_readiness(self) -> None:
        [check] = re.findall(r"^HEALTHCHECK (.*)$", DOCKERFILE, re.MULTILINE)
        options, command = check.split("CMD ")
        assert "--start-period=" in options
        python, flag, code = json.loads(command)
        assert (python, flag) == ("python", "-c")
        assert "/ready" in code
        compile(code, "HEALTHCHECK", "exec")

    def test_it_starts_the_server(self) -> None:
        [entry] = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
        [command] = re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
        assert json.loads(entry) + json.loads(command) == ["onerow", "serve"]

    def test_the_builder_gets_what_the_build_reads(self) -> None:
        """Sources, weights, and the files that pyproject.toml names; nothing else."""
        lines = (ROOT / ".dockerignore").read_text().splitlines()
        kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
        assert "*" in lines
        assert kept == {"pyproject.toml", "README.md", "LICENSE", "model", "server", "weights"}
        assert shlex.split(re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)[0]) == [".", "."]
