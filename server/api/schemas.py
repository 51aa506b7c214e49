"""What bodies and answers look like. Strict: "hot" is no temperature, true is no number."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from server.api.errors import shown
from server.engine.snapshot import SessionRecord

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
HUGE = 2**31  # counts stay below it
SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"

Prompt = str | list[int]
_NULL = {"type": "null"}


class Body(BaseModel):
    """A request's JSON. null means that a field is absent; unknown fields are kept by name."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            raise ValueError("the body must be a JSON object")
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()) and _NULL not in field.get("anyOf", ()):
                words = {k: field.pop(k) for k in ("title", "description", "default") if k in field}
                schema["properties"][name] = {"anyOf": [field, _NULL], **words}
        return schema

    @property
    def unknown(self) -> list[str]:
        """Names of the fields that nobody knows."""
        inner = [(name, getattr(self, name)) for name in type(self).model_fields]
        return [*(self.model_extra or ())] + [
            f"{name}.{field}"
            for name, body in inner
            if isinstance(body, Body)
            for field in body.unknown
        ]


def _prompts(value: object) -> list[Prompt]:
    """The four forms of a prompt as one list of texts and lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, token ids, or lists of token ids")
    if not value:
        raise ValueError('must not be an empty list; "" starts a text from nothing')
    if all(isinstance(part, str) for part in value):
        return value
    if isinstance(value[0], list):
        for i, part in enumerate(value):
            if not isinstance(part, list):
                raise ValueError(f"element {i} must be a list of token ids, as the first one is")
            _check_ids(part, f"element {i}, ")
        return value
    if isinstance(value[0], str):
        i = next(i for i, part in enumerate(value) if not isinstance(part, str))
        raise ValueError(f"element {i} must be a string, as the first one is")
    _check_ids(value)
    return [value]


def _one_prompt(value: object) -> Prompt:
    return value if isinstance(value, str) else _ids(value)


def _check_ids(ids: list[Any], where: str = "") -> None:
    for i, token in enumerate(ids):
        if type(token) is not int:  # a bool is an int for isinstance
            raise ValueError(f"{where}position {i} must be a token id, not {shown(token)}")


def _ids(value: object) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    _check_ids(value)
    return value


def _stop_ids(value: object) -> list[int]:
    ids = _ids(value)
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(f"must have at most {MAX_STOP_IDS} ids")
    return ids


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string"}
Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {**_IDS, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
OnePrompt = Annotated[Prompt, PlainValidator(_one_prompt), WithJsonSchema({"anyOf": [_TEXT, _IDS]})]
TokenIds = Annotated[list[int], PlainValidator(_ids), WithJsonSchema(_IDS)]
StopIds = Annotated[
    list[int],
    PlainValidator(_stop_ids),
    WithJsonSchema({**_IDS, "maxItems": MAX_STOP_IDS}),
]
_STOP: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool = Field(False, description="a last chunk with the usage")
    continuous_usage_stats: bool = Field(False, description="the usage so far in every chunk")


class CompletionBody(Body):
    """POST /v1/completions: the fields of OpenAI, then those of vLLM, then ours."""

    model: str | None = Field(None, description="the served model if it is absent")
    prompt: Prompts = Field(
        default_factory=lambda: list[Prompt]([""]),
        description="Text, token ids, or a list of either. An empty one starts from end-of-text.",
    )
    max_tokens: int | None = Field(
        None, ge=0, lt=HUGE, description="If absent: 16, or what still fits into the context."
    )
    max_completion_tokens: int | None = Field(
        None, ge=0, lt=HUGE, description="the same as max_tokens"
    )
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy")
    top_p: float = Field(1.0, ge=0, le=1, description="0 keeps the best token alone")
    n: int = Field(1, ge=1, le=MAX_N, description="completions of each prompt")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="So many are made, and the n with the highest log-probability per token "
        "returned, best first. Not with stream.",
    )
    stop: Stops = Field(
        default_factory=list,
        description=f"Up to {MAX_STOPS} literal strings; the text ends before the first one.",
    )
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    echo: bool = Field(False, description="the text begins with the prompt")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="alternatives listed beside each token"
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=MAX_BIASES, description="by token id, -100 to 100"
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="taken off tokens that this completion has"
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="taken off a token for each time that this completion has it"
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="makes a text repeatable")
    user: str | None = Field(None, description="taken, and not used for anything")

    top_k: int = Field(
        0, ge=-1, lt=HUGE, description="choose among so many tokens; 0 or -1: all (vLLM)"
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="least share of the best token's chance (vLLM)"
    )
    repetition_penalty: float = Field(1.0, ge=0.01, le=10, description="1 changes nothing (vLLM)")
    min_tokens: int = Field(0, ge=0, lt=HUGE, description="no end before so many tokens (vLLM)")
    ignore_eos: bool = Field(False, description="go on after end-of-text (vLLM)")
    stop_token_ids: StopIds = Field(default_factory=list, description="end at these tokens (vLLM)")
    skip_special_tokens: bool = Field(True, description="end-of-text is no text (vLLM)")
    return_token_ids: bool = Field(False, description="the ids, too, of each choice (vLLM)")

    use_cache: bool = Field(True, description="false computes every row anew (onerow)")
    session_id: str | None = Field(
        None, pattern=SESSION_ID, description="the session whose rows to use and keep (onerow)"
    )
    session_mode: Literal["match", "append"] = Field(
        "match",
        description="match: the prompt is the whole text; append: it goes on from what the session "
        "holds (onerow)",
    )

    # Known to OpenAI or vLLM and not done here: the values that ask for nothing.
    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "suffix": ("",),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "include_stop_str_in_output": (False,),
        "spaces_between_special_tokens": (True, False),  # there is nothing between tokens
        "add_special_tokens": (True, False),  # there is nothing to add
        "truncate_prompt_tokens": (),
        "allowed_token_ids": (),
        "prompt_logprobs": (),
        "prompt_embeds": (),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "logits_processors": ([],),
        "bad_words": ([],),
        "priority": (0,),
        "request_id": (),
        "return_tokens_as_token_ids": (False,),
        "cache_salt": (),
        "kv_transfer_params": ({},),
        "vllm_xargs": ({},),
    }

    @property
    def unknown(self) -> list[str]:
        return [name for name in super().unknown if name not in self.neutral]

    @property
    def candidates(self) -> int:
        """Completions that are made of each prompt."""
        return max(self.n, self.best_of or 1)

    @property
    def ranked(self) -> bool:
        """Whether more are made than returned."""
        return self.candidates > self.n


class TokenizeBody(Body):
    """POST /tokenize."""

    model: str | None = Field(None, description="the served model if it is absent")
    prompt: str
    add_special_tokens: bool = Field(True, description="there is nothing to add for this model")
    parse_special: bool = Field(True, description="<|endoftext|> becomes the control token")
    return_token_strs: bool = Field(False, description="the tokens' texts, too")


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = Field(None, description="the served model if it is absent")
    tokens: TokenIds


class InspectBody(Body):
    """POST /v1/inspect."""

    model: str | None = Field(None, description="the served model if it is absent")
    prompt: OnePrompt = Field(description="Text or token ids; what an empty one starts from, too.")
    layer: int = Field(0, ge=0, lt=HUGE)
    head: int = Field(0, ge=0, lt=HUGE)


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error."""

    error: Error


class LogprobsAnswer(BaseModel):
    """One entry per token, end-of-text included; only a prompt's first token has no number."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChoiceAnswer(BaseModel):
    index: int = Field(description="prompt x n + copy")
    text: str
    logprobs: LogprobsAnswer | None
    finish_reason: Literal["stop", "length"] | None = Field(description="null until the end")
    token_ids: list[int] | None = Field(None, description="only with return_token_ids")
    prompt_token_ids: list[int] | None = Field(
        None, description="only with return_token_ids, and once in a stream"
    )


class CachedAnswer(BaseModel):
    cached_tokens: int = Field(description="prompt tokens whose rows were there already")


class UsageAnswer(BaseModel):
    prompt_tokens: int = Field(description="each prompt counted once, whatever n is")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedAnswer


class TimingsAnswer(BaseModel):
    """Milliseconds, the longest of all choices, and rows, the sum over them."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    rows_computed: int
    rows_reused: int


class CompletionAnswer(BaseModel):
    """A whole answer. A chunk of a stream looks the same, with the new text alone."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[ChoiceAnswer]
    usage: UsageAnswer
    timings: TimingsAnswer


class CancelAnswer(BaseModel):
    id: str
    cancelled: bool = Field(description="false: it had ended by itself before")


class StreamEvent(BaseModel):
    """A server-sent event: `data` is a chunk in JSON, an error in JSON, or [DONE]."""

    data: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "onerow"
    root: str = Field(description="where the model came from")
    max_model_len: int = Field(description="tokens of prompt and completion together")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str = "tiktoken"
    vocab_size: int
    model_max_length: int
    bos_token: str
    eos_token: str
    eos_token_id: int


class RowCounts(BaseModel):
    """total = free + running + idle; shared rows are held by two sequences or more."""

    total: int
    free: int = Field(description="with named keys: all rows that are not the caller's")
    running: int
    idle: int
    shared: int


class CacheTotals(BaseModel):
    """Counted since the start."""

    steps: int
    rows_computed: int
    rows_recomputed: int
    rows_reused: int
    rows_evicted: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    sessions_expired: int
    sessions_evicted: int


class SessionAnswer(BaseModel):
    id: str
    tokens: int
    rows: int
    shared_rows: int = Field(description="of its rows, those that another sequence holds, too")
    bytes: int = Field(description="shared rows counted in full")
    turns: int
    reused: int = Field(description="prompt tokens of its turns that were not computed")
    created: float
    last_used: float
    expires: float | None = Field(description="null: never")

    @classmethod
    def of(cls, record: SessionRecord) -> SessionAnswer:
        fields = {name: getattr(record, name) for name in cls.model_fields if name != "id"}
        return cls(id=record.name, **fields)


class SessionList(BaseModel):
    object: Literal["list"] = "list"
    data: list[SessionAnswer]


class SessionTextAnswer(SessionAnswer):
    """A session with what it holds."""

    text: str
    token_ids: list[int]
    turn_ends: list[int] = Field(description="tokens after each turn of those that it holds")


class NewSessionBody(Body):
    """POST /v1/sessions and /v1/sessions/{id}/fork."""

    id: str | None = Field(None, pattern=SESSION_ID, description="of the new session; or a new one")


class RewindBody(Body):
    """POST /v1/sessions/{id}/rewind: one of the two."""

    tokens: int | None = Field(None, ge=0, lt=HUGE, description="tokens to keep")
    turn: int | None = Field(None, ge=0, lt=HUGE, description="turns to keep")


class DeletedAnswer(BaseModel):
    id: str
    deleted: Literal[True]


class ResetAnswer(BaseModel):
    """What emptying the cache has dropped."""

    rows_freed: int
    sequences_forgotten: int = Field(description="anonymous ones")
    sessions_kept: int = Field(description="that had rows: their tokens stay")


class RowRunAnswer(BaseModel):
    """Rows that are alike: `n` of them from `start` on."""

    start: int
    n: int
    state: Literal["free", "running", "idle"] = Field(
        description="with named keys, rows of other callers look free"
    )
    owner: str | None = Field(description="a session, or the call that runs; null: anonymous")
    holders: int = Field(description="sequences that hold each of the rows")


class RowsAnswer(BaseModel):
    total: int
    runs: list[RowRunAnswer] = Field(description="all rows, in order, run-length coded")


class CacheAnswer(BaseModel):
    device: str
    dtype: str = Field(description="type of the numbers in the weights")
    rows_dtype: str = Field(description="type of the numbers in the rows")
    row_bytes: int
    bytes: int = Field(description="bytes of the rows that are not free")
    rows: RowCounts
    totals: CacheTotals | None = Field(
        description="null with named keys: they count what everyone does, as /metrics does"
    )
    sessions: list[SessionAnswer]


class CacheEvent(CacheAnswer):
    """The cache as it is now, with those `sessions` that were used last."""

    n_sessions: int = Field(description="all that the caller has")
    runs: list[RowRunAnswer] = Field(description="that were not like this in the event before")


class MatrixAnswer(BaseModel):
    name: str
    meaning: str
    uncached: list[int] = Field(description="its shape when all rows are computed")
    cached: list[int] = Field(description="its shape when only the last row is")


class InspectAnswer(BaseModel):
    """One head of one layer over T tokens. Row i of a grid has i + 1 numbers: what it may see."""

    tokens: list[int]
    token_strs: list[str]
    layer: int
    head: int
    n_layer: int
    n_head: int
    scores: list[list[float]] = Field(description="Q times K transposed, by the root of d_head")
    weights: list[list[float]] = Field(description="softmax of each row of scores")
    row: list[float] = Field(description="the last row of weights, computed by itself")
    shapes: list[MatrixAnswer]


class StatusAnswer(BaseModel):
    status: Literal["loading", "ready", "draining", "failed"]


class VersionAnswer(BaseModel):
    version: str
