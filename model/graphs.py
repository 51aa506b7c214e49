"""Decode steps that a GPU replays from a recording: network, attention and the choice of tokens.

Launched one by one, the hundreds of kernels of a small model's step take longer to launch than to
run. A CUDA graph launches them all at once, for a fixed number of lanes: there is one graph per
bucket, and a step takes the smallest that its sequences fit into. On a CPU the same steps are
called instead of replayed, which is how they are tested there.

A step can be launched before the one in front of it is read: the device finds the tokens that were
drawn there in its own memory, and computes while the CPU handles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from model import sampler
from model.gpt import GPT
from model.lanes import LaneAttention, LaneBackend, Lanes, Staging
from model.runner import Runner
from model.step import Draw, Launched, Work

FAILED = -1  # in place of a token, if the logits are not finite


class Slot:
    """What a step in flight has for itself: memory on the host that the device copies from and to,
    and the event after which both copies are done.
    """

    def __init__(self, staging: Staging, n_lanes: int, on_gpu: bool) -> None:
        self.staged = staging.block()
        self.drawn = torch.zeros(n_lanes, dtype=torch.int64, pin_memory=on_gpu)
        self.done = torch.cuda.Event() if on_gpu else None


class GraphRunner(Runner):
    """A runner that replays the decode steps of up to `n_lanes` sequences. All other steps are
    launched kernel by kernel, and their attention is the reference, which gathers the rows: the
    kernels that torch has for ragged batches read keys that lie together, in pages at least.

    Everything is captured here, so the first request waits for nothing.
    """

    def __init__(
        self,
        model: GPT,
        n_rows: int,
        kv_dtype: torch.dtype,
        *,
        n_lanes: int,
        lane_backend: LaneBackend,
    ) -> None:
        super().__init__(model, n_rows, kv_dtype)
        self.lane_backend = lane_backend
        self.buckets = buckets(n_lanes)
        self._on_gpu = self.device.type == "cuda"
        self._staging = Staging(n_lanes, self.n_ctx, n_rows, self.device)
        self._drawn = torch.zeros(n_lanes, dtype=torch.int64, device=self.device)
        # One for the step that is read next, one for the step behind it; they take turns.
        self._slots = [Slot(self._staging, n_lanes, self._on_gpu) for _ in range(2)]
        self._logits: dict[int, Tensor] = {}  # of each bucket's greedy step
        # Graphs never run at the same time, so they may share their memory; the largest ones first,
        # so that the smaller ones find enough of it.
        self._memory = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._steps = {
            (n, drawing): self._capture(n, drawing)
            for n in reversed(self.buckets)
            for drawing in (False, True)
        }

    def run(self, work: Sequence[Work]) -> list[Draw]:
        return self.launch(work).read()

    @torch.inference_mode()
    def launch(self, work: Sequence[Work]) -> Launched:
        """Begin a step; what no graph does is done when it is read. A step whose tokens the graph
        chooses leads another.
        """
        if not self.decodes(work):
            return Launched(partial(super().run, work))
        n = next(n for n in self.buckets if n >= len(work))
        plain = all(is_plain(w) for w in work)
        drawing = plain and any(w.sampling is not None and w.sampling.temperature for w in work)
        slot = self._slots[0]
        self._slots.reverse()
        self._wait(slot)  # for nothing, unless its last step was never read
        written = self._staging.write(slot.staged, work, n, drawing)
        self._enqueue(slot, written, n, drawing)
        return Launched(partial(self._read, slot, work, n, plain), leads=plain)

    def decodes(self, work: Sequence[Work]) -> bool:
        """Whether there is a graph for this step: each sequence computes one token, none is scored,
        and there are not too many of them.
        """
        single = all(w.end - w.start == 1 and w.score is None for w in work)
        return single and len(work) <= self.buckets[-1]

    def _enqueue(self, slot: Slot, written: Tensor, n: int, drawing: bool) -> None:
        """Everything that the device does in a step, in the order of its stream. Nobody waits: the
        next step is sent and computed behind this one's draws, which are copied out before.
        """
        self._staging.send(written)
        self._steps[n, drawing]()
        slot.drawn[:n].copy_(self._drawn[:n], non_blocking=True)
        if slot.done is not None:
            slot.done.record()

    def _wait(self, slot: Slot) -> None:
        """For the slot's step, but for none behind it."""
        if slot.done is not None:
            slot.done.synchronize()

    @torch.inference_mode()
    def _read(self, slot: Slot, work: Sequence[Work], n: int, plain: bool) -> list[Draw]:
        self._wait(slot)
        tokens = slot.drawn[: len(work)].tolist()
        draws = [_to_draw(w, token) for w, token in zip(work, tokens, strict=True)]
        return draws if plain else self._sample(work, n, draws)

    @torch.inference_mode()
    def _capture(self, n: int, drawing: bool) -> Callable[[], None]:
        step = partial(self._step, n, drawing)
        self._staging.send(self._staging.write(self._slots[0].staged, [], n))
        step()  # compiles kernels and has libraries allocate what they need, which no graph can
        if not self._on_gpu:
            return step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            step()
        return graph.replay

    def _step(self, n: int, drawing: bool) -> None:
        """From `n` staged lanes to `_drawn`; nothing in here may wait for the device, or be sent to
        it from the host.
        """
        lanes = self._staging.lanes(n)
        earlier = self._drawn[(-1 - lanes.tokens).clamp(min=0)].clamp(min=0)
        tokens = torch.where(lanes.tokens < 0, earlier, lanes.tokens)
        attention = LaneAttention(self.lane_backend, self.kv, lanes)
        logits = self.model.logits(self.model(tokens, lanes.positions, attention))
        chosen = choose(logits, lanes) if drawing else logits.argmax(dim=-1)
        # What is not finite makes the sum so, in one pass; and a hidden state that is not finite
        # makes all its logits so. In float64 no sum of finite ones can leave its range.
        total = logits.sum(dim=-1, dtype=torch.float64)
        self._drawn[:n].copy_(chosen.masked_fill(~torch.isfinite(total), FAILED))
        if not drawing:
            self._logits[n] = logits

    def _sample(self, work: Sequence[Work], n: int, draws: list[Draw]) -> list[Draw]:
        """Draw from the step's logits where requests want more than a temperature."""
        asking = [i for i, w in enumerate(work) if w.sampling is not None]
        sampled = sampler.sample(self._logits[n][asking], [work[i] for i in asking])
        for i, draw in zip(asking, sampled, strict=True):
            draws[i] = draw
        return draws


def buckets(n_lanes: int) -> list[int]:
    """The powers of two below `n_lanes`, and itself."""
    return [*(2**i for i in range((n_lanes - 1).bit_length())), n_lanes]


def choose(logits: Tensor, lanes: Lanes) -> Tensor:
    """Token ids (B,): where there is heat, drawn from logits `(B, n_vocab)` as `sampler.sample`
    does, with nothing from the host; the lowest of the best ones elsewhere.
    """
    logits = logits.float()
    heat = lanes.heat.clamp(min=sampler.COLDEST).to(logits.dtype)[:, None]
    weights = ((logits - logits.amax(dim=-1, keepdim=True)) / heat).exp()
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # Noise ends a bit below 1, and so does its product below the total.
    target = lanes.noise[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return torch.where(lanes.heat > 0, drawn, logits.argmax(dim=-1))


def is_plain(work: Work) -> bool:
    """Whether its token is chosen by temperature alone, and nothing is asked about it."""
    s = work.sampling
    if s is None:
        return True
    cut = s.top_k or s.top_p < 1 or s.min_p > 0
    penalties = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
    adjusted = s.logit_bias or penalties != (0.0, 0.0, 1.0) or work.banned
    return not (cut or adjusted or s.logprobs is not None)


def _to_draw(work: Work, token: int) -> Draw:
    if token == FAILED:
        return Draw(failed=True)
    return Draw(token=None if work.sampling is None else token)
