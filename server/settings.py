"""Every setting in one object: defaults, then the environment (ONEROW_*), then flags."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from model.config import explain

PREFIX = "ONEROW_"
# For rows: 85 full windows of the embedded model, 7 of GPT-2 124M in float32; beside the weights it
# still fits into a container of 2 GB.
CPU_MEMORY = 512 * 2**20
Bytes = Annotated[ByteSize, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class SettingsError(ValueError):
    """A setting that is not allowed, in one line."""


def cpus() -> int:
    """CPUs that this process may use: its affinity, cut by the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return math.ceil(min(allowed or 1, _cpu_quota()))


def _cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """CPUs that the control group grants (version 2, then 1); infinite without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)


def unknown_variables() -> list[str]:
    """Names in the environment that look like settings and are none."""
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


def default_threads() -> int:
    """What OMP_NUM_THREADS says, as in every program around torch; else all CPUs."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() and int(said) > 0 else cpus()


class Settings(BaseSettings):
    """How the server runs. Sizes are bytes, or text such as "2GiB"; times are seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    model: str = Field("stories", description="stories, or the folder or file of a model")
    served_model_name: str | None = Field(
        None, min_length=1, description="the model's name in the API; by default from its path"
    )
    lenient_model: bool = Field(
        False, description="answer to any model name, for clients whose name is built in"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto",
        description="type of the numbers; auto is float32 on CPU and bfloat16 on CUDA; int8 is "
        "that of the weights only",
    )
    kernels: bool = Field(
        True, description="use the compiled CPU kernels where they were built; else torch does all"
    )
    threads: Count = Field(
        default_factory=default_threads,
        description="CPU threads; by default OMP_NUM_THREADS, or what the container may use",
    )
    kv_cache_memory: Bytes | None = Field(
        None,
        description="memory for the rows of keys and values; by default 512 MiB on a CPU, nine "
        "tenths of what is free on a GPU",
    )
    max_sessions: Count = Field(1024, description="named sessions; the least recently used goes")
    session_ttl: Seconds | None = Field(
        None, description="a session unused for so long is forgotten; without it none is"
    )
    state_dir: Path | None = Field(
        None, description="folder in which named sessions survive a restart"
    )
    state_rows: ByteSize = Field(
        ByteSize(2**30), ge=0, description="most rows, in bytes, to save there at a clean shutdown"
    )
    max_running: Count = Field(64, description="completions that are computed at the same time")
    step_tokens: Count = Field(
        256, description="tokens computed in one step; at least twice max_running"
    )
    max_queue: int = Field(256, ge=0, description="completions that may wait; more get a 429")
    max_prompts: Count = Field(128, description="prompts in one request")
    max_body: Bytes = Field(ByteSize(2**20), description="largest request body")
    body_timeout: Seconds = Field(30.0, description="longest time for a body to arrive")
    request_timeout: Seconds | None = Field(
        None, description="longest time for an answer; without it there is no limit"
    )
    # Below the 10 seconds that `docker stop` gives by default.
    grace: float = Field(
        8.0, ge=0, allow_inf_nan=False, description="time for running requests at shutdown"
    )
    keepalive_comment: float = Field(
        15.0, ge=0, allow_inf_nan=False, description="silence before a comment in a stream; 0: none"
    )
    api_key: SecretStr | None = Field(
        None, min_length=1, description="the key that callers send; without it anyone may call"
    )
    api_key_file: Path | None = Field(
        None, description="file of further keys, a line `name: key` each; SIGHUP reads it again"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is logged, and all that is graver"
    )
    log_format: Literal["text", "json"] = Field("text", description="form of the log's lines")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.step_tokens < 2 * self.max_running:
            raise ValueError(
                f"step_tokens: {self.step_tokens} is below twice max_running ({self.max_running})"
            )
        return self

    @property
    def max_open(self) -> int:
        """Completions that may be open, running and waiting together."""
        return self.max_running + self.max_queue

    @classmethod
    def load(cls, **flags: object) -> Self:
        """Read the environment; flags that are not None win. Raises SettingsError."""
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls(**given)  # type: ignore[arg-type]  # pydantic checks them
        except ValidationError as error:
            raise SettingsError(explain(error)) from error
