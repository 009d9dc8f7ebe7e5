"""The command line: `dispatch-trace VERB ...`, which `tools/align.py` and `python -m dispatch_trace` run too.

Turns arguments into calls and results into exit codes, and nothing else: what is said about a trace
comes from `report`. Guarantees:

* Exit status 0 match, 1 diverged, 2 bad usage or unreadable input, 3 inconclusive. Whatever goes wrong
  is never 0 or 1: Python's own status of a crash is 1, which a script would take for `diverged`.
* Every `DispatchTraceError` is one message on stderr, never a traceback.
* `--help`, `show` and an `align` of traces without tensor data do not import torch; `--help` imports
  nothing of this package but this file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dispatch_trace import __version__
from dispatch_trace.errors import ConfigError, DispatchTraceError, NotExecutableError

if TYPE_CHECKING:
    from dispatch_trace.alignment import Alignment

EXIT_STATUS = {"match": 0, "diverged": 1, "inconclusive": 3}
EXIT_UNREADABLE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

# Set to see where an unexpected error (a bug of ours) came from.
DEBUG_VARIABLE = "DISPATCH_TRACE_DEBUG"

_STATUS_HELP = (
    "exit status: 0 match (within noise), 1 diverged, 2 bad usage or unreadable input, 3 inconclusive"
)

Progress = Callable[[int, int, str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments without the program's name; None: those of the process.
    Returns: the exit status (see the module's docstring).
    """
    if "dispatch_trace.autostart" in sys.modules:  # the variables are for programs
        sys.modules["dispatch_trace.autostart"].cancel()
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message: 0 after --help, 2 after a bad argument
        return stop.code if isinstance(stop.code, int) else EXIT_UNREADABLE
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except DispatchTraceError as error:
        return _fail(f"{type(error).__name__}: {error}")
    except BrokenPipeError:
        # `dispatch-trace show X | head`: the reader has seen enough. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREADABLE
    except OSError as error:
        return _fail(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        return _fail(
            f"internal error: {type(error).__name__}: {error}\n"
            f"This is a bug of dispatch_trace. {DEBUG_VARIABLE}=1 shows where it comes from."
        )


def _fail(message: str) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    return EXIT_UNREADABLE


# --- verbs ------------------------------------------------------------------------------------------


def _align(options: argparse.Namespace) -> int:
    renames, steps = _renames(options.rename), _steps(options.step)
    _check_writable(options.json, "--json")
    _check_writable(options.rename_template, "--rename-template")
    _check_writable(options.html, "--html")
    from dispatch_trace.alignment import align
    from dispatch_trace.report import text

    with _progress() as progress:
        alignment = align(
            options.ref,
            options.target,
            golden=options.golden,
            refs=options.ref_run,
            rename=renames,
            declared=options.declared or None,
            exact=options.exact,
            tolerance=options.tolerance,
            steps=steps,
            twins=None if options.twins else False,
            progress=progress,
        )
    written = "" if options.repro is None else _repro(alignment, options.repro)
    if options.rename_template is not None:
        from dispatch_trace.align.rename_file import template

        Path(options.rename_template).write_text(template(alignment.pairs), encoding="utf-8")
    if options.json is not None:
        alignment.to_json(options.json)
    if options.html is not None:
        alignment.to_html(options.html)
    print(text.alignment(alignment, ref=options.ref, target=options.target, top=options.top))
    if written:
        print(f"\nrepro     {written}")
    return EXIT_STATUS[alignment.verdict]


def _repro(alignment: Alignment, folder: str) -> str:
    """What was written, or why nothing was: that changes nothing about the verdict."""
    try:
        return str(alignment.repro(folder))
    except NotExecutableError as error:
        return f"not written: {error}"


def _show(options: argparse.Namespace) -> int:
    from dispatch_trace.compat import open_ranks
    from dispatch_trace.report import listing

    ranks = open_ranks(options.trace)
    if options.record is not None:
        print(listing.record(ranks, options.record, rank=options.rank))
    elif options.module is not None or options.op is not None or options.kind is not None:
        print(
            listing.records(
                ranks,
                module=options.module,
                op=options.op,
                kind=options.kind,
                steps=_steps(options.step),
                top=options.top,
            )
        )
    else:
        print(listing.overview(ranks, path=options.trace, depth=options.depth, steps=_steps(options.step)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from dispatch_trace.compat import open_ranks
    from dispatch_trace.report import listing

    ranks = open_ranks(options.trace)
    problems: list[str] = []
    with _progress() as progress:
        for done, rank in enumerate(ranks):
            if progress is not None:
                progress(done, len(ranks), f"verifying rank {rank.rank}")
            problems += [f"rank {rank.rank}: {problem}" for problem in rank.verify()]
    print(listing.verification(ranks, problems, path=options.trace))
    return EXIT_UNREADABLE if problems else 0


def _convert(options: argparse.Namespace) -> int:
    from dispatch_trace import session
    from dispatch_trace.compat.convert import convert

    written = convert(
        options.trace,
        options.out,
        to=options.to,
        tensor_of=lambda reader, record, slot: session.Record(reader, record).tensor(slot.name),
    )
    print(f"{options.out}: {written.num_tensors} tensors of {written.num_steps} steps")
    for what in written.left_out:
        print(f"  left out: {what}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from dispatch_trace.run import run, settings_of

    return run(options.command, settings_of(options))


def _hunt(options: argparse.Namespace) -> int:
    renames = _renames(options.rename)
    _check_writable(options.json, "--json")
    from dispatch_trace.command_program import CommandProgram
    from dispatch_trace.hunt import DEFAULT_BUDGET, hunt_programs

    found = hunt_programs(
        (
            CommandProgram("reference", options.ref, root=options.root),
            CommandProgram("target", options.target, root=options.root),
        ),
        folder=options.output,
        budget=DEFAULT_BUDGET if options.budget is None else options.budget,
        rename=renames,
        declared=options.declared or None,
        tolerance=options.tolerance,
        overwrite=options.overwrite,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.json is not None:
        found.to_json(options.json)
    print(found.table())
    return EXIT_STATUS[found.verdict]


def _export(options: argparse.Namespace) -> int:
    from dispatch_trace.export import export

    source = options.trace
    if options.ref is not None:
        from dispatch_trace.alignment import align

        with _progress() as progress:
            source = align(options.ref, options.trace, progress=progress)
    stats = None if options.stats is None else [name.strip() for name in options.stats.split(",")]
    written = export(source, options.out, to=options.to, stats=stats)
    print(f"{options.out}: {written.num_rows} rows")
    for file in written.files:
        print(f"  and {file}")
    for what in written.left_out:
        print(f"  left out: {what}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from dispatch_trace import demo

    return demo.run(options.output)


# --- arguments --------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dispatch-trace",
        description="Aligns two recordings of a PyTorch model and names the first place where they part.",
        epilog=_STATUS_HELP,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    align = verbs.add_parser(
        "align",
        help="compare a target trace with a reference trace",
        description="Aligns TARGET with REF and says whether, and where first, TARGET goes wrong.",
        epilog=_STATUS_HELP,
    )
    align.add_argument("ref", metavar="REF", help="trace of the trusted run")
    align.add_argument("target", metavar="TARGET", help="trace of the run under suspicion")
    align.add_argument("--golden", metavar="TRACE", help="a run of the reference in higher precision")
    align.add_argument(
        "--ref-run",
        metavar="TRACE",
        action="append",
        default=[],
        help="one more run of the reference: what they differ by is noise (repeatable)",
    )
    align.add_argument(
        "--rename",
        metavar="OLD=NEW|FILE.yaml",
        action="append",
        default=[],
        help="the reference's module OLD is the target's NEW, or a file of such rules (repeatable)",
    )
    align.add_argument(
        "--rename-template", metavar="FILE", help="write a file of rules to fill in, for what has no partner"
    )
    align.add_argument(
        "--step", metavar="N", action="append", default=[], help="only step N, or steps N-M (repeatable)"
    )
    align.add_argument(
        "--declared",
        metavar="TEXT",
        action="append",
        default=[],
        help="a lower precision that is meant, as 'matmul operands bf16' (repeatable)",
    )
    align.add_argument(
        "--tolerance", metavar="X", type=_allowed_error, help="relative error that is allowed at every site"
    )
    align.add_argument(
        "--no-twins",
        dest="twins",
        action="store_false",
        help="do not run the programs again in float64: judge by estimates alone",
    )
    align.add_argument("--exact", action="store_true", help="bitwise: any difference is a divergence")
    align.add_argument(
        "--top", metavar="N", type=_count, default=3, help="list N findings (default %(default)s)"
    )
    align.add_argument(
        "--repro", metavar="DIR", help="write a script that replays the first finding alone (docs/proofs.md)"
    )
    align.add_argument("--json", metavar="FILE", help="write the same facts for programs (docs/json.md)")
    align.add_argument("--html", metavar="FILE", help="write one self-contained page (docs/report.md)")
    align.set_defaults(run=_align)

    show = verbs.add_parser(
        "show",
        help="what a trace holds: header, module tree, records",
        description="Shows a trace: without options its header and module tree; with --module, --op or "
        "--kind the records that match; with --record one of them in full.",
    )
    show.add_argument("trace", metavar="TRACE")
    show.add_argument("--module", metavar="PATTERN", help="records of modules that match ('' is the root)")
    show.add_argument("--op", metavar="REGEX", help="records of ops whose base name matches")
    show.add_argument("--kind", choices=("op", "module", "inline", "param"), help="records of one kind")
    show.add_argument("--step", metavar="N", action="append", default=[], help="only step N, or steps N-M")
    show.add_argument("--record", metavar="SEQ", type=_count, help="one record, by its sequence number")
    show.add_argument("--rank", metavar="N", type=_count, default=None, help="the rank of --record")
    show.add_argument("--depth", metavar="N", type=_count, help="levels of the module tree")
    show.add_argument(
        "--top", metavar="N", type=_count, default=30, help="list N records (default %(default)s)"
    )
    show.set_defaults(run=_show)

    verify = verbs.add_parser(
        "verify",
        help="check that a trace is whole",
        description="Reads every frame and every tensor of a trace and checks lengths, checksums and hashes. "
        "Exit status 0 when it is sound, 2 when not.",
    )
    verify.add_argument("trace", metavar="TRACE")
    verify.set_defaults(run=_verify)

    convert = verbs.add_parser(
        "convert",
        help="write a trace in the vLLM-Neuron capture layout, or such a dump as a trace",
        description="Writes TRACE, or a dump of another tool, in another layout, and lists what that layout "
        "has no place for (docs/vllm_neuron.md). `align`, `show` and `verify` read such dumps as they are.",
    )
    convert.add_argument("trace", metavar="TRACE")
    convert.add_argument("out", metavar="OUT", help="the directory to make")
    convert.add_argument("--to", choices=("vllm-neuron", "trace"), required=True, help="the layout of OUT")
    convert.set_defaults(run=_convert)

    export = verbs.add_parser(
        "export",
        help="write a trace or an alignment for other tools: CSV, Parquet, JSON lines, Model Explorer",
        description="Writes the records of TRACE, or with --ref its pairs with the reference, in a form that "
        "other tools read, and lists what that form has no place for (docs/export.md).",
    )
    export.add_argument("trace", metavar="TRACE")
    export.add_argument("out", metavar="OUT", help="the file to make (a directory for vllm-neuron)")
    export.add_argument(
        "--to",
        choices=("csv", "parquet", "fastvideo", "vllm-neuron", "model-explorer"),
        required=True,
        help="the form of OUT",
    )
    export.add_argument("--ref", metavar="REF", help="align with this trace, and write the pairs")
    export.add_argument("--stats", metavar="NAMES", help="statistics in fastvideo, as abs_mean,sum")
    export.set_defaults(run=_export)

    run = verbs.add_parser(
        "run",
        help="record any program without editing it",
        description="Runs a program and records every model that it calls (docs/run.md). The exit status is "
        "the program's own; 2 where it ended well but nothing was recorded.",
        usage="dispatch-trace run [OPTIONS] -- script.py ARGS | -m MODULE ARGS | COMMAND ARGS",
    )
    run.add_argument("--output", metavar="PATH", help="the trace; {pid} and {rank} in it are replaced")
    run.add_argument("--level", choices=("op", "module"), help="ops and modules (default), or modules only")
    run.add_argument(
        "--save",
        metavar="[PATTERN=]WHAT",
        action="append",
        help="meta, stats (default), leaves or tensors, also for some modules only (repeatable)",
    )
    run.add_argument("--select", metavar="PATTERN", action="append", help="only these modules (repeatable)")
    run.add_argument("--ops", metavar="REGEX", help="only ops whose base name matches")
    run.add_argument("--steps", metavar="N", action="append", help="only these steps, as 0,3-5 (repeatable)")
    run.add_argument("--stats", metavar="NAMES", help="only these statistics, as mean,max")
    run.add_argument(
        "--root",
        metavar="SPEC",
        action="append",
        help="what a model is: a class name, an attribute path or a pattern, matched whole (repeatable; "
        "default: every outermost module)",
    )
    run.add_argument(
        "--lines",
        metavar="PATTERN",
        action="append",
        help="record what each line of these Python modules assigns (docs/lines.md; repeatable)",
    )
    run.add_argument("--overwrite", action="store_true", default=None, help="replace an earlier trace")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...")
    run.set_defaults(run=_run)

    hunt = verbs.add_parser(
        "hunt",
        help="find the op to blame by running both programs again and again",
        description="Runs two programs under the recorder, first all modules with statistics, then the "
        "ops of those under suspicion, then their tensors, and names what is to blame (docs/hunt.md).",
        epilog=_STATUS_HELP,
    )
    hunt.add_argument("--ref", metavar="COMMAND", required=True, help="the trusted program: 'script.py ARGS'")
    hunt.add_argument("--target", metavar="COMMAND", required=True, help="the program under suspicion")
    hunt.add_argument(
        "--output", metavar="DIR", default="hunt", help="recordings, page and script (default %(default)s)"
    )
    hunt.add_argument(
        "--budget",
        metavar="SIZE",
        type=_bytes,
        help="room for recordings at any time, as 500MB (default 2GB)",
    )
    hunt.add_argument(
        "--root",
        metavar="SPEC",
        action="append",
        default=[],
        help="what a model is, as of `run` (repeatable)",
    )
    hunt.add_argument(
        "--rename",
        metavar="OLD=NEW|FILE.yaml",
        action="append",
        default=[],
        help="as of `align` (repeatable)",
    )
    hunt.add_argument(
        "--declared", metavar="TEXT", action="append", default=[], help="as of `align` (repeatable)"
    )
    hunt.add_argument("--tolerance", metavar="X", type=_allowed_error, help="as of `align`")
    hunt.add_argument("--overwrite", action="store_true", help="replace an earlier hunt in DIR")
    hunt.add_argument("--json", metavar="FILE", help="write the same facts for programs")
    hunt.set_defaults(run=_hunt)

    demo = verbs.add_parser(
        "demo",
        help="record MiniLM in fp32, bf16 and int8, and find a planted mistake",
        description="Records real MiniLM weights on real sentences in float32, bfloat16 and int8, plants a "
        "mistake in the last two, and shows what the aligner says.",
    )
    demo.add_argument(
        "--output", metavar="DIR", default="demo-traces", help="where the traces go (default %(default)s)"
    )
    demo.set_defaults(run=_demo)
    return parser


def _count(value: str) -> int:
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number from 0 on")
    return int(value)


def _bytes(value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", value.strip(), re.IGNORECASE)
    number = 0 if match is None else int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{value!r} is no size above 0; write 500MB or 2GB")
    return number


def _allowed_error(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r} is no finite number from 0 on")
    return number


def _renames(rules: Sequence[str]) -> dict[str, str] | None:
    """Splits `OLD=NEW` rules; both sides may be empty, which is the root."""
    renames: dict[str, str] = {}
    for rule in rules:
        old, equals, new = rule.partition("=")
        found = {old: new}
        if not equals and rule.endswith((".yaml", ".yml")):
            from dispatch_trace.align.rename_file import read_rules

            found = read_rules(rule)
        elif not equals:
            raise ConfigError(
                f"--rename {rule!r} has no '='. Write OLD=NEW: the reference's path, then the target's."
            )
        for old, new in found.items():
            if renames.get(old, new) != new:
                raise ConfigError(f"--rename gives {old!r} two names: {renames[old]!r} and {new!r}.")
            renames[old] = new
    return renames or None


def _steps(ranges: Sequence[str]) -> set[int] | None:
    from dispatch_trace.config import read_steps

    return read_steps(ranges, option="--step")


def _check_writable(path: str | None, option: str) -> None:
    """Refuses an output file that cannot be written before the work is done, not after it."""
    if path is None:
        return
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir():
        what = "it is a directory" if Path(path).is_dir() else f"{str(folder)!r} is no directory"
        raise ConfigError(f"{option} {path!r} cannot be written: {what}.")


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress bar on stderr while the work runs; None where nobody watches (no terminal)."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield report
