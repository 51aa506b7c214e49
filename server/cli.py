"""The command. What is slow to import is imported where it is used, so that --help is not slow."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.measure import Measurement

from model.config import PRESETS, GPTConfig
from server.settings import CPU_MEMORY, Settings, SettingsError
from server.version import VERSION

app = typer.Typer(
    help="A small GPT inference server: each new token computes only its own row.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

USAGE, FAILED, INTERRUPTED = 2, 1, 130


def main() -> None:
    app(prog_name="onerow")


def _fail(message: object, code: int) -> NoReturn:
    typer.echo(f"onerow: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What can go wrong while a model is found and loaded is said in one line."""
    from model.checkpoint import CheckpointError
    from server.loading import LoadError

    try:
        yield
    except (CheckpointError, LoadError) as error:
        _fail(error, FAILED)


def _settings(**flags: object) -> Settings:
    try:
        return Settings.load(**flags)
    except SettingsError as error:
        _fail(error, USAGE)


@app.callback(invoke_without_command=True)
def _onerow(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(f"onerow {VERSION}")
        raise typer.Exit


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` a flag for every setting: its name, its words, its default."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_flag(field)
        )
        for name, field in Settings.model_fields.items()
    ]
    command.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
    return command


def _flag(field: FieldInfo) -> object:
    """The flag hands over text; the settings know what it means, as they do for variables."""
    default = field.get_default(call_default_factory=True)
    shown = default.human_readable() if isinstance(default, ByteSize) else default
    words = field.description if default is None else f"{field.description} [{shown}]"
    if field.annotation is bool:
        return Annotated[bool | None, typer.Option(help=words, show_default=False)]
    return Annotated[str | None, typer.Option(help=words, metavar=_metavar(field.annotation))]


def _metavar(annotation: object) -> str:
    """What kind of value a setting takes, in a word."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    kinds = {getattr(kind, "__origin__", kind) for kind in (annotation, *get_args(annotation))}
    words: dict[object, str] = {ByteSize: "SIZE", int: "N", float: "SECONDS"}
    return next((word for kind, word in words.items() if kind in kinds), "TEXT")


@app.command()
@_with_settings
def serve(
    workers: Annotated[int, typer.Option(metavar="1", help="there is one process")] = 1,
    **given: Any,  # noqa: ANN401  # one for each setting
) -> None:
    """Serve a model over HTTP.

    Every flag but --workers is also a variable: --port is ONEROW_PORT.
    """
    if max(workers, _number(os.environ.get("WEB_CONCURRENCY"))) > 1:
        _fail(
            "--workers, WEB_CONCURRENCY: rows and sessions live in one process, and another "
            "would not see them; start one server per port instead",
            USAGE,
        )
    settings = _settings(**given)
    from server.app import serve as serve_app
    from server.loading import load_engine

    raise typer.Exit(serve_app(settings, load_engine))


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


Model = Annotated[str | None, typer.Option(help="stories, or the folder or file of a model")]
Device = Annotated[str | None, typer.Option(metavar="auto|cpu|cuda")]
Dtype = Annotated[str | None, typer.Option(metavar="auto|float32|bfloat16|int8")]
ModelOrPreset = Annotated[str, typer.Argument(help="a model as for serve, or gpt2 ... gpt2-xl")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object")]
Seed = Annotated[int | None, typer.Option(min=0, help="the same seed gives the same text")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue")],
    model: Model = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="by default up to the end")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="choose among the k likeliest; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="and within this much")] = 1.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="ends the text; may be repeated")] = None,
    cache: Annotated[bool, typer.Option(help="keep rows, or compute all for each token")] = True,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Continue a text here in the terminal, without a server."""
    settings = _settings(model=model, device=device, dtype=dtype)
    with _one_line_errors():
        from model.step import Sampling
        from server.generation import GenerationError, plan, run
        from server.loading import load_engine

        engine = load_engine(settings)
    seed = secrets.randbits(32) if seed is None else seed
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    try:
        request = plan(engine, prompt, sampling, max_tokens, tuple(stop or ()), use_cache=cache)
    except GenerationError as error:
        _fail(error, USAGE)
    try:
        outcome = run(engine, request, partial(typer.echo, nl=False))
    except GenerationError as error:
        _fail(error, FAILED)
    typer.echo()
    typer.echo(
        f"{outcome.tokens} tokens, {outcome.tokens_per_second:.1f} tokens/s, the first after "
        f"{1000 * outcome.ttft:.0f} ms; {outcome.ending}; seed {seed}",
        err=True,
    )
    if outcome.ending == "interrupted":
        raise typer.Exit(INTERRUPTED)


@app.command()
def info(
    model: ModelOrPreset = "stories",
    tokens: Annotated[int, typer.Option(min=1, help="length of a session to count")] = 256,
    memory: Annotated[
        str | None, typer.Option(help="bytes for rows, such as 2GiB; by default as for serve")
    ] = None,
    bandwidth: Annotated[float, typer.Option(min=1e-3, help="GB/s that the machine reads")] = 50,
    compute: Annotated[float, typer.Option(min=1e-3, help="GFLOP/s that it computes")] = 500,
    as_json: AsJson = False,
) -> None:
    """Print what a model costs, and how many sessions a machine has room and time for.

    Parameters, operations with the cache and without, bytes per row, sessions per GiB.
    """
    from server.info import Cost, Machine

    room = _settings(kv_cache_memory=memory).kv_cache_memory or CPU_MEMORY
    machine = Machine(room, 1e9 * bandwidth, 1e9 * compute)
    cost = Cost.of(model, PRESETS.get(model) or _read_config(model), tokens, machine)
    if as_json:
        typer.echo(json.dumps(cost.as_json()))
    else:
        Console().print(cost.tables())


@app.command()
def trace(
    model: ModelOrPreset = "stories",
    tokens: Annotated[int, typer.Option(min=1, help="tokens that are there already")] = 4,
    as_json: AsJson = False,
) -> None:
    """Print the shape of every matrix in one step: all rows computed, and only the new one."""
    config = PRESETS.get(model) or _read_config(model)
    if tokens > config.n_ctx:
        _fail(f"--tokens: the window of {model} is {config.n_ctx}", USAGE)
    from model.trace import trace as trace_step
    from server.info import shapes

    lines = trace_step(config, tokens)
    if as_json:
        typer.echo(json.dumps([line._asdict() for line in lines]))
    else:
        Console().print(shapes(model, config, tokens, lines))


@app.command()
def train(
    files: Annotated[
        list[Path],
        typer.Argument(help="stories, each ended by <|endoftext|>", exists=True, dir_okay=False),
    ],
    run: Annotated[Path, typer.Option(help="folder of the run: what it needs to go on")],
    out: Annotated[Path, typer.Option(help="folder of the finished model")],
    tokens: Annotated[int | None, typer.Option(min=1, help="tokens to learn from")] = None,
    seed: Seed = None,
    preset: Annotated[str, typer.Option(help="shape of the model")] = "stories",
    device: Device = None,
    compiled: Annotated[bool, typer.Option("--compile", help="compile the network first")] = False,
) -> None:
    """Train a model; the same command again goes on where it stopped.

    Of the first file every 50th story is held out, to measure with; of the others a share is used.
    """
    if not importlib.util.find_spec("tokenizers"):
        _fail("training needs tokenizers: pip install 'onerow[train]'", FAILED)
    if preset not in PRESETS:
        _fail(f"--preset: one of {', '.join(PRESETS)}", USAGE)
    settings = _settings(device=device)
    with _one_line_errors():
        from model import train as training
        from server.loading import placement

        place = placement(settings.device, "float32")
    given = {"tokens": tokens, "seed": seed}
    recipe = training.Recipe(**{name: n for name, n in given.items() if n is not None})
    try:
        bits = training.train(
            files, run, out, PRESETS[preset], recipe, place.device, compiled=compiled
        )
    except ValueError as error:
        _fail(error, USAGE)
    except KeyboardInterrupt:
        _fail("stopped; the same command goes on from the last checkpoint", INTERRUPTED)
    typer.echo(f"{out}: {bits:.4f} bits per byte of the held-out stories")


def _read_config(model: str) -> GPTConfig:
    with _one_line_errors():
        from model import checkpoint, formats

        return formats.read(checkpoint.resolve(model)).config


Contexts = Annotated[list[int] | None, typer.Option(min=1, help="tokens of the prompt")]
Tokens = Annotated[list[int] | None, typer.Option(min=2, help="tokens generated in each answer")]
Concurrency = Annotated[
    list[int] | None, typer.Option(min=1, help="conversations at once; with --rate the most")
]
Rates = Annotated[
    list[float] | None, typer.Option(min=1e-3, help="conversations that begin per second")
]
Shares = Annotated[
    list[float] | None, typer.Option(min=0, max=1, help="share of the prompt that all have")
]
Turns = Annotated[list[int] | None, typer.Option(min=1, help="requests of a conversation")]
Conversations = Annotated[
    int | None, typer.Option(min=1, help="conversations in each run, of --turns requests each")
]
OneArm = Annotated[
    Literal["cached", "uncached"] | None, typer.Option(help="measure this one alone")
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(metavar="auto|float32|bfloat16|int8", help="with --engine several are measured"),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=COMMAND",
        help="with --engine: measure this, too; transformers, ctranslate2 and openvino are known: "
        "'LIBRARY [MODEL] [python=FILE] [dtype=TYPE]'",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="with --engine: decode-8x128 (streams, prompt) and the like"),
]
Growth = Annotated[
    bool, typer.Option("--growth", help="with --engine: more contexts, streams and sizes of pool")
]
SLO_HELP = "limits in ms for goodput, such as ttft=200,tpot=50 (also e2e)"


# What `bench` takes with --engine, and what it takes then only.
ENGINE = {"model", "device", "dtype", "threads", "repeats", "seed", "out"}
ENGINE_ONLY = {"kv_cache_memory", "peer", "cell", "growth", "patience"}


@app.command()
def bench(
    call: typer.Context,
    url: Annotated[str | None, typer.Option(help="a server that runs; without it, our own")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ONEROW_API_KEY")] = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtypes = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of our server")] = None,
    preset: Annotated[Literal["quick", "standard", "full"], typer.Option()] = "quick",
    context: Contexts = None,
    tokens: Tokens = None,
    concurrency: Concurrency = None,
    rate: Rates = None,
    shared: Shares = None,
    turns: Turns = None,
    conversations: Conversations = None,
    arm: OneArm = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="runs of each load and arm")] = None,
    slo: Annotated[str | None, typer.Option(metavar="LIMITS", help=SLO_HELP)] = None,
    seed: Seed = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("onerow-bench"),
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="only compare two result.json")
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="measure the engine alone, without HTTP")
    ] = False,
    kv_cache_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="with --engine: memory for rows")
    ] = None,
    peer: Peers = None,
    cell: Names = None,
    growth: Growth = False,
    patience: Annotated[
        float,
        typer.Option(min=0, help="with --engine: seconds to wait for a quiet machine, in all"),
    ] = 60.0,
) -> None:
    """Measure what the cache is worth, with the cache and without, side by side.

    A preset sweeps everything: quick takes less than a minute, standard minutes, full an hour or
    more. Any of --context, --tokens, --concurrency, --rate, --shared, --turns replaces its sweeps:
    what is given several times is swept, what is given once holds for all.

    With --engine, the bare engine: each figure beside the least time that the machine's bandwidth
    and arithmetic allow, which are measured first, and beside peers that are measured in turn.
    """
    typed = {name for name in call.params if _typed(call, name)} - {"engine"}
    if alien := sorted(typed - ENGINE - ENGINE_ONLY if engine else typed & ENGINE_ONLY):
        _fail(f"--{alien[0].replace('_', '-')}: {'not' if engine else 'only'} with --engine", USAGE)
    if engine:
        own = {"model": model, "device": device, "threads": threads}
        own["kv_cache_memory"] = kv_cache_memory
        _bench_engine(
            own, dtype or [], peer or [], cell or [], growth, repeats, seed, patience, out
        )
        return
    if compare:
        _compare(*compare)
        return
    if dtype and len(dtype) > 1:
        _fail("--dtype: several only with --engine", USAGE)
    from server.loadtest import workload
    from server.loadtest.bench import WorkloadError, command_line, run
    from server.loadtest.client import ServerError
    from server.loadtest.figures import Objective
    from server.loadtest.host import own_server
    from server.loadtest.report import tables
    from server.loadtest.target import Target

    own = {"model": model, "device": device, "dtype": dtype[0] if dtype else None}
    own["threads"] = threads
    settings = _settings(**own)  # what the server would refuse is refused here, with its words
    flags = [f"--{name}={value}" for name, value in own.items() if value is not None]
    if url and flags:
        _fail(f"{flags[0]}: the server at --url has its own", USAGE)
    try:
        objective = Objective.read(slo) if slo else None
    except ValueError as error:
        _fail(f"--slo: {error}", USAGE)
    seed = secrets.randbits(32) if seed is None else seed  # a server that runs knows old prompts
    several = zip(workload.SWEEPS, (context, tokens, concurrency, rate, shared, turns), strict=True)
    given = {name: values for name, values in several if values}
    facts = {
        "threads": None if url else settings.threads,
        "server": url or " ".join(["onerow serve", *flags]),
        "preset": None if given else preset,
        "command_line": shlex.join(["onerow", *command_line(sys.argv[1:], api_key)]),
    }
    try:
        with own_server(flags) if url is None else nullcontext(url) as address:
            target = Target.at(address, api_key)
            if arm:
                target = target.alone(workload.Arm(arm))
            size = target.window, repeats, conversations
            work = workload.plan(workload.PRESETS[preset], given, *size)
            outcome = run(address, api_key, target, work, seed, objective, facts)
    except ServerError as error:
        _fail(error, FAILED)
    except WorkloadError as error:
        _fail(error, USAGE)
    try:
        paths = outcome.write(out, work)
    except OSError as error:
        _fail(f"--out: {out}: {error.strerror}", FAILED)
    summary = outcome.summary
    Console().print(tables(outcome.comparisons, outcome.cells, summary))
    for words in summary["warnings"]:
        typer.echo(f"onerow: {words}", err=True)
    for reason, n in outcome.errors.items():
        typer.echo(f"onerow: {n} times: {reason}", err=True)
    typer.echo(f"written: {', '.join(map(str, paths))}", err=True)
    typer.echo(json.dumps(summary))
    if summary["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if outcome.failed:
        raise typer.Exit(FAILED)


def _typed(call: typer.Context, name: str) -> bool:
    source = call.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _bench_engine(
    own: dict[str, Any],
    dtypes: list[str],
    peers: list[str],
    names: list[str],
    growth: bool,
    repeats: int | None,
    seed: int | None,
    patience: float,
    out: Path,
) -> None:
    from server.loadtest.engine import cells, contenders, report
    from server.loadtest.engine.bench import EngineError, Plan, run
    from server.loadtest.report import table

    settings = [_settings(**own, dtype=dtype) for dtype in (dtypes or (None,))]
    names_of = ("model", "device", "dtype", "threads", "kv_cache_memory")
    options = {name: getattr(settings[0], name) for name in names_of}
    try:
        work = [cells.Cell.read(name) for name in names or cells.DEFAULT]
        taking_part = contenders.all_of(options, dtypes, peers, full=growth)
    except (cells.CellError, contenders.PeerError) as error:
        _fail(error, USAGE)
    plan = Plan(
        contenders=taking_part,
        cells=work,
        growth=growth,
        repeats=repeats or 5,
        threads=settings[0].threads,
        seed=secrets.randbits(32) if seed is None else seed,
        patience=patience,
    )
    command_line = shlex.join(["onerow", *sys.argv[1:]])
    try:
        outcome = run(plan, {"model": settings[0].model, "command_line": command_line})
    except EngineError as error:
        _fail(error, FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    try:
        paths = outcome.write(out)
    except OSError as error:
        _fail(f"--out: {out}: {error.strerror}", FAILED)
    figures = table(report.rows(outcome), report.title(outcome), report.NOTE)
    console = Console()
    if not console.is_terminal:  # a file may be as wide as it needs to be
        console.width = Measurement.get(console, console.options.update(width=999), figures).maximum
    console.print(figures)
    for words in report.remarks(outcome):
        typer.echo(f"onerow: {words}", err=True)
    typer.echo(f"written: {', '.join(map(str, paths))}", err=True)
    typer.echo(json.dumps(outcome.summary))
    if outcome.summary["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if outcome.failed:
        raise typer.Exit(FAILED)


def _compare(first: Path, second: Path) -> None:
    from server.loadtest import comparison
    from server.loadtest.report import table
    from server.loadtest.result import ResultError, read

    try:
        a, b = read(first), read(second)
        rows, differences = comparison.rows(a, b), comparison.differences(a, b)
    except ResultError as error:
        _fail(error, FAILED)
    Console().print(table(rows, f"a: {first}, b: {second}"))
    for words in differences:
        typer.echo(f"onerow: not the same: {words}", err=True)
    if len(rows) == 1:
        _fail("the two have no load in common", FAILED)
