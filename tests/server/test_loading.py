"""From settings to an engine: device, numbers, rows, and one clear line where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model import kernel
from model.checkpoint import CheckpointError
from model.config import GPTConfig
from model.packed import PackedRunner
from model.runner import Runner
from model.step import Sampling
from server.engine.sequence import Delta, Request
from server.loading import LoadError, load_engine, placement, pool_rows
from server.settings import Settings

CONFIG = GPTConfig(n_layer=2, n_head=2, d_model=16, n_ctx=64, n_vocab=512)
ROW = CONFIG.row_bytes(4)
HAS_GPU = torch.cuda.is_available()


class TestPlacement:
    def test_auto(self) -> None:
        place = placement("auto", "auto")
        assert place.device.type == ("cuda" if HAS_GPU else "cpu")
        assert place.dtype == ("bfloat16" if HAS_GPU else "float32")

    def test_the_cpu_computes_in_float32(self) -> None:
        place = placement("cpu", "auto")
        assert place == (torch.device("cpu"), "float32")
        assert place.numbers == (torch.float32, torch.float32)

    def test_a_type_asked_for_is_given(self) -> None:
        assert placement("cpu", "bfloat16").numbers == (torch.bfloat16, torch.bfloat16)
        assert placement("cpu", "int8").numbers.rows == torch.bfloat16

    @pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
    def test_cuda_without_a_gpu_is_refused(self) -> None:
        with pytest.raises(LoadError, match="device cuda: torch sees no usable NVIDIA GPU"):
            placement("cuda", "auto")


class TestPoolRows:
    def test_memory_is_exact(self) -> None:
        """Rows and the scratch row fill the memory, and not a byte more."""
        assert pool_rows(CONFIG, 4, 100 * ROW) == 99
        assert pool_rows(CONFIG, 4, 101 * ROW - 1) == 99
        assert pool_rows(CONFIG, 2, 100 * ROW) == 199

    def test_one_window_is_the_least(self) -> None:
        assert pool_rows(CONFIG, 4, 65 * ROW) == 64
        with pytest.raises(LoadError, match="room for 63 rows, but one window is 64"):
            pool_rows(CONFIG, 4, 65 * ROW - 1)
        with pytest.raises(LoadError, match="room for 0 rows"):
            pool_rows(CONFIG, 4, 1)

    def test_the_least_that_is_named_is_enough(self) -> None:
        config = GPTConfig(n_layer=12, n_head=12, d_model=768, n_ctx=1024, n_vocab=50257)
        with pytest.raises(LoadError, match="73MiB at least"):
            pool_rows(config, 4, 72 * 2**20)
        assert pool_rows(config, 4, 73 * 2**20) >= 1024


class TestLoadEngine:
    def test_the_embedded_model(self) -> None:
        settings = Settings(device="cpu", threads=1, kv_cache_memory=2**24, max_running=2)
        engine = load_engine(settings)
        assert (engine.name, engine.device, engine.dtype) == ("stories", "cpu", "float32")
        assert engine.model.n_ctx == 512
        assert engine.pool.n_rows == 2**24 // engine.pool.row_bytes - 1
        assert engine.scheduler.max_running == 2
        assert torch.get_num_threads() == 1

    @pytest.mark.parametrize("kernels", [True, False])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    def test_every_type_with_and_without_kernels(self, dtype: str, kernels: bool) -> None:
        """Each begins a story of its own weights; rows are as large as they are said to be."""
        settings = Settings(
            device="cpu", dtype=dtype, kernels=kernels, kv_cache_memory=2**24, threads=1
        )
        engine = load_engine(settings)
        runner = engine.model
        assert isinstance(runner, Runner)
        assert isinstance(runner, PackedRunner) == (kernels and kernel.library() is not None)
        assert engine.dtype == dtype
        assert engine.rows_dtype == ("float32" if dtype == "float32" else "bfloat16")
        assert runner.kv[:, :, 0].nbytes == engine.pool.row_bytes
        prompt = tuple(engine.tokenizer.encode("Once upon a"))
        engine.submit([Request("a", 0, prompt, 1, Sampling(temperature=0.0))])
        (event,) = engine.step()
        assert isinstance(event, Delta)
        assert event.text == " time"

    def test_a_name_of_ones_own(self) -> None:
        settings = Settings(device="cpu", served_model_name="tales", kv_cache_memory=2**24)
        assert load_engine(settings).name == "tales"

    def test_no_such_model(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no such model"):
            load_engine(Settings(model=str(tmp_path / "nothing"), device="cpu"))

    @pytest.mark.parametrize("size", [2**50, 2**66])
    def test_memory_that_no_machine_has(self, size: int) -> None:
        with pytest.raises(LoadError, match="kv_cache_memory: cpu has not so much"):
            load_engine(Settings(device="cpu", kv_cache_memory=size))

    def test_memory_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def exhausted(*_: object, **__: object) -> None:
            raise RuntimeError("not enough memory")

        monkeypatch.setattr("server.loading.make_runner", exhausted)
        with pytest.raises(LoadError, match="kv_cache_memory: cpu has not so much"):
            load_engine(Settings(device="cpu"))
