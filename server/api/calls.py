"""From a checked body to the engine's requests: token ids, the window, limits, seeds.

The engine checks nothing, so everything that could go wrong there is refused here, by name.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from model.step import Sampling
from model.tokenizer import Tokenizer, TokenizerError
from server.api.aside import aside
from server.api.errors import ApiError, bad_request, shown, too_long
from server.api.schemas import CompletionBody, Prompt, StreamOptions
from server.engine.sequence import Request
from server.engine.worker import Served
from server.settings import Settings

DEFAULT_MAX_TOKENS = 16
LONG = 4096  # characters from which on encoding leaves the event loop
COLDEST = 1e-5  # temperatures below it are greedy
MAX_NUMBERS = 300_000  # log-probabilities in one answer, alternatives among them


@dataclass(frozen=True)
class Call:
    """One request of HTTP: the engine's requests, in order of their index, and how to answer."""

    id: str
    created: int
    model: str
    n: int  # choices of each prompt in the answer
    candidates: int  # of which they are the best
    requests: list[Request]  # all candidates of the first prompt, then of the next
    stream: StreamOptions | None  # None: answer in one piece
    logprobs: bool
    token_ids: bool
    numbers: int  # log-probabilities to be had, in the answer or to choose by

    @cached_property
    def prompt_tokens(self) -> int:
        """Each prompt counted once, whatever n is."""
        return sum(len(request.prompt) for request in self.requests[:: self.candidates])


def check_model(name: str | None, served: Served, settings: Settings) -> None:
    """Refuse a name that is not the served one, and say which is. Its root is a name, too: vllm
    bench takes it from the list of models.
    """
    if name not in (None, served.name, served.root) and not settings.lenient_model:
        message = f"The model {shown(name)} does not exist; this server has {shown(served.name)}."
        raise ApiError(404, message, param="model", code="model_not_found")


async def make_call(
    body: CompletionBody,
    served: Served,
    settings: Settings,
    tenant: str,
    held: Sequence[int] = (),
) -> Call:
    """Everything is checked in here; an error is an ApiError that names the field. `held` are the
    tokens of a session that the prompt goes on from.
    """
    check_model(body.model, served, settings)
    _check_fields(body)
    _check_size(body, settings)
    biases = _logit_bias(body, served)
    stop_ids = _stop_ids(body, served)
    prompts = await _encode_prompts(body.prompt, served, held)
    max_tokens = _max_tokens(body, prompts, served.n_ctx)
    logprobs = 0 if body.logprobs is None and body.ranked else body.logprobs
    numbers = _numbers(body, prompts, max_tokens)
    name = f"cmpl-{uuid.uuid4().hex}"
    requests = []
    for number, prompt in enumerate(prompts):
        seed = secrets.randbits(63) if body.seed is None else body.seed
        for copy in range(body.candidates):
            requests.append(
                Request(
                    id=name,
                    index=number * body.candidates + copy,
                    prompt=tuple(prompt),
                    max_tokens=max_tokens[number],
                    sampling=Sampling(
                        temperature=body.temperature if body.temperature >= COLDEST else 0.0,
                        top_k=max(body.top_k, 0),
                        top_p=body.top_p,
                        min_p=body.min_p,
                        seed=seed,
                        copy=copy,
                        logit_bias=biases,
                        presence_penalty=body.presence_penalty,
                        frequency_penalty=body.frequency_penalty,
                        repetition_penalty=body.repetition_penalty,
                        logprobs=logprobs,
                    ),
                    stop=tuple(body.stop),
                    stop_ids=stop_ids,
                    min_tokens=body.min_tokens,
                    echo=body.echo,
                    score_prompt=body.echo and body.logprobs is not None,
                    use_cache=body.use_cache,
                    session=body.session_id,
                    tenant=tenant,
                    after=number * body.candidates if copy and body.use_cache else None,
                    show_special=not body.skip_special_tokens,
                )
            )
    stream = (body.stream_options or StreamOptions()) if body.stream else None
    return Call(
        id=name,
        created=int(time.time()),
        model=served.name,
        n=body.n,
        candidates=body.candidates,
        requests=requests,
        stream=stream,
        logprobs=body.logprobs is not None,
        token_ids=body.return_token_ids,
        numbers=numbers,
    )


async def encode(text: str, tokenizer: Tokenizer, *, special: bool = False) -> list[int]:
    """Token ids of a text; a long one is encoded in a thread."""
    try:
        return await aside(len(text) >= LONG, lambda: tokenizer.encode(text, special=special))
    except TokenizerError as error:
        raise bad_request(f"prompt: {error}", "prompt") from error


def check_ids(ids: list[int], served: Served, param: str) -> None:
    for i, token in enumerate(ids):
        if not 0 <= token < served.n_vocab:
            raise _no_token(f"{shown(token)} at position {i}", served, param)


def _no_token(what: str, served: Served, param: str) -> ApiError:
    ids = f"token ids are 0 to {served.n_vocab - 1}"
    return bad_request(f"{param}: {what} is no token id; {ids}", param)


def _check_fields(body: CompletionBody) -> None:
    """Rules between fields, and fields that are known but not supported."""
    for name, neutral in CompletionBody.neutral.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and not any(
            value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in neutral
        ):
            raise bad_request(f"{name}: this server does not support {shown(value)}", name)
    if body.best_of is not None and 1 < body.best_of < body.n:
        raise bad_request(f"best_of: it must not be below n ({body.n})", "best_of")
    if body.ranked and body.stream:
        raise bad_request("best_of: nothing can be ranked in a stream", "best_of")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: allowed only with stream", "stream_options")
    if body.session_id is not None and (len(body.prompt) > 1 or body.candidates > 1):
        raise bad_request("session_id: a session takes one prompt and n = 1", "session_id")
    if body.session_mode == "append" and body.session_id is None:
        raise bad_request("session_mode: append needs a session_id", "session_mode")


def _check_size(body: CompletionBody, settings: Settings) -> None:
    if len(body.prompt) > settings.max_prompts:
        message = f"prompt: {len(body.prompt)} prompts; the limit is {settings.max_prompts}"
        raise bad_request(message, "prompt")
    if (choices := len(body.prompt) * body.candidates) > settings.max_open:
        name = "best_of" if body.ranked else "n"
        limit = settings.max_open
        message = f"{name}: {choices} completions (prompts x {name}); the limit is {limit}"
        raise bad_request(message, name)


async def _encode_prompts(
    prompts: list[Prompt], served: Served, held: Sequence[int]
) -> list[list[int]]:
    """Token ids of every prompt, after what its session holds. Where there is nothing at all, the
    text starts from end-of-text.
    """
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_length(prompt, served)
            ids = await encode(prompt, served.tokenizer)
        else:
            ids = prompt
            if len(ids) > served.n_ctx:
                raise too_long(served.n_ctx, f"but a prompt has {len(ids)} tokens.")
            check_ids(ids, served, "prompt")
        encoded.append([*held, *ids] or [served.tokenizer.end_of_text])
    return encoded


def _check_length(text: str, served: Served) -> None:
    """Refuse a text that cannot fit, whatever its tokens are, without encoding it."""
    if len(text.encode()) > served.n_ctx * served.tokenizer.longest_token:
        raise too_long(served.n_ctx, f"but a prompt has more than {served.n_ctx} tokens.")


def _max_tokens(body: CompletionBody, prompts: list[list[int]], n_ctx: int) -> list[int]:
    """Tokens to generate for each prompt: as asked, or by default as many of 16 as fit."""
    asked = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    if asked is not None and body.max_completion_tokens not in (None, asked):
        message = "max_completion_tokens: not the same as max_tokens"
        raise bad_request(message, "max_completion_tokens")
    counts = []
    for prompt in prompts:
        least = 1 if asked is None else asked
        if len(prompt) + least > n_ctx:
            raise too_long(
                n_ctx,
                f"but you asked for {len(prompt) + least} tokens "
                f"({len(prompt)} in the prompt, {least} in the completion).",
            )
        counts.append(min(DEFAULT_MAX_TOKENS, n_ctx - len(prompt)) if asked is None else asked)
    if body.min_tokens > min(counts):
        message = f"min_tokens: {body.min_tokens} is above max_tokens ({min(counts)})"
        raise bad_request(message, "min_tokens")
    return counts


def _logit_bias(body: CompletionBody, served: Served) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, bias in body.logit_bias.items():
        known = key.isascii() and key.isdigit() and len(key) < 10 and int(key) < served.n_vocab
        if not known or key != str(int(key)):  # "007" and "7" would be one token twice
            raise _no_token(shown(key), served, "logit_bias")
        biases.append((int(key), bias))
    return tuple(biases)


def _stop_ids(body: CompletionBody, served: Served) -> frozenset[int]:
    check_ids(body.stop_token_ids, served, "stop_token_ids")
    end = () if body.ignore_eos else (served.tokenizer.end_of_text,)
    return frozenset((*body.stop_token_ids, *end))


def _numbers(body: CompletionBody, prompts: list[list[int]], max_tokens: list[int]) -> int:
    """Log-probabilities of all candidates. They are bounded for the memory and time they take."""
    if body.logprobs is None and not body.ranked:
        return 0
    tokens = sum(max_tokens) + (sum(map(len, prompts)) if body.echo else 0)
    numbers = tokens * body.candidates * ((body.logprobs or 0) + 1)
    if numbers > MAX_NUMBERS:
        name = "best_of" if body.logprobs is None else "logprobs"
        message = f"{name}: {numbers} log-probabilities in one call; the limit is {MAX_NUMBERS}"
        raise bad_request(message, name)
    return numbers
