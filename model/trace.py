"""The shape of every matrix of one step, with the cache and without: which have one row, and which
have as many as there are tokens. Taken from a run of the network on tensors without numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from model.attention import Plan, PooledAttention
from model.batch import pack
from model.config import GPTConfig
from model.gpt import GPT
from model.step import Work

Shape = tuple[int, ...]
Note = Callable[[str, Tensor], None]

MEANINGS = {
    "tokens": "numbers of the tokens",
    "X": "embedded, positions added",
    "ln_1": "normalised",
    "Q, K, V": "X by one matrix, side by side",
    "Q": "queries, split into heads",
    "new K": "keys, split into heads",
    "new V": "values, split into heads",
    "K": "all keys, the earlier ones kept",
    "V": "all values, likewise",
    "scores": "Q Kᵀ / √d_head",
    "weights": "softmax of each row, causal",
    "H": "weights V",
    "joined": "heads side by side",
    "Y": "joined W_O",
    "ln_2": "normalised",
    "wide": "FFN, widened and bent",
    "narrow": "FFN, narrowed",
    "ln_f": "normalised after the last layer",
    "logits": "of the last row: the next token",
}


class Line(NamedTuple):
    """One matrix of the step, in the order of the computation."""

    name: str
    meaning: str
    uncached: Shape
    cached: Shape


def trace(config: GPTConfig, context: int) -> list[Line]:
    """The step that makes the token after `context` others: first layer, one sequence.

    Uncached it computes all `context` rows; cached, only the last.
    """
    uncached, cached = _run(config, 0, context), _run(config, context - 1, context)
    return [Line(name, MEANINGS[name], uncached[name], cached[name]) for name in uncached]


@torch.inference_mode()
def _run(config: GPTConfig, start: int, end: int) -> dict[str, Shape]:
    """Shapes by name while the rows of tokens[start:end] are computed."""
    nothing = torch.device("meta")
    with nothing:
        model = GPT(config)
        kv = torch.empty(config.n_layer, 2, end, config.n_kv_head, config.d_head)
    shapes: dict[str, Shape] = {}

    def note(name: str, x: Tensor) -> None:
        shapes.setdefault(name, tuple(x.shape))  # the first layer speaks for all

    _listen(model, note)
    work = Work(np.zeros(end, np.int32), start, np.arange(end, dtype=np.int32), n_prompt=end)
    batch = pack([work], nothing)
    attention = PooledAttention(partial(attend_plainly, note=note), kv, batch.plan)
    note("tokens", batch.tokens)
    hidden = model(batch.tokens, batch.positions, attention)
    note("logits", model.logits(hidden[-1:]))
    return shapes


def _listen(model: GPT, note: Note) -> None:
    """Have the modules of the first layer, and what is around it, tell what they make."""

    def output(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _module, _inputs, made: note(name, made)

    def given(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, inputs: note(name, inputs[0])

    block = model.get_submodule("h.0")
    block.register_forward_pre_hook(given("X"))
    for name in ("ln_1", "ln_2"):
        block.get_submodule(name).register_forward_hook(output(name))
    block.get_submodule("attn.c_attn").register_forward_hook(output("Q, K, V"))
    block.get_submodule("attn.c_proj").register_forward_pre_hook(given("joined"))
    block.get_submodule("attn.c_proj").register_forward_hook(output("Y"))
    block.get_submodule("mlp.c_proj").register_forward_pre_hook(given("wide"))
    block.get_submodule("mlp.c_proj").register_forward_hook(output("narrow"))
    if isinstance(model.ln_f, nn.LayerNorm):
        model.ln_f.register_forward_hook(output("ln_f"))


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, pool_layer: Tensor, plan: Plan, note: Note
) -> Tensor:
    """`attend` with every product made as such, and shown to `note` without the batch's axis."""
    keys, values = pool_layer
    keys[plan.write] = k
    values[plan.write] = v
    for name, x in (("Q", q), ("new K", k), ("new V", v)):
        note(name, x.transpose(0, 1))
    out = torch.empty_like(q)
    sharing = q.shape[1] // k.shape[1]
    for group in plan.groups:
        queries = q[group.queries].unflatten(0, (len(group.rows), -1)).transpose(1, 2)
        seen_k, seen_v = (x[group.rows].transpose(1, 2) for x in (keys, values))
        note("K", seen_k[0])
        note("V", seen_v[0])
        seen_k, seen_v = (x.repeat_interleave(sharing, dim=1) for x in (seen_k, seen_v))
        scores = queries @ seen_k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        note("scores", scores[0])
        if group.mask is not None:
            scores = scores.masked_fill(~group.mask, -math.inf)
        weights = scores.softmax(dim=-1)
        note("weights", weights[0])
        heads = weights @ seen_v
        note("H", heads[0])
        out[group.queries] = heads.transpose(1, 2).flatten(0, 1)
    return out
