"""Settings: defaults, then the environment, then flags; errors in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.settings import Settings, SettingsError, _cpu_quota, cpus, unknown_variables


def test_environment_beats_defaults_and_flags_beat_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load().port == 8000
    monkeypatch.setenv("ONEROW_PORT", "8001")
    assert Settings.load().port == 8001
    assert Settings.load(port=None).port == 8001
    assert Settings.load(port=8002).port == 8002
    assert Settings.load(port="8002").port == 8002


def test_sizes_are_text_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEROW_KV_CACHE_MEMORY", "2GiB")
    assert Settings.load().kv_cache_memory == 2 * 2**30
    assert Settings.load(max_body=100).max_body == 100


def test_an_empty_variable_is_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files pass variables on that nobody has set."""
    monkeypatch.setenv("ONEROW_API_KEY", "")
    assert Settings.load().api_key is None


def test_a_variable_that_is_no_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEROW_MAX_QUEU", "1")
    monkeypatch.setenv("ONEROW_MAX_QUEUE", "1")
    assert unknown_variables() == ["ONEROW_MAX_QUEU"]


def test_a_key_is_not_printed() -> None:
    assert "secret" not in repr(Settings.load(api_key="secret"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("port", "tcp://10.0.0.1:8000", "integer"),  # what Kubernetes sets for a service "onerow"
        ("port", 65536, "65535"),
        ("device", "tpu", "'auto', 'cpu' or 'cuda'"),
        ("dtype", "int4", "'auto', 'float32', 'bfloat16' or 'int8'"),
        ("kv_cache_memory", "much", "could not parse"),
        ("kv_cache_memory", 0, "greater than 0"),
        ("max_running", 0, "1"),
        ("max_queue", -1, "0"),
        ("max_prompts", 0, "1"),
        ("max_sessions", 0, "1"),
        ("threads", 0, "1"),
        ("max_body", "-1MiB", "could not parse"),
        ("step_tokens", 127, "127 is below twice max_running (64)"),
        ("request_timeout", 0, "greater than 0"),
        ("request_timeout", "nan", "finite"),
        ("body_timeout", 0, "greater than 0"),
        ("grace", -1, "0"),
        ("keepalive_comment", "inf", "finite"),
        ("api_key", "", "1"),
        ("log_level", "loud", "'debug'"),
        ("served_model_name", "", "1"),
        ("lenient_model", "perhaps", "boolean"),
        ("flavour", "x", "not permitted"),
    ],
)
def test_errors_name_the_field_and_the_limit_in_one_line(
    name: str, value: object, words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load(**{name: value})
    assert str(caught.value).startswith(f"{name}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_b137_threads_follow_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for quota, expected in (
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", 64),
    ):
        (tmp_path / "cpu.max").write_text(quota + "\n")
        monkeypatch.setattr("server.settings._cpu_quota", lambda: _cpu_quota(tmp_path))
        assert cpus() == expected
        assert Settings.load().threads == expected


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("0", cpus()), ("", cpus())])
def test_b137_threads_are_what_omp_num_threads_says(
    monkeypatch: pytest.MonkeyPatch, said: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert Settings.load().threads == threads


def test_b137_control_groups_of_version_1(tmp_path: Path) -> None:
    assert _cpu_quota(tmp_path) == float("inf")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert _cpu_quota(tmp_path) == float("inf")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    assert _cpu_quota(tmp_path) == 2.5
