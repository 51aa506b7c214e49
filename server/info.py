"""What a model costs, for people and for programs. Only its shape is read, never its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ByteSize
from rich.console import Group
from rich.table import Table

from model import cost
from model.config import GPTConfig

if TYPE_CHECKING:
    from model.trace import Line, Shape  # it imports torch, which the costs do without

GIB = 2**30


class Numbers(NamedTuple):
    """Bytes of a number in the weights and in the rows."""

    weights: int
    rows: int


NUMBERS = {"float32": Numbers(4, 4), "bfloat16": Numbers(2, 2), "int8": Numbers(1, 2)}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the plan is for: memory for rows, and how fast the machine reads and computes."""

    memory: int  # bytes
    bandwidth: float  # bytes per second
    compute: float  # operations per second


@dataclass(frozen=True, slots=True)
class Memory:
    """What one type of numbers takes: bytes, whole sessions, and the time of one cached token."""

    weight_bytes: int
    row_bytes: int
    session_bytes: int  # of `tokens` rows
    sessions: int  # of `tokens` rows, in the machine's memory
    sessions_per_gib: int  # of `tokens` rows each
    full_sessions_per_gib: int  # of n_ctx rows each
    bytes_per_token: int  # read at least, alone and with `tokens` rows
    seconds_per_token: float  # at least, for reading them
    caching_pays_from: int | None  # rows that are recomputed while the weights are read

    @classmethod
    def of(cls, config: GPTConfig, tokens: int, numbers: Numbers, machine: Machine) -> Memory:
        row = config.row_bytes(numbers.rows)
        read = cost.bytes_read(config, tokens, *numbers)
        balance = machine.compute / machine.bandwidth
        return cls(
            weight_bytes=config.parameters * numbers.weights,
            row_bytes=row,
            session_bytes=row * tokens,
            sessions=machine.memory // (row * tokens),
            sessions_per_gib=GIB // (row * tokens),
            full_sessions_per_gib=GIB // (row * config.n_ctx),
            bytes_per_token=read,
            seconds_per_token=read / machine.bandwidth,
            caching_pays_from=cost.pays_from(config, numbers.weights, balance, numbers.rows),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """Operations of a completion that ends with `tokens` tokens, half of them its prompt."""

    prompt: int
    new: int
    cached_flops: int
    uncached_flops: int

    @classmethod
    def of(cls, config: GPTConfig, tokens: int) -> Completion:
        new = (tokens + 1) // 2
        prompt = max(tokens - new, 1)
        cached, uncached = (work(prompt, new) for work in (cost.cached, cost.uncached))
        return cls(prompt, new, cached.flops(config), uncached.flops(config))


@dataclass(frozen=True, slots=True)
class Cost:
    name: str
    config: GPTConfig
    tokens: int
    machine: Machine
    flops_per_token: dict[int, int]  # by the number of rows attended to
    completion: Completion
    memory: dict[str, Memory]  # by type of numbers
    row_bytes_by_key_heads: dict[int, int]  # of rows in bfloat16, if it had fewer

    @classmethod
    def of(cls, name: str, config: GPTConfig, tokens: int, machine: Machine) -> Cost:
        contexts = sorted({1, -(-config.n_ctx // 4), -(-config.n_ctx // 2), config.n_ctx})
        fewer = [n for n in range(config.n_head, 0, -1) if config.n_head % n == 0]
        return cls(
            name,
            config,
            tokens,
            machine,
            flops_per_token={context: config.flops(context) for context in contexts},
            completion=Completion.of(config, tokens),
            memory={
                dtype: Memory.of(config, tokens, numbers, machine)
                for dtype, numbers in NUMBERS.items()
            },
            row_bytes_by_key_heads={
                n: config.model_copy(update={"n_kv_head": n}).row_bytes(NUMBERS["bfloat16"].rows)
                for n in fewer
            },
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "shape": {**self.config.model_dump(), "d_head": self.config.d_head},
            "parameters": self.config.parameters,
            "flops_per_token": self.flops_per_token,
            "session_tokens": self.tokens,
            "machine": asdict(self.machine),
            "completion": asdict(self.completion),
            "memory": {dtype: asdict(m) for dtype, m in self.memory.items()},
            "row_bytes_by_key_heads": self.row_bytes_by_key_heads,
        }

    def tables(self) -> Group:
        return Group(self._shape(), self._operations(), self._plan(), self._key_heads())

    def _shape(self) -> Table:
        c = self.config
        names = ("layers", "heads", "key heads", "width", "FFN", "window", "vocabulary")
        numbers = (c.n_layer, c.n_head, c.n_kv_head, c.d_model, c.d_ff, c.n_ctx, c.n_vocab)
        return _table(f"{self.name}: {c.parameters:,} parameters", names, [map(str, numbers)])

    def _operations(self) -> Table:
        """One token after others, then a whole completion; with the cache and without."""
        rows = [
            (f"token {n:,}", flops, self.config.flops(n, rows=n))
            for n, flops in self.flops_per_token.items()
        ]
        c = self.completion
        rows.append((f"{c.new:,} tokens after {c.prompt:,}", c.cached_flops, c.uncached_flops))
        lines = [
            (name, f"{kept / 1e6:,.1f}", f"{afresh / 1e6:,.1f}", f"{afresh / kept:,.0f}x")
            for name, kept, afresh in rows
        ]
        return _table("operations, in MFLOP", ("", "cached", "uncached", "more"), lines)

    def _plan(self) -> Table:
        n, window, machine = f"{self.tokens:,}", f"{self.config.n_ctx:,}", self.machine
        speed, power = (f"{x / 1e9:,.0f} G" for x in (machine.bandwidth, machine.compute))
        of = self.memory.values()
        lines = {
            "weights": [_bytes(m.weight_bytes) for m in of],
            "one row": [f"{m.row_bytes:,} B" for m in of],
            f"a session of {n}": [_bytes(m.session_bytes) for m in of],
            f"sessions of {n} in {_bytes(machine.memory)}": [f"{m.sessions:,}" for m in of],
            f"sessions of {n} per GiB": [f"{m.sessions_per_gib:,}" for m in of],
            f"sessions of {window} per GiB": [f"{m.full_sessions_per_gib:,}" for m in of],
            "a token reads at least": [_bytes(m.bytes_per_token) for m in of],
            f"which takes, at {speed}B/s": [f"{1e3 * m.seconds_per_token:,.2f} ms" for m in of],
            f"the cache saves time from, at {power}FLOP/s": [
                f"{m.caching_pays_from:,} rows" if m.caching_pays_from else "never" for m in of
            ],
        }
        columns = ("", *self.memory)
        return _table("capacity", columns, ([name, *cells] for name, cells in lines.items()))

    def _key_heads(self) -> Table:
        """What multi-query and grouped-query attention would save, or do save."""
        most = self.row_bytes_by_key_heads[self.config.n_head]
        lines = [
            (
                f"{n}{' (this model)' if n == self.config.n_kv_head else ''}",
                f"{row:,} B",
                f"{self.machine.memory // (row * self.tokens):,}",
                f"{1 - row / most:.0%}",
            )
            for n, row in self.row_bytes_by_key_heads.items()
        ]
        sessions = f"sessions of {self.tokens:,} in {_bytes(self.machine.memory)}"
        return _table("rows in bfloat16", ("key heads", "one row", sessions, "saved"), lines)


def shapes(name: str, config: GPTConfig, tokens: int, lines: list[Line]) -> Table:
    """The trace of a step as a table. Bold is what has a row for each token."""
    title = f"{name}: the last of {tokens:,} tokens, first of {config.n_layer} layers"
    rows = [
        (line.name, _sizes(line.uncached, tokens), _sizes(line.cached, tokens), line.meaning)
        for line in lines
    ]
    table = _table(title, ("", "uncached", "cached", ""), rows)
    table.columns[-1].justify = "left"
    return table


def _sizes(shape: Shape, tokens: int) -> str:
    return " x ".join(f"[bold]{n}[/bold]" if n == tokens else f"{n}" for n in shape)


def _table(title: str, names: Iterable[str], lines: Iterable[Iterable[str]]) -> Table:
    """A title, then names above columns of numbers; the first column may say what they are of."""
    table = Table(*names, title=title, title_justify="left")
    for line in lines:
        table.add_row(*line)
    for column in table.columns[1 if table.columns[0].header == "" else 0 :]:
        column.justify = "right"
    return table


def _bytes(n: int) -> str:
    return ByteSize(n).human_readable()
