"""onerow's own process of the benchmark."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import safetensors.torch

from model import checkpoint, kernel
from model.checkpoint import CheckpointError
from server.engine.engine import Engine
from server.loading import load_engine
from server.loadtest.engine import driver
from server.settings import Settings
from tests import tiny

WIDTH = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": 600}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A GPT-2 that has weights and no vocabulary."""
    theirs, _ = tiny.hugging_face(0.3, **WIDTH)
    tensors = {n: p.detach().clone() for n, p in theirs.transformer.named_parameters()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **WIDTH}))
    return tmp_path


@pytest.fixture
def engine(bare: Path) -> Engine:
    with driver.vocabulary_beside(str(bare)) as folder:
        return load_engine(Settings(model=folder, device="cpu", threads=1, kv_cache_memory=2**17))


class TestGenerate:
    def test_a_time_for_each_token_of_all(self, engine: Engine) -> None:
        prompts = [tiny.prompt(9, 500, seed) for seed in range(3)]
        times, tokens = driver.generate(engine, prompts, 7)
        assert len(times) == len(tokens) == 7
        assert 0 < times[0] < times[-1]
        assert times == sorted(times)
        assert not engine.has_work

    def test_the_same_tokens_without_the_cache(self, engine: Engine) -> None:
        prompt = tiny.prompt(9, 500)
        computed = []
        texts = []
        for use_cache in (False, True):
            before = engine.snapshot().rows_computed_total
            texts.append(driver.generate(engine, [prompt], 5, use_cache)[1])
            computed.append(engine.snapshot().rows_computed_total - before)
        assert texts[0] == texts[1]
        assert computed == [9 + 10 + 11 + 12 + 13, 9 + 4]

    def test_of_more_than_fit_into_a_step(self, engine: Engine) -> None:
        """The first time is that of the slowest."""
        engine.scheduler.step_tokens = 128
        times, _ = driver.generate(engine, [tiny.prompt(40, 500, seed) for seed in range(8)], 3)
        assert len(times) == 3

    def test_in_a_pool_that_is_full(self, engine: Engine) -> None:
        prompt = tiny.prompt(9, 500)
        _, expected = driver.generate(engine, [prompt], 5)
        engine.reset(None)
        driver.fill(engine)
        assert engine.pool.free < driver.IDLE
        assert engine.snapshot().rows_idle == engine.pool.n_rows - engine.pool.free
        assert driver.generate(engine, [prompt], 5)[1] == expected


class TestProtocol:
    def test_answers_and_errors(self, engine: Engine) -> None:
        good = {"prompts": [[1, 2, 3]], "new": 4}
        commands = [good, {"prompts": good["prompts"]}, {**good, "use_cache": False}]
        said = io.StringIO()
        driver.serve(engine, io.StringIO("".join(json.dumps(c) + "\n" for c in commands)), said)
        first, bad, last = map(json.loads, said.getvalue().splitlines())
        assert first["toks"] == last["toks"]
        assert len(first["ts"]) == 4
        assert bad == {"error": "KeyError: 'new'"}

    def test_ready(self, engine: Engine) -> None:
        ready = json.loads(json.dumps(driver.ready(engine, tiny.config(), 0.5)))
        assert ready["uncached"] is True
        assert ready["rows"] == engine.pool.n_rows
        assert ready["shape"]["d_model"] == 48
        assert ready["weight_bytes"] == 4

    @pytest.mark.parametrize(("dtype", "size"), [("float32", 2), ("int8", 1)])
    def test_weights_are_as_they_lie_in_memory(self, dtype: str, size: int) -> None:
        """The included model was saved in bfloat16: the kernels, if there are any, keep it so."""
        engine = load_engine(Settings(device="cpu", threads=1, dtype=dtype))
        if dtype == "float32" and kernel.library() is None:
            size = 4
        assert driver.ready(engine, tiny.config(), 0.5)["weight_bytes"] == size


class TestVocabulary:
    def test_nothing_is_written_beside_the_weights(self, bare: Path) -> None:
        before = sorted(bare.iterdir())
        with driver.vocabulary_beside(str(bare)) as folder:
            assert checkpoint.load(Path(folder)).tokenizer.n_vocab == 600
        assert sorted(bare.iterdir()) == before
        assert not Path(folder).exists()

    def test_its_own_is_taken_where_there_is_one(self) -> None:
        with driver.vocabulary_beside("stories") as model:
            assert model == "stories"

    def test_too_few_tokens(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"vocab_size": 256}')
        with (
            pytest.raises(CheckpointError, match="too few"),
            driver.vocabulary_beside(str(tmp_path)),
        ):
            pass
