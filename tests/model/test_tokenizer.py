"""Text to ids and back: every byte kept, nothing slow, no control token from plain text."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken.registry
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from model import tokenizer
from model.tokenizer import END_OF_TEXT, FILE_NAME, Tokenizer, TokenizerError, utf8_decoder

SAMPLE = [
    "Once upon a time there was a little dog. The dog's name was Ben, and he'd run and run.",
    "  Two spaces,\ttabs\n\nand lines;   we'll see that it isn't 1234 or 56,789...!?",
    "Ünïcödé is café; 日本語のテキスト and 中文, привет мир, 🙂🙃 👩‍👩‍👧 e\u0301.",
]
TEXT = st.text(st.sampled_from(sorted(set("".join(SAMPLE)) | set("^~{}\r\u00a0\u3000<|>"))))
CACHE = Path(
    os.environ.get("TIKTOKEN_CACHE_DIR")
    or Path(__file__).parents[2].resolve().parent / "shared" / "tiktoken_cache"
)
BYTES = {bytes([byte]): byte for byte in range(256)}


@pytest.fixture(scope="module")
def hf() -> ByteLevelBPETokenizer:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(SAMPLE * 20, vocab_size=400, show_progress=False)
    return bpe


@pytest.fixture(scope="module")
def hf_folder(hf: ByteLevelBPETokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    hf.save_model(str(folder))
    return folder


@pytest.fixture(scope="module")
def learned(hf_folder: Path) -> Tokenizer:
    return Tokenizer.load_gpt2_files(hf_folder)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    if not all((CACHE / copy).exists() for copy in tokenizer.GPT2_CACHE.values()):
        pytest.skip(f"GPT-2's vocabulary is not in {CACHE}; set TIKTOKEN_CACHE_DIR")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))
        return Tokenizer.gpt2()


@pytest.fixture(params=["learned", "gpt2"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen


# Bytes


def test_every_id_has_its_bytes(either: Tokenizer) -> None:
    assert len(either.token_bytes) == either.n_vocab == either.end_of_text + 1
    assert len(set(either.token_bytes)) == either.n_vocab
    assert either.bytes_of(range(either.n_vocab)) == b"".join(either.token_bytes)
    assert either.longest_token == max(len(token) for token in either.token_bytes)
    for token, content in enumerate(either.token_bytes):
        assert either.encoding.encode_single_token(content) == token
        assert either.decode([token]) == content.decode("utf-8", "replace")


def test_every_byte_is_a_token(either: Tokenizer) -> None:
    assert {bytes([byte]) for byte in range(256)} <= set(either.token_bytes)


@given(text=st.text())
def test_text_comes_back(learned: Tokenizer, text: str) -> None:
    for special in (False, True):
        tokens = learned.encode(text, special=special)
        assert learned.decode(tokens) == text
        assert len(tokens) * learned.longest_token >= len(text.encode())


@given(text=st.text(), data=st.data())
def test_tokens_decode_the_same_in_pieces(
    learned: Tokenizer, text: str, data: st.DataObject
) -> None:
    """A character that a token border cuts is held back until it is whole."""
    tokens = learned.encode(text)
    cut = data.draw(st.integers(0, len(tokens)))
    decoder = utf8_decoder()
    pieces = [decoder.decode(learned.bytes_of(tokens[:cut]))]
    assert text.startswith(pieces[0])
    pieces.append(decoder.decode(learned.bytes_of(tokens[cut:]), final=True))
    assert "".join(pieces) == text


@given(content=st.binary())
def test_any_bytes_decode_as_python_decodes_them(learned: Tokenizer, content: bytes) -> None:
    ids = [learned.token_bytes.index(bytes([byte])) for byte in content]
    assert learned.bytes_of(ids) == content
    assert learned.decode(ids) == content.decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ude00\ud83d", "\ud800" * 1000])
def test_lone_surrogates_do_not_crash(either: Tokenizer, text: str) -> None:
    for special in (False, True):
        assert "\ufffd" in either.decode(either.encode(text, special=special))


# The control token


def test_its_words_are_plain_text_unless_asked_for(either: Tokenizer) -> None:
    text = f"a{END_OF_TEXT}b"
    tokens = either.encode(text)
    assert either.end_of_text not in tokens
    assert either.decode(tokens) == text


def test_its_words_are_the_token_when_asked_for(either: Tokenizer) -> None:
    a, b = either.encode("a"), either.encode("b")
    end = [either.end_of_text]
    assert either.encode(f"a{END_OF_TEXT}b", special=True) == a + end + b
    assert either.encode(END_OF_TEXT * 3, special=True) == 3 * end


@pytest.mark.parametrize(
    "text", ["<|endoftext|", "|endoftext|>", "<|end oftext|>", "<|fim_prefix|>"]
)
def test_words_that_only_look_like_it_are_plain_text(either: Tokenizer, text: str) -> None:
    assert either.encode(text, special=True) == either.encode(text)
    assert either.end_of_text not in either.encode(text)


def test_the_token_decodes_to_its_words(either: Tokenizer) -> None:
    assert either.decode([either.end_of_text]) == END_OF_TEXT


# Equal to other tokenizers


@given(text=TEXT)
@settings(deadline=None)
def test_learned_vocabulary_equals_hugging_face(
    hf: ByteLevelBPETokenizer, learned: Tokenizer, text: str
) -> None:
    assert learned.encode(text) == hf.encode(text).ids


@pytest.mark.parametrize("text", [*SAMPLE, " ".join(SAMPLE)])
def test_sample_text_equals_hugging_face(
    hf: ByteLevelBPETokenizer, learned: Tokenizer, text: str
) -> None:
    assert learned.encode(text) == hf.encode(text).ids


def test_gpt2_has_its_known_ids(gpt2: Tokenizer) -> None:
    assert (gpt2.n_vocab, gpt2.end_of_text) == (50257, 50256)
    assert gpt2.encode("Hello, world!") == [15496, 11, 995, 0]
    assert gpt2.encode("a\n !") == [64, 198, 5145]
    assert gpt2.bytes_of([172, 253, 246, 222]).decode() == "😀"
    assert gpt2.bytes_of([158, 224, 105]).decode() == "€"


# Long runs


@pytest.mark.parametrize("run", ["a", "^", " ", "\n", "é", "1", "🙂"])
def test_long_runs_are_fast(either: Tokenizer, run: str) -> None:
    text = run * 100_000
    began = time.perf_counter()
    tokens = either.encode(text)
    assert time.perf_counter() - began < 20  # a tenth of a second; for ever, if it was quadratic
    assert either.decode(tokens) == text


# Files


def test_saved_vocabulary_comes_back(tmp_path: Path, either: Tokenizer) -> None:
    either.save(tmp_path / FILE_NAME)
    loaded = Tokenizer.load(tmp_path / FILE_NAME)
    assert loaded.token_bytes == either.token_bytes
    assert loaded.encode(SAMPLE[2]) == either.encode(SAMPLE[2])


@given(tokens=st.sets(st.binary(min_size=2, max_size=6), max_size=30))
@settings(deadline=None, max_examples=30)
def test_any_vocabulary_comes_back(
    tmp_path_factory: pytest.TempPathFactory, tokens: set[bytes]
) -> None:
    path = tmp_path_factory.mktemp("any") / FILE_NAME
    ranks = BYTES | {token: 256 + i for i, token in enumerate(tokens)}
    Tokenizer.from_ranks(ranks, "any").save(path)
    assert Tokenizer.load(path).token_bytes == [*ranks, END_OF_TEXT.encode()]


def test_a_changed_file_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken caches by path; its folder is neither read nor written, and its setting is kept."""
    cache, path = tmp_path / "cache", tmp_path / FILE_NAME
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    for content in (b"ab", b"cd"):
        Tokenizer.from_ranks({**BYTES, content: 256}, "x").save(path)
        assert Tokenizer.load(path).token_bytes[256] == content
    assert not cache.exists()
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(cache)
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    Tokenizer.load(path)
    assert "TIKTOKEN_CACHE_DIR" not in os.environ


def refusal(read: Callable[[Path], Tokenizer], path: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


LINES = b"".join(b"%s %d\n" % (line, i) for i, line in enumerate([b"YQ==", b"Yg=="]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 10_000,
        b"YQ==\n",
        b"YQ== one\n",
        b"YQ== 0 0\n",
        b"YQ 0\n",
        b"\xff\xfe 0\n",
        LINES,
        LINES + b"YQ== 2\n",
        b"YQ== 5\n",
        b"YQ== -1\n",
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert str(tmp_path / FILE_NAME) in refusal(Tokenizer.load, tmp_path / FILE_NAME)


@given(content=st.binary(max_size=200))
@settings(deadline=None)
def test_any_other_content_is_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "broken"
    path.write_bytes(content)
    for read in (Tokenizer.load, Tokenizer.load_tokenizer_json):
        assert str(path) in refusal(read, path)


@pytest.mark.parametrize("missing", [0, 0x80, 0xFF])
def test_a_vocabulary_without_some_byte_is_refused(missing: int) -> None:
    tokens = [token for token in BYTES if token != bytes([missing])]
    with pytest.raises(TokenizerError, match="x: not byte-level"):
        Tokenizer.from_ranks({token: i for i, token in enumerate(tokens)}, "x")


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(TokenizerError, match="x: not byte-level"):
        Tokenizer.from_ranks({**BYTES, b"": 256}, "x")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'x'}: No such file" in refusal(Tokenizer.load, tmp_path / "x")
    assert f"{tmp_path}: Is a directory" in refusal(Tokenizer.load, tmp_path)


# vocab.json and merges.txt


@pytest.fixture
def pair(tmp_path: Path, hf: ByteLevelBPETokenizer) -> Path:
    hf.save_model(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_one_of_the_pair_is_missing(pair: Path, name: str) -> None:
    (pair / name).unlink()
    assert f"{pair / name}: No such file" in refusal(Tokenizer.load_gpt2_files, pair)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b'{"a": "b"}', b"#version\na b c\n"]
)
def test_one_of_the_pair_is_broken(pair: Path, name: str, content: bytes) -> None:
    (pair / name).write_bytes(content)
    message = refusal(Tokenizer.load_gpt2_files, pair)
    assert str(pair) in message
    assert name in message


def test_a_pair_that_disagrees_is_refused(pair: Path) -> None:
    merges = (pair / "merges.txt").read_text().splitlines()
    merges[1], merges[2] = merges[2], merges[1]
    (pair / "merges.txt").write_text("\n".join(merges) + "\n")
    assert "merges.txt" in refusal(Tokenizer.load_gpt2_files, pair)


def set_end(folder: Path, token: int) -> None:
    vocabulary = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {END_OF_TEXT: token}))


def test_end_of_text_is_the_last_token_or_refused(pair: Path, learned: Tokenizer) -> None:
    set_end(pair, learned.end_of_text)
    assert Tokenizer.load_gpt2_files(pair).token_bytes == learned.token_bytes
    set_end(pair, learned.end_of_text + 1)
    message = refusal(Tokenizer.load_gpt2_files, pair)
    assert str(pair) in message
    assert "is not the last token" in message


# tokenizer.json


@pytest.fixture
def tokenizer_json(tmp_path: Path, hf: ByteLevelBPETokenizer) -> Path:
    hf.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokenizer_json_is_the_same_vocabulary(tokenizer_json: Path, learned: Tokenizer) -> None:
    assert Tokenizer.load_tokenizer_json(tokenizer_json).token_bytes == learned.token_bytes
    content = json.loads(tokenizer_json.read_text())
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]
    ]
    content["model"]["merges"] = merges  # as older releases wrote them
    tokenizer_json.write_text(json.dumps(content))
    assert Tokenizer.load_tokenizer_json(tokenizer_json).token_bytes == learned.token_bytes


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "NFC"}),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}),
        ("pre_tokenizer", None),
        ("model", {"type": "Unigram", "vocab": [], "merges": []}),
        ("model", {"type": "BPE"}),
        ("model", {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": True}),
    ],
)
def test_a_tokenizer_that_splits_otherwise_is_refused(
    tokenizer_json: Path, part: str, value: object
) -> None:
    content = json.loads(tokenizer_json.read_text()) | {part: value}
    tokenizer_json.write_text(json.dumps(content))
    assert str(tokenizer_json) in refusal(Tokenizer.load_tokenizer_json, tokenizer_json)


# GPT-2's vocabulary without a network


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has never seen GPT-2's files and cannot fetch them. Its cache folder."""

    def refuse(address: str) -> bytes:
        raise ConnectionError(address)

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr("tiktoken.load.read_file", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_offline_is_told_with_both_ways_out(offline: Path) -> None:
    message = refusal(lambda _: Tokenizer.gpt2(), offline)
    assert str(offline / tokenizer.GPT2_CACHE["vocab.bpe"]) in message
    assert "set TIKTOKEN_CACHE_DIR" in message
    assert "vocab.json and merges.txt" in message


def test_offline_names_the_file_that_is_missing(offline: Path, gpt2: Tokenizer) -> None:
    name = tokenizer.GPT2_CACHE["vocab.bpe"]
    (offline / name).symlink_to(CACHE / name)
    message = refusal(lambda _: Tokenizer.gpt2(), offline)
    assert str(offline / tokenizer.GPT2_CACHE["encoder.json"]) in message
    name = tokenizer.GPT2_CACHE["encoder.json"]
    (offline / name).symlink_to(CACHE / name)
    assert Tokenizer.gpt2().token_bytes == gpt2.token_bytes


def test_a_network_that_swallows_packets_does_not_hang(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: over.wait(60))
    monkeypatch.setattr(tokenizer, "DOWNLOAD_SECONDS", 0.05)
    began = time.perf_counter()
    assert "TimeoutError" in refusal(lambda _: Tokenizer.gpt2(), offline)
    assert time.perf_counter() - began < 30
    over.set()
