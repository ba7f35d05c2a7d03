# SPDX-License-Identifier: Apache-2.0
"""The command line of `memscale`: options, their types, help. Imports nothing that is slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from memscale import __version__
from memscale.cli.problems import UsageError
from memscale.units import parse_bytes

__all__ = ["CHECKPOINTING", "DTYPES", "MODES", "OPTIMIZERS", "TASKS", "Options", "parse"]

DTYPES: Final = ("fp32", "bf16", "bf16-amp", "fp16-amp")
"""Weights in FP32 or BF16; or in FP32 with the forward under autocast."""

OPTIMIZERS: Final = (
    "adamw", "adamw-fused", "adam", "sgd", "sgd-momentum", "adafactor", "adagrad", "adamax", "nadam", "radam",
    "rmsprop", "adamw8bit", "lion", "muon",
)  # fmt: skip
"""Optimizers of torch.optim; AdamW with MemScale's 8-bit state; Lion; Muon, with AdamW beside it."""

CHECKPOINTING: Final = ("none", "hf")
"""What the model does without a plan: nothing, or transformers' gradient checkpointing."""

TASKS: Final = (
    "causal-lm", "masked-lm", "seq2seq-lm", "image-classification", "speech-seq2seq", "image-text",
    "semantic-segmentation", "sequence-classification", "token-classification", "question-answering", "ctc",
    "audio-classification",
)  # fmt: skip
"""What a Hugging Face model can be trained for here."""

MODES: Final = ("conservative", "balanced", "aggressive")

_LARGEST_NUMBER: Final = 1 << 24
_MOST_CASES: Final = 16
_MOST_STEPS: Final = 10**15
_MOST_SECONDS: Final = 86400

_OVERVIEW: Final = """\
Says what a PyTorch training step takes before it runs, and what a plan makes of it. No GPU is needed or
touched, but by bench, which trains the benchmark models.
"""

_EXAMPLES: Final = """\
examples:
  memscale estimate gpt2 --batch 4 --seq 512 --gpu "RTX 3090"
  memscale plan train.py:build --budget 8GiB --frontier
  memscale report gpt2-medium --batch 8 --gpu "RTX 3060" -o report.html

memscale COMMAND --help lists what a command takes. In Python: memscale.wrap, memscale.predict.
"""

_EPILOG: Final = """\
MODEL is one of
  gpt2, meta-llama/Llama-3.1-8B      a Hugging Face model: only its configuration is read
  ./folder, config.json              the same from a file
  package.module:function            a function that returns a module, or (module, batch); it may take
  path/file.py:function              keyword arguments batch and seq
  step.graph                         a memory graph, as `msc` reads it

exit status: 0 it fits (plain or with a plan), 3 it does not fit, 2 the request cannot be carried out
"""


_SNAPSHOT_EPILOG: Final = """\
The file is read without executing anything in it.

exit status: 0, or 2 if it cannot be read
"""


_LOGIN_EPILOG: Final = """\
The token is read from standard input or from MEMSCALE_TOKEN. Make it in the dashboard, with the scope ingest.
"""

_IMPORT_EPILOG: Final = """\
Nothing is written to PLACE. A run that is there already is not doubled; one that has grown gets the rest.

exit status: 0 all of it is there, 1 something is not, 2 the request cannot be carried out
"""

_SERVE_EPILOG: Final = """\
It prints its address and, until there is an account, a link to make the first one with. Ctrl-C ends it.

exit status: the server's: 0 stopped, 3 it cannot start; 2 it is not installed, or wrong options
"""

_SYNC_EPILOG: Final = """\
exit status: 0 all of it is there or on its way, 1 something waits still, 2 the request cannot be carried out
"""


@dataclass(frozen=True)
class Options:
    """A parsed command line.

    Attributes:
        command: "estimate", "plan", "tune", "report", "snapshot", "telemetry", "login", "sync", "runs",
            "import", "serve" or "env".
        action: of "telemetry": "status", "enable", "disable" or "show"; of "import": "mlflow" or "trackio".
        url: where telemetry goes; None: not given.
        model: MODEL, or the snapshot's path; "": not given.
        place: a server, or a folder of runs; "": the user's own.
        server: where runs are sent; None: not given.
        wait: seconds of patience with it; None: not given.
        into: a folder that runs are imported into; None: not given.
        data: the folder of a server that is started; None: not given.
        listen: where it listens; None: not given.
        rest: options that it has beyond these.
        batches, lengths: sizes to look at; empty: not given.
        dtype, task, mode: None: not given.
        optimizer: name; None: not given.
        lora: rank of adapters; None: not given.
        lora_targets: names of the layers that get them; empty: not given.
        accumulate: micro-batches of a step; None: not given.
        checkpointing: one of `CHECKPOINTING`; None: not given.
        devices: names of devices; empty: not given.
        budget: a size as it was typed; None: not given.
        exclude, only: patterns over module paths, as in `Config`; empty: not given.
        output, trace, save: files to write.
        compare: what a plain run's device is; None: not given.
        prices: (name of a card or "", price of an hour) of each --price.
        steps: of a whole run; None: not given.
        global_batch: samples of one step of the optimizer; None: not given.
        splittable: whether a batch may be split into micro-batches; None: not given.
        confirm: run real steps.
        savings, frontier, as_json, verbose, debug: switches.
    """

    command: str
    action: str = ""
    url: str | None = None
    model: str = ""
    place: str = ""
    server: str | None = None
    wait: float | None = None
    into: str | None = None
    data: str | None = None
    listen: str | None = None
    rest: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    dtype: str | None = None
    task: str | None = None
    mode: str | None = None
    optimizer: str | None = None
    lora: int | None = None
    lora_targets: tuple[str, ...] = ()
    accumulate: int | None = None
    checkpointing: str | None = None
    devices: tuple[str, ...] = ()
    budget: str | None = None
    exclude: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    output: str | None = None
    trace: str | None = None
    save: str | None = None
    compare: str | None = None
    prices: tuple[tuple[str, float], ...] = ()
    steps: int | None = None
    global_batch: int | None = None
    splittable: bool | None = None
    confirm: bool = False
    savings: bool = False
    frontier: bool = False
    as_json: bool = False
    verbose: bool = False
    debug: bool = False

    @property
    def budget_bytes(self) -> int | None:
        """`budget` as a number."""
        return None if self.budget is None else parse_bytes(self.budget)


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as an exception: the program prints one line, not its usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parse(arguments: list[str] | None) -> Options:
    """Reads a command line; `--help` and `--version` print and exit.

    Raises:
        UsageError: it makes no sense.
    """
    found = _parser().parse_args(arguments)
    values: dict[str, Any] = {name: value for name, value in vars(found).items() if value is not None}
    device = values.pop("device", None)
    if device is not None:
        values["devices"] = (device,)
    values["rest"] = tuple(values.get("rest", ()))
    options = Options(**values)
    cases = max(len(options.batches), 1) * max(len(options.lengths), 1) * max(len(options.devices), 1)
    if cases > _MOST_CASES * 16:
        raise UsageError(f"{cases} cases at once are too many; allowed: {_MOST_CASES * 16}")
    if options.savings and cases > 1:
        raise UsageError(f"--savings takes one case, not {cases}")
    if not options.savings and (options.compare or options.prices or options.steps):
        raise UsageError("--compare, --price and --steps are parts of --savings")
    if options.savings and (options.accumulate or 1) > 1:
        raise UsageError(
            f"--accumulate {options.accumulate}: --savings knows times of whole steps alone; leave it out"
        )
    if options.lora_targets and options.lora is None:
        raise UsageError("--lora-targets is a part of --lora R")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="memscale", description=_OVERVIEW, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"memscale {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    estimate = _command(commands, "estimate", "what fits, where the bytes go, what would help", _EPILOG)
    _add_step(estimate, many=True)
    _add_form(estimate, "print every module and choice")
    _add_savings(estimate)
    plan = _command(commands, "plan", "what would be done with each module, and why", _EPILOG)
    _add_step(plan, many=False)
    plan.add_argument("--frontier", action="store_true", help="also what other budgets would bring")
    plan.add_argument("--save", metavar="FILE", help="write the plan as JSON, for Plan.from_json")
    _add_form(plan, "print a row for every module")
    _add_tune(commands)
    words = "estimate and plan as one HTML file, and as a trace for Perfetto"
    report = _command(commands, "report", words, _EPILOG)
    _add_step(report, many=False)
    report.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="the page (default: report.html)"
    )
    report.add_argument(
        "--trace", metavar="FILE", help="also write a trace to open in ui.perfetto.dev or chrome://tracing"
    )
    _add_form(report)
    snapshot = _command(commands, "snapshot", "what a torch.cuda.memory snapshot holds", _SNAPSHOT_EPILOG)
    snapshot.add_argument("model", metavar="FILE", help="written by torch.cuda.memory._dump_snapshot")
    _add_form(snapshot, "print 100 lines of the program, not 8")
    commands.add_parser("bench", help="memory, time and loss of the benchmark models, beside other tools")
    _add_recording(commands)
    _add_telemetry(commands)
    env = _command(commands, "env", "versions, device and settings, for a report of a problem")
    _add_form(env)
    return parser


def _add_recording(commands: Any) -> None:
    login = _command(commands, "login", "keep an API token for a memscale-server", _LOGIN_EPILOG)
    login.add_argument("place", metavar="URL", help="of the server")
    _add_form(login)
    sync = _command(commands, "sync", "send recorded runs to their server", _SYNC_EPILOG)
    sync.add_argument("place", metavar="DIR", nargs="?", help="of runs, or of one (default: those that wait)")
    sync.add_argument("--server", metavar="URL", help="where to (default: the server that a run is for)")
    sync.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help="for a server that does not answer (default: 30)"
    )
    _add_form(sync)
    runs = _command(commands, "runs", "recorded runs in a folder")
    runs.add_argument("place", metavar="DIR", nargs="?", help="of runs, or of one (default: those that wait)")
    _add_form(runs)
    _add_import(commands)
    serve = _command(commands, "serve", "start a memscale-server for this user", _SERVE_EPILOG)
    serve.add_argument("--data", metavar="DIR", help="what it keeps (default: a folder of the user's state)")
    serve.add_argument("--listen", metavar="ADDRESS:PORT", help="where (default: 127.0.0.1:8300)")
    serve.add_argument("rest", metavar="-- OPTION", nargs="*", help="what memscale-server --help lists")


def _add_import(commands: Any) -> None:
    imports = commands.add_parser("import", help="bring runs of MLflow or Trackio to a server or a folder")
    actions = imports.add_subparsers(dest="action", required=True, metavar="SOURCE")
    sources = (
        ("mlflow", "a tracking folder (mlruns) or SQLite file"),
        ("trackio", "a project's *.db, or their folder"),
    )
    for name, words in sources:
        source = _command(actions, name, f"from {words}", _IMPORT_EPILOG)
        source.add_argument("place", metavar="PLACE", help=words)
        where = source.add_mutually_exclusive_group(required=True)
        where.add_argument("--server", metavar="URL", help="where to; its token as `memscale login` keeps it")
        where.add_argument(
            "--into", metavar="DIR", help="a folder of runs, which `memscale sync` can send later"
        )
        _add_form(source)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds up to {_MOST_SECONDS}")
    return seconds


def _add_telemetry(commands: Any) -> None:
    telemetry = commands.add_parser(
        "telemetry", help="what is sent about plans: nothing, unless you enable it"
    )
    actions = telemetry.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_form(_command(actions, "status", "whether it is on, what has decided that, and where it goes"))
    enable = _command(actions, "enable", "switch it on, for this user")
    enable.add_argument("--url", metavar="URL", help="where to, such as the address of a memscale-server")
    _add_form(enable)
    _add_form(_command(actions, "disable", "switch it off, for this user"))
    show = _command(
        actions, "show", "the bytes that would be sent next", _EPILOG.partition("  step.graph")[0]
    )
    _add_step(show, many=False, is_required=False)
    _add_form(show)


def _add_tune(commands: Any) -> None:
    tune = _command(commands, "tune", "the fastest micro-batch and plan for a global batch", _EPILOG)
    _add_step(tune, many=False, sizes=False)
    tune.add_argument(
        "--global-batch", dest="global_batch", type=_one_number, metavar="N", required=True,
        help="samples of one step of the optimizer, which stay",
    )  # fmt: skip
    tune.add_argument(
        "--splittable", action=argparse.BooleanOptionalAction,
        help="the batch may be split, or may not (default: unless it has batch normalisation)",
    )  # fmt: skip
    tune.add_argument(
        "--confirm", action=argparse.BooleanOptionalAction,
        help="run real steps here, with random weights (default: predict only)",
    )  # fmt: skip
    tune.add_argument("-o", "--output", metavar="FILE", help="draw throughput and peaks, with matplotlib")
    _add_form(tune)


def _command(commands: Any, name: str, words: str, epilog: str = "") -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=words[0].upper() + words[1:] + ".", epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("--debug", action="store_true", help="show where an error comes from")
    return command


def _add_form(command: argparse.ArgumentParser, verbose: str = "") -> None:
    """Arguments that choose the form of the answer; `verbose` says what there is more of, "" that nothing."""
    command.add_argument("--json", dest="as_json", action="store_true", help="print one JSON document")
    if verbose:
        command.add_argument("--verbose", action="store_true", help=verbose)


def _add_step(
    command: argparse.ArgumentParser, many: bool, sizes: bool = True, is_required: bool = True
) -> None:
    """Arguments that describe a training step and what it shall run on.

    Args:
        command: gets them.
        many: several sizes and devices at once.
        sizes: with the number of samples and micro-batches.
        is_required: MODEL has to be given.
    """
    more = "[,…]" if many else ""
    numbers, words = (_numbers, _words) if many else (_number, _word)
    times = None if is_required else "?"
    command.add_argument("model", metavar="MODEL", nargs=times, help="what to train, see below")
    if sizes:
        command.add_argument(
            "--batch", dest="batches", type=numbers, metavar=f"N{more}", help="samples per step (default: 1)"
        )
        command.add_argument(
            "--accumulate",
            type=_one_number,
            metavar="N",
            help="micro-batches of --batch per step (default: 1)",
        )
    command.add_argument(
        "--seq", dest="lengths", type=numbers, metavar=f"N{more}",
        help="tokens per sample (default: 512, or what the model takes)",
    )  # fmt: skip
    command.add_argument(
        "--dtype", choices=DTYPES, metavar="TYPE",
        help="fp32, bf16: of the weights; bf16-amp, fp16-amp: FP32 weights under autocast (default: fp32)",
    )  # fmt: skip
    command.add_argument(
        "--optimizer", type=str.lower, choices=OPTIMIZERS, metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)} (default: adamw)",
    )  # fmt: skip
    command.add_argument(
        "--task", choices=TASKS, metavar="TASK",
        help=f"of a Hugging Face model: {', '.join(TASKS)} (default: what its configuration says)",
    )  # fmt: skip
    _add_recipe(command)
    _add_place(command, words, more)
    _add_plan(command)


def _add_plan(command: argparse.ArgumentParser) -> None:
    """Arguments that say what a plan may do."""
    command.add_argument(
        "--mode", choices=MODES, metavar="MODE", help=f"{', '.join(MODES)} (default: balanced)"
    )
    command.add_argument(
        "--exclude", type=_word, action=_Extended, metavar="PATTERN",
        help='modules to leave as they are, such as "lm_head" or "*.adapter"; may be repeated',
    )  # fmt: skip
    command.add_argument(
        "--only", type=_word, action=_Extended, metavar="PATTERN",
        help="the only modules to consider; may be repeated",
    )  # fmt: skip


def _add_place(command: argparse.ArgumentParser, words: Callable[[str], Any], more: str) -> None:
    """Arguments that say what the step shall run on, and how much of it."""
    place = command.add_mutually_exclusive_group()
    place.add_argument(
        "--gpu", dest="devices", type=words, metavar=f"NAME{more}",
        help='a card, such as "RTX 3090" or "A100 40GB", or its memory, such as 24GiB',
    )  # fmt: skip
    place.add_argument(
        "--device", choices=("cpu", "cuda"),
        help="this machine, or the card in it (default: the card, if there is one)",
    )  # fmt: skip
    command.add_argument(
        "--budget", dest="budget", type=_size, metavar="SIZE",
        help="most memory to use, such as 8GiB (default: 85 %% of the device)",
    )  # fmt: skip


def _add_recipe(command: argparse.ArgumentParser) -> None:
    """Arguments about how the model is trained."""
    command.add_argument(
        "--lora", type=_one_number, metavar="R",
        help="train LoRA adapters of this rank on the frozen model, as peft does",
    )  # fmt: skip
    command.add_argument(
        "--lora-targets", type=_words, metavar="NAME[,…]",
        help="with --lora: the layers that get one (default: all-linear, every linear layer but the head)",
    )  # fmt: skip
    command.add_argument(
        "--checkpointing", choices=CHECKPOINTING, metavar="WHOSE",
        help="hf: the model with transformers' gradient checkpointing, where no plan is made (default: none)",
    )  # fmt: skip


def _add_savings(command: argparse.ArgumentParser) -> None:
    """Arguments about what a plan saves."""
    command.add_argument(
        "--savings", action="store_true", help="what the plan saves in bytes, time and money, for one case"
    )
    command.add_argument(
        "--compare", choices=("same", "needed"),
        help="with --savings: plain run on this device, or the smallest card that holds it (default: same)",
    )  # fmt: skip
    command.add_argument(
        "--price", dest="prices", type=_named_price, action=_Gathered, metavar="[NAME=]N",
        help="with --savings: price of an hour of the device, or of a card; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--steps", type=_one_count, metavar="N", help="with --savings: steps of the whole run"
    )


class _Gathered(argparse.Action):
    """Puts each value behind those before it, in a tuple."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), values))


class _Extended(argparse.Action):
    """Puts the values of each tuple behind those before."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), *values))


def _named_price(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        price = float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no price: write 0.30, or NAME=0.30") from None
    return name.strip(), price


def _one_count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:19]) <= _MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_STEPS}")
    return int(text)


def _number(text: str) -> tuple[int, ...]:
    return (_one_number(text),)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_one_number(part) for part in _parts(text)))


def _one_number(text: str) -> int:
    word = text.strip()
    if not (word.isascii() and word.isdigit()) or not 1 <= int(word[:12]) <= _LARGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_LARGEST_NUMBER}")
    return int(word)


def _word(text: str) -> tuple[str, ...]:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return (text.strip(),)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in _parts(text)))


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    if not all(part.strip() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty entry")
    return parts


def _size(text: str) -> str:
    """The text, if it is a size: what is shown later is what was typed."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no budget: give at least 1 byte")
    return text.strip()
