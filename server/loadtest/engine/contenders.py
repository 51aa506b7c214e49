"""Who takes part: variants of onerow, and peers."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize

import server
from server.loadtest.engine import libraries
from server.loadtest.engine.libraries import LIBRARIES
from server.settings import CPU_MEMORY, PREFIX

OPTIONS = ("python", "dtype", "device")


class PeerError(ValueError):
    """A --peer that cannot be understood: one line."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A name in the tables and the command behind it. `pool` is the size in bytes of a pool that
    is full of idle sequences, for a variant of onerow that is there for this only.
    """

    name: str
    command: tuple[str, ...]
    ours: bool = False
    pool: int | None = None

    def variables(self, threads: int) -> dict[str, str]:
        """The environment: as many threads for everyone, and nothing is asked of the network."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        kept |= {"OMP_NUM_THREADS": str(threads), "PEER_THREADS": str(threads)}
        kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.ours:  # this very code, whatever folder we are in
            kept["PYTHONPATH"] = str(Path(server.__file__).parent.parent)
        return kept


def all_of(
    options: Mapping[str, Any], dtypes: Sequence[str], peers: Sequence[str], *, full: bool = False
) -> list[Contender]:
    """onerow with these settings and each type of numbers; with `full`, the first of them with
    three sizes of pool that are full; then the peers. Raises PeerError.
    """
    types = {f"onerow {dtype}": dtype for dtype in dtypes} or {"onerow": options["dtype"]}
    variants = [own(name, {**options, "dtype": dtype}) for name, dtype in types.items()]
    first, dtype = next(iter(types.items()))
    for share in (1, 4, 16) if full else ():
        size = share * (options["kv_cache_memory"] or CPU_MEMORY) // 4
        name = f"{first}, full pool of {ByteSize(size).human_readable()}"
        variants.append(own(name, {**options, "dtype": dtype}, size))
    everyone = [*variants, *(read(text, str(options["model"])) for text in peers)]
    for name, times in Counter(c.name for c in everyone).items():
        if times > 1:
            raise PeerError(f"two are called {name}")
    return everyone


def own(name: str, options: Mapping[str, Any], pool: int | None = None) -> Contender:
    """onerow with these settings; `pool` replaces the size of the pool and has it filled."""
    given = options if pool is None else {**options, "kv_cache_memory": pool, "full": True}
    driver = (sys.executable, "-P", "-m", "server.loadtest.engine.driver")
    return Contender(name, (*driver, json.dumps(given)), ours=True, pool=pool)


def read(text: str, model: str) -> Contender:
    """From `NAME=COMMAND`, where the command may be `LIBRARY [MODEL] [python=FILE] [dtype=TYPE]`
    for those we know; they need no name. Raises PeerError.
    """
    if _words(text)[:1] in ([library] for library in LIBRARIES):
        return _library(None, _words(text), model)
    name, _, command = text.partition("=")
    words = _words(command)
    if not name.strip() or not words:
        known = ", ".join(LIBRARIES)
        raise PeerError(f"{text!r} is not like NAME=COMMAND and does not begin with {known}")
    if words[0] in LIBRARIES:
        return _library(name.strip(), words, model)
    return Contender(name.strip(), tuple(words))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise PeerError(f"{text!r}: {error}") from error


def _library(name: str | None, words: list[str], model: str) -> Contender:
    library, *rest = words
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    folders = [word for word in rest if "=" not in word]
    if unknown := [*(key for key in options if key not in OPTIONS), *folders[1:]]:
        raise PeerError(f"{library}: {unknown[0]!r} is neither one model nor {', '.join(OPTIONS)}")
    python = options.pop("python", sys.executable)
    command = (python, libraries.__file__, library, *(folders or [model]), json.dumps(options))
    return Contender(name or " ".join([library, *options.values()]), command)
