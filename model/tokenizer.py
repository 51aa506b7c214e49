"""Text to token ids and back, through tiktoken, from files beside the weights."""

from __future__ import annotations

import base64
import codecs
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks, load_tiktoken_bpe
from tiktoken_ext.openai_public import r50k_pat_str

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tokenizer.tiktoken"
DOWNLOAD_SECONDS = 20

# What tiktoken calls its copies of GPT-2's files in its cache folder: the SHA-1 of their addresses.
GPT2_CACHE = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}


class TokenizerError(ValueError):
    """A vocabulary that cannot be read, or text that cannot be encoded."""


class Tokenizer:
    """A byte-level BPE vocabulary with one special token, end of text."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.n_vocab = encoding.n_vocab
        self.end_of_text = encoding.eot_token

    @classmethod
    def from_ranks(cls, ranks: dict[bytes, int], name: str) -> Tokenizer:
        """A vocabulary from its mergeable tokens; end of text takes the next id."""
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise TokenizerError(f"{name}: token ids are not 0 to {len(ranks) - 1}, each once")
        if b"" in ranks or not all(bytes([byte]) in ranks for byte in range(256)):
            raise TokenizerError(f"{name}: not byte-level: a token for every byte, and none empty")
        return cls(
            tiktoken.Encoding(
                name=name,
                pat_str=r50k_pat_str,
                mergeable_ranks=ranks,
                special_tokens={END_OF_TEXT: len(ranks)},
            )
        )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `.tiktoken` file: a line per token, its bytes in base64 and its id."""
        with _reading(path):
            ranks = load_tiktoken_bpe(str(path))
        return cls.from_ranks(ranks, str(path))

    @classmethod
    def load_gpt2_files(cls, folder: Path) -> Tokenizer:
        """Read `vocab.json` and `merges.txt`, as GPT-2 and Hugging Face write them."""
        with _reading(folder / "vocab.json and merges.txt"):
            ranks = _gpt2_ranks(folder)
        return cls.from_ranks(ranks, str(folder))

    @classmethod
    def load_tokenizer_json(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json`, the only vocabulary that Hugging Face's newer releases write.

        Anything in it that would split text otherwise than GPT-2 does is refused.
        """
        with _reading(path), tempfile.TemporaryDirectory() as folder:
            content = json.loads(path.read_bytes())
            bpe, splitter = content["model"], content["pre_tokenizer"]
            plain = (
                bpe.get("type", "BPE") == "BPE"
                and not bpe.get("ignore_merges")
                and content.get("normalizer") is None
                and splitter["type"] == "ByteLevel"
                and not splitter["add_prefix_space"]
                and splitter.get("use_regex", True)
            )
            if not plain:
                raise ValueError("it splits text otherwise than GPT-2")
            merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"])
            lines = "\n".join(["#version: 0.2", *merges, ""])
            (Path(folder) / "merges.txt").write_text(lines, encoding="utf-8")
            (Path(folder) / "vocab.json").write_text(json.dumps(bpe["vocab"]), encoding="utf-8")
            ranks = _gpt2_ranks(Path(folder))
        return cls.from_ranks(ranks, str(path))

    @classmethod
    def gpt2(cls) -> Tokenizer:
        """GPT-2's own vocabulary: tiktoken downloads it where its cache folder lacks it.

        Raises TokenizerError where it can do neither. tiktoken sets no limit to a download, and
        a network that swallows packets would hold the start up for minutes.
        """
        answer: Future[tiktoken.Encoding] = Future()

        def fetch() -> None:
            try:
                answer.set_result(tiktoken.get_encoding("gpt2"))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=fetch, daemon=True).start()
        try:
            return cls(answer.result(timeout=DOWNLOAD_SECONDS))
        except Exception as error:
            raise TokenizerError(
                f"{_missing_from_cache()}: not there, and the download failed "
                f"({type(error).__name__}): set TIKTOKEN_CACHE_DIR to a folder that has it, or put "
                f"vocab.json and merges.txt beside the weights"
            ) from error

    def save(self, path: Path) -> None:
        """Write what `load` reads."""
        tokens = (self.token_bytes[i] for i in range(self.end_of_text))
        lines = (base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))
        path.write_bytes(b"".join(lines))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of every token, by id; end of text among them."""
        return [self.encoding.decode_single_token_bytes(i) for i in range(self.n_vocab)]

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: text of n bytes has at least n / longest_token tokens."""
        return max(map(len, self.token_bytes))

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same tokens in the same order, and for no others."""
        digest = hashlib.sha256()
        for token in self.token_bytes:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. With `special`, the words `<|endoftext|>` become the control token;
        without it they are ordinary text, so that no caller can end a text by writing it.
        """
        try:
            if special:
                return self.encoding.encode(text, allowed_special="all")
            return self.encoding.encode_ordinary(text)
        except Exception as error:
            raise TokenizerError("the text cannot be encoded") from error
        except BaseException as error:
            # The regex engine below panics where it overflows, and a Rust panic is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError("the text cannot be encoded") from error

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.token_bytes[token] for token in tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.bytes_of(tokens).decode("utf-8", "replace")


def utf8_decoder() -> codecs.IncrementalDecoder:
    """A decoder that holds back an incomplete character until its bytes have come."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _gpt2_ranks(folder: Path) -> dict[bytes, int]:
    """The mergeable tokens of `vocab.json` and `merges.txt`, which must agree."""
    vocab = folder / "vocab.json"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "merges.txt"), str(vocab))
    if json.loads(vocab.read_bytes()).get(END_OF_TEXT, len(ranks)) != len(ranks):
        raise ValueError(f"{END_OF_TEXT} is not the last token")
    return ranks


def _missing_from_cache() -> str:
    """The first of GPT-2's files that is not in tiktoken's cache folder."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(folder) if folder else Path(tempfile.gettempdir(), "data-gym-cache")
    absent = [name for name, copy in GPT2_CACHE.items() if not (cache / copy).exists()]
    name = absent[0] if absent else "vocab.bpe"
    return f"{cache / GPT2_CACHE[name]} (GPT-2's {name})"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Let tiktoken read files as they are now, and name them in its errors.

    tiktoken keeps a copy of every file by its path alone, so that a changed file would be read
    as it once was; an empty cache folder switches that off.
    """
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    try:
        yield
    except OSError as error:
        raise TokenizerError(f"{error.filename or path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        reason = f" ({str(error)[:100]})" if str(error) else ""
        raise TokenizerError(f"{path}: not a vocabulary that can be read{reason}") from error
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
        else:
            os.environ["TIKTOKEN_CACHE_DIR"] = before
