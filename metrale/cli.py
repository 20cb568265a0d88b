"""The command line: `metrale generate`, `metrale info`, `metrale bench`.

Knows options, exit codes and how an error reads. Exit codes: 0 done; 1 outputs differ under --compare, or the
request ended in an error; 2 bad input, in one sentence on stderr; 130 interrupted; 141 the reader went away.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from metrale import SamplingParams, __version__, cli_generate, cli_info
from metrale.config import EngineConfig, SpeculativeConfig
from metrale.errors import CapacityError, ConfigError, RequestError

if TYPE_CHECKING:
    from metrale import LLM

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Text from hybrid Gated DeltaNet models, with speculative decoding that changes not one bit.",
)

EXIT_DIFFERENT = 1
EXIT_BAD_INPUT = 2
EXIT_CLOSED_PIPE = 141
EXIT_INTERRUPTED = 130


@contextmanager
def _boundary() -> Iterator[None]:
    """Turns our errors into one sentence, an interrupt and a closed pipe into their exit codes."""
    try:
        yield
    except (CapacityError, ConfigError, RequestError) as error:
        print(f"metrale: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt
    except BrokenPipeError as closed:
        # The interpreter flushes stdout once more on its way out, which would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_CLOSED_PIPE) from closed


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"metrale {__version__}")
        raise typer.Exit


@app.callback()
def _metrale(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@contextmanager
def _notice(message: str) -> Iterator[None]:
    """Says on a terminal's stderr what takes its time; a pipe sees nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(escape(message)):
        yield


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt, exactly as it was given: no line end is cut off."""
    if (prompt is None) == (prompt_file is None):
        raise RequestError(
            "give one prompt: as an argument, as - to read standard input, or with --prompt-file"
        )
    if prompt_file is not None:
        try:
            return prompt_file.read_bytes().decode("utf-8")
        except OSError as error:
            raise RequestError(f"the prompt file {prompt_file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RequestError(f"the prompt file {prompt_file} is not UTF-8 text") from error
    assert prompt is not None
    data = sys.stdin.buffer.read() if prompt == "-" else prompt.encode("utf-8", "surrogateescape")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("the prompt is not UTF-8 text") from error


def _speculative_config(text: str | None, options: dict[str, Any]) -> dict[str, Any] | None:
    """--speculative-config's object with the single options laid over it; None: plain decode."""
    config: dict[str, Any] = {}
    if text is not None:
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--speculative-config is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError('--speculative-config must be a JSON object, like {"method": "mtp"}')
    config |= {name: value for name, value in options.items() if value is not None}
    if config and "method" not in config:
        raise ConfigError(f"{', '.join(config)} without a method: add --method mtp or --method ngram")
    return config or None


ENGINE = "Engine"
SAMPLING = "Sampling"
SPECULATION = "Speculation"
OUTPUT = "Output"


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    model: Annotated[
        str, typer.Option(help='"tiny" (embedded), a directory, or a Hub repository.', rich_help_panel=ENGINE)
    ] = "tiny",
    backend: Annotated[
        str, typer.Option(help="auto, cpu or torch.", rich_help_panel=ENGINE)
    ] = EngineConfig.backend,
    device: Annotated[str, typer.Option(rich_help_panel=ENGINE)] = EngineConfig.device,
    dtype: Annotated[
        str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=ENGINE)
    ] = EngineConfig.dtype,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output.", rich_help_panel=ENGINE)
    ] = EngineConfig.max_model_len,
    max_num_seqs: Annotated[int, typer.Option(rich_help_panel=ENGINE)] = EngineConfig.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Rows of one step.", rich_help_panel=ENGINE)
    ] = EngineConfig.max_num_batched_tokens,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(help="Most memory for keys and values.", rich_help_panel=ENGINE)
    ] = EngineConfig.kv_cache_memory_bytes,
    method: Annotated[
        str | None,
        typer.Option(help="mtp or ngram; without it, plain decode.", rich_help_panel=SPECULATION),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Drafts a step. (default: {SpeculativeConfig.num_speculative_tokens})",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    prompt_lookup_max: Annotated[
        int | None,
        typer.Option(
            help=f"Longest suffix that ngram matches. (default: {SpeculativeConfig.prompt_lookup_max})",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    prompt_lookup_min: Annotated[
        int | None,
        typer.Option(
            help=f"Shortest suffix that ngram matches. (default: {SpeculativeConfig.prompt_lookup_min})",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='All keys as one JSON object, like {"method": "mtp"}. The options above win over it.',
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate.", rich_help_panel=SAMPLING)
    ] = SamplingParams.max_tokens,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy, the default on the command line.", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_k: Annotated[int, typer.Option(rich_help_panel=SAMPLING)] = SamplingParams.top_k,
    top_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = SamplingParams.top_p,
    min_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING)] = SamplingParams.min_p,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampled tokens.", rich_help_panel=SAMPLING)
    ] = SamplingParams.seed,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="End at this token id; repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.", rich_help_panel=SAMPLING)
    ] = SamplingParams.ignore_eos,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Log-probabilities of this many best ids a token, in --json.", rich_help_panel=SAMPLING
        ),
    ] = SamplingParams.logprobs,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run plain decode too; exit 1 unless all outputs are identical.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the text and nothing else.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Continue a prompt: the text as it comes, then its speed and how many drafts were accepted."""
    with _boundary():
        text = _read_prompt(prompt, prompt_file)
        drafts = _speculative_config(
            speculative_config,
            {
                "method": method,
                "num_speculative_tokens": num_speculative_tokens,
                "prompt_lookup_max": prompt_lookup_max,
                "prompt_lookup_min": prompt_lookup_min,
            },
        )
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop or None,
            stop_token_ids=stop_token_id or None,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        engine: dict[str, Any] = {
            "model": model,
            "backend": backend,
            "device": device,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
        }

        def load(speculation: dict[str, Any] | None) -> LLM:
            from metrale import LLM

            return LLM(**engine, speculative_config=speculation)

        with _notice(f"loading {model}"):
            llm = load(drafts)
        if as_json:
            result = cli_generate.generate(llm, text, params)
        else:
            result = cli_generate.stream(llm, text, params, cli_generate.write_stdout)
        if not (as_json or quiet or result.text.endswith("\n")):
            cli_generate.write_stdout("\n")
        plain = None
        if compare:
            with _notice("plain decode, to compare"):
                plain = cli_generate.generate(load(None), text, params)
        _show(result, plain, as_json=as_json, is_quiet=quiet)


def _show(
    result: cli_generate.Generation, plain: cli_generate.Generation | None, *, as_json: bool, is_quiet: bool
) -> None:
    """What follows the text, and the exit code."""
    difference = None if plain is None else cli_generate.first_difference(result, plain)
    if as_json:
        print(json.dumps(cli_generate.as_json(result, None if plain is None else difference is None)))
    elif not is_quiet:
        Console().print(cli_generate.table(result, plain if difference is None else None))
        if plain is not None and difference is None:
            print("identical")
    if result.error is not None:
        print(f"metrale: {result.error}", file=sys.stderr)
        raise typer.Exit(EXIT_DIFFERENT)
    if difference is not None:
        print(f"metrale: not identical: {difference}", file=sys.stderr)
        raise typer.Exit(EXIT_DIFFERENT)


@app.command()
def info(
    model: Annotated[str, typer.Argument(help='"tiny", a directory, or a Hub repository.')] = "tiny",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences at once.")] = EngineConfig.max_num_seqs,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output. (default: the model's context)")
    ] = EngineConfig.max_model_len,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Drafts a step; the state's rings grow with it.")
    ] = SpeculativeConfig.num_speculative_tokens,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """What a checkpoint holds, and what it costs in memory. No weight is loaded."""
    with _boundary():
        with _notice(f"reading {model}"):
            from metrale.engine.describe import describe

            found = describe(
                model, max_num_seqs, max_model_len, num_speculative_tokens, EngineConfig.fold_threshold
            )
        if as_json:
            print(json.dumps(asdict(found)))
        else:
            Console().print(cli_info.table(found))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Run the engine benchmark of a checkout; its own options follow (try --help).",
)
def bench(context: typer.Context) -> None:
    checkout = Path(__file__).resolve().parents[1]
    with _boundary():
        if not (checkout / "bench" / "engine").is_dir():
            raise ConfigError("the benchmarks are not part of the installed package: run this in a checkout")
        sys.path.insert(0, str(checkout))
        sys.argv[1:] = context.args
        runpy.run_module("bench.engine", run_name="__main__", alter_sys=True)


def main() -> None:
    """Entry point of the `metrale` script."""
    app()
