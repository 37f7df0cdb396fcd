"""The ``pd-radix`` command."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from sglang_pd_radix import __version__
from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.arguments import Parser, did_you_mean, join_values

# Modules with add_arguments(parser) and run(args) -> int; only the given command's is imported.
GROUPS = {
    "evaluate": {
        "demo": "hold the same conversation with the flag off and on, and compare",
        "verify": "check the decode prefix cache on this machine, with your model, and print a verdict",
        "bench": "measure deployments against each other",
        "doctor": "check this installation and this machine, and a running fleet for mixed versions",
        "make-model": "write a small random-weight model, offline and the same every time",
    },
    "operate": {
        "up": "start prefill workers, decode workers and the router",
        "top": "show workers and requests of a deployment as they are now",
        "trace": "print the times of a request's stages",
        "drain": "take a worker out of service without losing a request",
        "join": "have a gateway take a worker in once it is ready",
        "dashboard": "print the Grafana dashboard, or for Prometheus its configuration and alerting rules",
    },
    "develop": {
        "patches": "print everything the patch set changes in the engine",
        "reference": "print every option, environment variable, metric, route and field",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``pd-radix``. Returns the exit code: 0 fine, 1 a problem, 2 bad usage (128 + n when signal n ended it)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Characters that the locale lacks are escaped instead of failing the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = 128 + signal.SIGPIPE  # until a command returns its result
    try:
        args = _parse(arguments)
        with _ends_unwind():
            code = int(args.run(args))
            sys.stdout.flush()
        return code
    except SystemExit as stop:  # 0 after --help, 2 after bad usage; a signal
        return stop.code if isinstance(stop.code, int) else 1
    except PdRadixError as error:
        print(f"pd-radix: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `pd-radix patches | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except (OSError, UnicodeError) as error:  # a full disk, an invalid path or name
        print(f"pd-radix: {error}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Redirect closed streams (``>&-``) to nowhere, instead of an error for each print.

    Otherwise errors would go to stdout without a stderr, and its number to the next opened file.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


@contextlib.contextmanager
def _ends_unwind() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind a command as Ctrl-C does: what it started ends, what it made is removed.

    Commands with more to do install their own handlers. Ignored signals (``nohup``) stay ignored.
    """

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    with process_group.handled(ours, end):
        yield


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse ``arguments``. Raises SystemExit after help, or after a one-line error."""
    command = arguments[0] if arguments else None
    parser = build_parser(command)
    if command is None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    known = installed()
    if not command.startswith("-") and command not in known:
        parser.error(f"there is no command {command}{did_you_mean(command, known)}")
    args, unknown = parser.parse_known_args(join_values(arguments))
    if unknown:
        args.parser.unknown(unknown[0])
    return args


def installed() -> list[str]:
    """The commands whose modules exist."""
    return [name for name in COMMANDS if name == "patches" or importlib.util.find_spec(_module(name))]


def _module(command: str) -> str:
    return f"sglang_pd_radix.tools.{command.replace('-', '_')}"


def build_parser(command: str | None = None) -> Parser:
    """The parser with every installed sub-command; only ``command`` gets its own options."""
    known = installed()
    parser = Parser(prog="pd-radix", usage="pd-radix COMMAND [options]", description=_description(known))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=f"pd-radix {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, prog="pd-radix", help=argparse.SUPPRESS)
    for name in known:
        summary = COMMANDS[name]
        options = commands.add_parser(name, description=summary[0].upper() + summary[1:] + ".")
        options.set_defaults(parser=options)
        if name != command:
            continue
        if name == "patches":
            _add_patches(options)
        else:
            implementation = importlib.import_module(_module(name))
            implementation.add_arguments(options)
            options.set_defaults(run=implementation.run)
    return parser


def _description(known: Sequence[str]) -> str:
    """The commands in groups, for ``pd-radix --help``."""
    lines = ["Decode-side prefix cache for prefill/decode disaggregation in SGLang 0.5.10.post1."]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:<12}{summary}" for name, summary in commands.items() if name in known]
    return "\n".join([*lines, "", "pd-radix COMMAND --help has the options of a command."])


def _add_patches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write-pins", action="store_true", help="record the installed engine as the one patched")
    parser.set_defaults(run=_patches)


def _patches(args: argparse.Namespace) -> int:
    from sglang_pd_radix.patching import loader, registry

    if args.write_pins:
        version = loader.engine_version()
        if version != loader.ENGINE_VERSION:
            raise PdRadixError(f"pins are taken from sglang {loader.ENGINE_VERSION}, and {version} is installed")
        print(f"{registry.write_pins()} pins written to {registry.PINS}, and to the {registry.PINS.name} of each extra")
        return 0
    rows = registry.replacements()
    print(registry.as_markdown(rows))
    silent = [row for row in rows if row.undocumented]
    for row in silent:
        print(f"pd-radix: {row.file}:{row.line}: {row.name} has no docstring that says why", file=sys.stderr)
    drift = registry.check_pins()
    for one in drift:
        print(f"pd-radix: {one}", file=sys.stderr)
    return 1 if silent or drift else 0


if __name__ == "__main__":
    sys.exit(main())
