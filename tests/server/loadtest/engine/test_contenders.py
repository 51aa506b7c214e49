"""Who takes part, as typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from server.loadtest.engine import libraries
from server.loadtest.engine.contenders import PeerError, all_of, read
from server.settings import CPU_MEMORY


class TestPeers:
    def test_a_command(self) -> None:
        peer = read("llama.cpp=/v/python worker.py llama 'a b.gguf' '{\"x\": 1}'", "stories")
        assert peer.name == "llama.cpp"
        assert peer.command == ("/v/python", "worker.py", "llama", "a b.gguf", '{"x": 1}')
        assert not peer.ours

    def test_a_library_that_is_known(self) -> None:
        peer = read("transformers", "folder")
        assert peer.name == "transformers"
        assert peer.command == (sys.executable, libraries.__file__, "transformers", "folder", "{}")

    def test_with_a_model_and_an_interpreter_of_its_own(self) -> None:
        peer = read("ctranslate2 /d/model dtype=int8 python=/v/python", "folder")
        assert peer.name == "ctranslate2 int8"
        python, script, *rest = peer.command
        assert python == "/v/python"
        assert Path(script).is_file()
        assert rest == ["ctranslate2", "/d/model", '{"dtype": "int8"}']

    def test_and_a_name(self) -> None:
        assert read("ct2 = ctranslate2 /d/model", "folder").name == "ct2"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("nobody", "'nobody' is not like NAME=COMMAND and does not begin with transformers, "),
            ("a=", "'a=' is not like"),
            ("=b", "'=b' is not like"),
            ("a='b", "No closing quotation"),
            ("transformers one two", "transformers: 'two' is neither one model nor python, "),
            ("openvino folder kv=u8", "openvino: 'kv' is neither"),
        ],
    )
    def test_that_cannot_be_understood(self, text: str, words: str) -> None:
        with pytest.raises(PeerError, match=words):
            read(text, "stories")


OPTIONS = {"model": "m", "dtype": "auto", "kv_cache_memory": 2**30}


class TestVariants:
    def test_one_by_default(self) -> None:
        [only] = all_of(OPTIONS, [], [])
        assert only.name == "onerow"
        assert only.ours
        assert json.loads(only.command[-1]) == OPTIONS

    def test_one_for_each_type_before_the_peers(self) -> None:
        everyone = all_of(OPTIONS, ["float32", "int8"], ["peer=command"])
        assert [c.name for c in everyone] == ["onerow float32", "onerow int8", "peer"]
        assert json.loads(everyone[1].command[-1]) == {**OPTIONS, "dtype": "int8"}

    def test_full_pools_of_the_first(self) -> None:
        everyone = all_of(OPTIONS, ["float32", "int8"], [], full=True)
        assert [c.pool for c in everyone] == [None, None, 2**28, 2**30, 2**32]
        assert everyone[2].name == "onerow float32, full pool of 256.0MiB"
        assert json.loads(everyone[2].command[-1]) == {
            "model": "m",
            "dtype": "float32",
            "kv_cache_memory": 2**28,
            "full": True,
        }

    def test_full_pools_of_the_default_size(self) -> None:
        """Where nobody says how much memory rows may take, it is what a server takes on a CPU."""
        everyone = all_of({**OPTIONS, "kv_cache_memory": None}, [], [], full=True)
        assert [c.pool for c in everyone[1:]] == [CPU_MEMORY // 4, CPU_MEMORY, 4 * CPU_MEMORY]

    def test_names_are_names(self) -> None:
        with pytest.raises(PeerError, match="two are called a"):
            all_of(OPTIONS, [], ["a=b", "a=c"])

    def test_all_have_as_many_threads_and_none_our_settings(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ONEROW_DTYPE", "int8")
        monkeypatch.delenv("PYTHONPATH", raising=False)
        ours, peer = all_of(OPTIONS, [], ["a=b"])
        for each in (ours, peer):
            variables = each.variables(3)
            assert variables["OMP_NUM_THREADS"] == variables["PEER_THREADS"] == "3"
            assert "ONEROW_DTYPE" not in variables
        assert "PYTHONPATH" not in peer.variables(1)  # its interpreter may have another `model`
