"""The command line: a table of commands, and what they share: exit codes, errors, interruption, closed pipes.

A command is a module with `configure(parser)` and `run(args) -> exit code`; only the one that is asked for is
imported. Exit codes: 0 fine, 1 the answer is no, 2 could not do it, 130 interrupted, 141 stdout's reader
went away.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NoReturn

from kiln.ir.diagnostics import DeclarationError
from kiln.runtime.errors import KilnError
from kiln.tools.console import UsageError, nearest

FINE, NO, FAILED, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141
ALONE = frozenset({"jinja2"})
"""Packages that a command needs without the rest of the compiler: kiln header."""


@dataclass(frozen=True)
class Command:
    """A row of the table of commands."""

    name: str
    module: str
    summary: str
    example: str


COMMANDS: tuple[Command, ...] = (
    Command(
        "build",
        "build",
        "compile kernels into artifact trees",
        "kiln build --target sm_90a --op 'rms_*' --out trees",
    ),
    Command(
        "check",
        "check",
        "say whether sources, toolchain and artifacts still agree",
        "kiln check --rebuild --sample 20",
    ),
    Command(
        "verify",
        "verify",
        "check the integrity of a tree and prove its launches",
        "kiln verify aot_artifacts",
    ),
    Command(
        "sign",
        "sign",
        "sign a tree with an Ed25519 key",
        "kiln sign aot_artifacts --key private.pem",
    ),
    Command("list", "list_", "list ops and recipes", "kiln list --op '*norm*' --json"),
    Command("targets", "targets", "list targets", "kiln targets --json"),
    Command("matrix", "matrix", "derive the kernel-family matrix", "kiln matrix --md > MATRIX.md"),
    Command("show", "show", "show a kernel at any stage", "kiln show rms_norm --target sm_90a --source"),
    Command(
        "explain",
        "explain",
        "say which variant a call takes, and why not the others",
        "kiln explain rms_norm --target sm_90a M=16 N=5120 T=bf16",
    ),
    Command("test", "conformance", "run the conformance tests on this machine", "kiln test --op rms_norm"),
    Command(
        "selftest",
        "selftest",
        "compare the ways to run each op on this machine, in seconds",
        "kiln selftest --device cuda",
    ),
    Command("bench", "bench", "time an op against its limit and its peers", "kiln bench rms_norm"),
    Command(
        "tune",
        "tune",
        "choose among candidate kernels by measurement",
        "kiln tune matmul_bt --target sm_90a --out bundle",
    ),
    Command(
        "header", "header", "write typed calls of a tree's ops in C", "kiln header trees --out kiln_ops.h"
    ),
    Command("diff", "diff", "compare two trees", "kiln diff old/aot_artifacts aot_artifacts"),
)
"""Every command, in the order that help shows."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of ending the process, and guesses what was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = [w for w in message.split() if w.startswith("--")]
        options = list(self._option_string_actions)
        close = [c for w in wrong for c in difflib.get_close_matches(w.split("=")[0], options, n=1)]
        guess = f"; did you mean {close[0]}?" if close and message.startswith("unrecognized") else ""
        raise UsageError(f"{message}{guess} (see {self.prog} --help)")


def load(command: Command) -> ModuleType:
    """The command's module."""
    return import_module(f"kiln.tools.{command.module}")


def _version() -> str:
    try:
        return version("kernel-kiln")
    except PackageNotFoundError:
        return "unknown (not installed)"


def overview() -> Parser:
    """The parser of `kiln` without a command."""
    width = max(len(c.name) for c in COMMANDS)
    lines = [f"  {c.name:<{width}}  {c.summary}" for c in COMMANDS]
    parser = Parser(
        prog="kiln",
        usage="kiln COMMAND [options]",
        description="Kiln compiles kernels for LLM inference ahead of time.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`kiln COMMAND --help` has options and an example.\n"
        "exit codes: 0 fine, 1 the answer is no, 2 could not do it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kiln {_version()}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def parser_of(command: Command, module: ModuleType) -> Parser:
    """The parser of one command, with the options that all have."""
    parser = Parser(
        prog=f"kiln {command.name}",
        description=(module.__doc__ or command.summary).strip(),
        epilog=f"example:\n  {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--traceback", action="store_true", help="show where in Kiln an error arose")
    return parser


def dispatch(arguments: Sequence[str]) -> int:
    """Parse and run one command line."""
    if not arguments or arguments[0].startswith("-"):
        parser = overview()
        parser.parse_args(arguments)
        parser.print_help(sys.stderr)
        return FAILED
    name, *rest = arguments
    command = next((c for c in COMMANDS if c.name == name), None)
    if command is None:
        raise UsageError(nearest(name, [c.name for c in COMMANDS], "command") + " (see kiln --help)")
    module = load(command)
    code: int = module.run(parser_of(command, module).parse_intermixed_args(rest))
    return code


def describe(error: BaseException) -> str:
    """One message for a person; no traceback."""
    if isinstance(error, UsageError | KilnError | DeclarationError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("kiln"):
        wanted = error.name if error.name in ALONE else "'kernel-kiln[compiler]'"
        return f"the package {error.name} is not installed; try pip install {wanted}"
    if isinstance(error, OSError):
        what = error.strerror or str(error)
        return f"{error.filename}: {what}" if error.filename is not None else what
    if isinstance(error, MemoryError):
        return "out of memory; try fewer --jobs"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"internal error, {type(error).__name__} at {where}: {error} (--traceback shows more)"


def report(error: Exception, arguments: Sequence[str]) -> None:
    """Tell the error where the caller looks for it."""
    words = [w for w in arguments[:1] if not w.startswith("-")]
    if "--traceback" in arguments:
        traceback.print_exception(error)
    print(f"{' '.join(['kiln', *words])}: {describe(error)}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"error": {"class": type(error).__name__, "message": describe(error)}}, indent=2))


def _run(arguments: Sequence[str]) -> int:
    try:
        return dispatch(arguments)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else FINE
    except KeyboardInterrupt as stop:
        print("\nkiln: interrupted", *getattr(stop, "__notes__", ()), sep="; ", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return CLOSED
    except Exception as error:
        report(error, arguments)
        return FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kiln` with these arguments (default: the process's, which ends with it); returns the exit code,
    never raises."""
    code = _main(argv)
    if argv is None:
        gc.freeze()  # at its end the interpreter looks at every object twice: 0.6 s after a no-op build
    return code


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # Trees are objects in no cycle: a no-op build takes 2.4 s with the default 700, 2.0 so (medians of 5).
    gc.set_threshold(200_000)
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return CLOSED
    except OSError as error:
        _drop_stdout()
        if code != FAILED:
            report(error, [a for a in arguments if a != "--json"])
        return FAILED
    return code


def _drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's own flush at exit has nowhere to fail."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
