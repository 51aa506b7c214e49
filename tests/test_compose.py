"""The image and the compose file, read as their tools read them. Nothing here needs an engine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from functools import cache
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


@cache
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
    # The predecessor shows all services, whatever profiles are chosen.
    return {
        name: service
        for name, service in found.items()
        if not service.get("profiles") or set(profiles) & set(service["profiles"])
    }


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
    assert service["tmpfs"] == ["/tmp:exec" if name == "onerow-gpu" else "/tmp"]
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


def test_no_service_is_there_twice() -> None:
    """`docker compose` would refuse the file; its predecessor and PyYAML take the last one."""
    text = (ROOT / "docker-compose.yml").read_text()
    block = text.partition("\nservices:\n")[2].partition("\nvolumes:\n")[0]
    names = re.findall(r"^  ([\w-]+):$", block, re.MULTILINE)
    assert sorted(names) == sorted(services("gpu", "monitoring"))


class TestMonitoring:
    def test_it_comes_on_request_and_with_the_server(self) -> None:
        found = services("monitoring")
        assert set(found) == {"onerow", "prometheus", "grafana"}
        for name in ("prometheus", "grafana"):
            assert found[name]["profiles"] == ["monitoring"]

    @pytest.mark.parametrize("name", ["prometheus", "grafana"])
    def test_a_service_is_confined(self, name: str) -> None:
        """A version that stays, loopback, no root, nothing of ours writable."""
        service = services("monitoring")[name]
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
        assert "127.0.0.1" in json.dumps(service["ports"])
        assert service["user"] in ("65534:65534", "472:0"), "the user of the image"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["healthcheck"]["test"][0] == "CMD"
        for target, (source, readonly) in mounts(service).items():
            assert readonly or source == "prometheus"
            assert source in ("prometheus", "/dev/null") or Path(source).exists(), target

    def test_prometheus_finds_its_files_and_either_server(self) -> None:
        service = services("monitoring")["prometheus"]
        config = yaml.safe_load((ROOT / "docs/monitoring/prometheus.yml").read_text())
        [job] = config["scrape_configs"]
        key = Path("/etc/prometheus") / job["authorization"]["credentials_file"]
        assert {"/etc/prometheus/prometheus.yml", str(key), "/prometheus"} == set(mounts(service))
        assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]
        assert "--storage.tsdb.path=/prometheus" in service["command"]
        [[target]] = [entry["targets"] for entry in job["static_configs"]]
        assert target == "onerow:8000"
        for server in services("gpu").values():
            assert server["networks"]["default"]["aliases"] == ["onerow"]

    def test_grafana_finds_its_files_and_prometheus(self) -> None:
        service = services("monitoring")["grafana"]
        folders = set(mounts(service))
        [provider] = read("provider.yml")["providers"]
        assert provider["options"]["path"] in folders
        assert "/etc/grafana/provisioning/datasources" in folders
        [source] = read("prometheus.yml")["datasources"]
        assert source["url"] == "http://prometheus:9090"
        config = yaml.safe_load((ROOT / "docs/monitoring/prometheus.yml").read_text())
        assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]

    def test_nobody_logs_in_to_grafana(self) -> None:
        environment = services("monitoring")["grafana"]["environment"]
        assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
        assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
        assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
        assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
        assert not [name for name in environment if "PASSWORD" in name]


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Source of each mount and whether it is read-only, as both forms of compose put it."""
    found = {}
    for volume in service["volumes"]:
        if isinstance(volume, str):
            source, target, mode = volume.split(":")
            found[target] = source, mode == "ro"
        else:
            found[volume["target"]] = volume["source"], volume.get("read_only", False)
    return found


def read(name: str) -> dict[str, Any]:
    [file] = (ROOT / "docs/monitoring/grafana").glob(f"*/{name}")
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    return content


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
        assert arguments == ["BASE=python:3.13-slim", "PIP_EXTRA_INDEX_URL"]
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
