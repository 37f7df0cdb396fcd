"""One part after the other, each within its time; what is finished is written down and not repeated."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import log_tail

from . import child
from .budget import Claim, allot
from .outcome import FAILED, PASSED, SKIPPED, UNJUDGED, Outcome

OUTCOME, SETTING, LOG, LOCK = "outcome.json", "setting.json", "log", "lock"
_TAIL = 30
# What an option of an engine may hold that is nobody's business.
_SECRET = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SECRET_VARIABLE = re.compile(r"(?i)\w*(key|token|secret|password)(_\w*)?")
# Whose value is a command line again; --compare's has a name and a colon before it.
_LINES = ("--options", "--decode-options", "--prefill-options", "--on", "--compare")


@dataclass(frozen=True)
class Step:
    """One command of a part. optional: without it the part is still whole, so it is begun only if there is as much time
    left as the longest step before it took. unless: a file of which it is the maker, if it is there already."""

    name: str
    command: Sequence[str]
    environment: tuple[tuple[str, str], ...] = ()
    optional: bool = False
    unless: Path | None = None


@dataclass(frozen=True)
class Done:
    """A step that was begun. result: the directory for its files. optional: as of `Step`."""

    name: str
    command: Sequence[str]
    ended: child.Ended
    result: Path
    optional: bool = False

    @property
    def log(self) -> list[str]:
        """The end of what it printed."""
        return log_tail(self.result / LOG, 4 * _TAIL)


@dataclass(frozen=True)
class Part:
    """What is to be shown. share: of the time, relative. least_s: seconds that it takes at least.

    needs: why this host cannot show it, "" if it can. steps: its commands, given its directory and its seconds; the
    files of a step go to the folder of its name there. read: what those that were begun come to.
    """

    name: str
    title: str
    share: float
    least_s: float
    needs: Callable[[], str]
    steps: Callable[[Path, float], Sequence[Step]]
    read: Callable[[Sequence[Done]], Outcome]


# -------------------------------------------------------------------------------------------------------------- state


def open_state(directory: Path, setting: Mapping[str, Any]) -> None:
    """Make ``directory``, or see that what is in it was found with the same ``setting``. Raises PdRadixError."""
    file = directory / SETTING
    try:
        directory.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(file.read_text()) if file.exists() else None
    except (OSError, ValueError) as error:
        raise PdRadixError(f"{file}: {getattr(error, 'strerror', None) or error}: remove {directory}") from error
    if earlier is None:
        if _others(directory):
            raise PdRadixError(f"{directory} holds other files: give another --report")
        _write(file, setting)
        return
    if not isinstance(earlier, dict):
        raise PdRadixError(f"{file} is not what an earlier run has written: remove {directory}")
    other = [name for name in {**earlier, **setting} if earlier.get(name) != setting.get(name)]
    if other:
        told = "; ".join(f"{name} was {earlier.get(name)}, and is {setting.get(name)}" for name in other)
        raise PdRadixError(
            f"{directory} has parts that were found with something else ({told}): give another --report, or remove it"
        )


def _others(directory: Path) -> bool:
    return any(path.name != LOCK for path in directory.iterdir())


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """In it, no other run has ``directory``, which is made if it is not there. Raises PdRadixError."""
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Nothing is left in a directory that is somebody else's.
            if (directory / SETTING).exists() or not _others(directory):
                lock = stack.enter_context((directory / LOCK).open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PdRadixError(
                f"another run is at work in {directory}: wait for it, or give another --report"
            ) from error
        except OSError as error:
            raise PdRadixError(f"{directory}: {error.strerror or error}: give another --report") from error
        yield


def earlier(parts: Sequence[Part], directory: Path) -> dict[str, Outcome]:
    """What is known of each part from earlier runs; of one whose record cannot be read, nothing."""
    found = {}
    for part in parts:
        try:
            found[part.name] = Outcome.of(json.loads((directory / part.name / OUTCOME).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _write(path: Path, document: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


# --------------------------------------------------------------------------------------------------------------- runs


def run_all(
    parts: Sequence[Part],
    directory: Path,
    seconds: float,
    known: Callable[[Mapping[str, Outcome]], None],
    say: Callable[[str], None],
    asked_to_end: Callable[[], bool] = lambda: False,
) -> dict[str, Outcome]:
    """Do what is not finished of ``parts`` (in the order of worth) within ``seconds``.

    known: told all outcomes after each part, so that a report is there whatever comes. Time that a part leaves goes to
    those after it. What came before and was not finished is replaced when its part begins, and stays where it has no
    time.
    """
    outcomes = {name: outcome for name, outcome in earlier(parts, directory).items() if outcome.verdict != SKIPPED}
    waiting = []
    for part in parts:
        if part.name in outcomes and outcomes[part.name].finished:
            say(f"{part.name}: {outcomes[part.name].verdict}, from an earlier run")
            continue
        missing = part.needs()
        if missing:
            outcomes[part.name] = Outcome(SKIPPED, missing, finished=False)
            say(f"{part.name}: skipped, {missing}")
        else:
            waiting.append(part)
    end = time.monotonic() + seconds
    while waiting and not asked_to_end():
        left = end - time.monotonic()
        times = allot([Claim(part.name, part.share, part.least_s) for part in waiting], left)
        if not times:
            break
        part = next(part for part in waiting if part.name in times)
        waiting.remove(part)
        say(f"{part.name}: {part.title}; it has {times[part.name]:.0f} s")
        outcome = run_part(part, directory / part.name, times[part.name], asked_to_end)
        outcomes[part.name] = outcome
        say(f"{part.name}: {outcome.verdict} after {outcome.seconds:.0f} s{outcome.why and ': ' + outcome.why}")
        known(outcomes)
    for part in waiting:
        why = (
            "interrupted before it began"
            if asked_to_end()
            else f"no time was left for it: it takes {part.least_s:.0f} s"
        )
        outcomes.setdefault(part.name, Outcome(UNJUDGED, why, finished=False))
    known(outcomes)
    return outcomes


def run_part(part: Part, directory: Path, seconds: float, asked_to_end: Callable[[], bool] = lambda: False) -> Outcome:
    """Do one part from its beginning, and write down what it comes to. Whatever goes wrong in it is its verdict."""
    began = time.monotonic()
    done: list[Done] = []
    commands: list[str] = []
    try:
        _make_empty(directory)
        for step in part.steps(directory, seconds):
            left = seconds - (time.monotonic() - began)
            if step.unless is not None and step.unless.exists():
                continue
            if step.optional and left < max((one.ended.seconds for one in done), default=0):
                break
            result = directory / step.name
            result.mkdir(exist_ok=True)
            commands.append(as_typed(step, directory))
            ended = child.run(step.command, dict(step.environment), result / LOG, left, asked_to_end)
            done.append(Done(step.name, step.command, ended, result, step.optional))
            if ended.stopped:
                break
        outcome = _judged(part, done)
    except Exception as error:  # one part is not to lose the others
        outcome = Outcome(FAILED, f"{type(error).__name__}: {error}", tail=done[-1].log[-_TAIL:] if done else ())
    date = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    outcome = replace(outcome, commands=tuple(commands), seconds=time.monotonic() - began, date=date)
    if outcome.finished or not asked_to_end():
        try:
            _write(directory / OUTCOME, outcome.document())
        except OSError as error:
            why = f"its record cannot be written: {error}"
            return replace(outcome, verdict=FAILED, why=f"{outcome.why}; {why}" if outcome.why else why, finished=False)
    return outcome


def _make_empty(directory: Path) -> None:
    if directory.is_file() or directory.is_symlink():
        directory.unlink()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _judged(part: Part, done: Sequence[Done]) -> Outcome:
    outcome, last = part.read(done), done[-1]
    # An exit status other than 0 goes with what the last one has found wrong, and not with a result that is well.
    crashed = [
        one
        for one in done
        if one.ended.code and not one.ended.stopped and (one is not last or outcome.verdict == PASSED)
    ]
    if crashed and outcome.verdict != FAILED:
        why = ended_with(crashed[0])
        outcome = replace(
            outcome, verdict=FAILED, why=why, lines=(*outcome.lines, f"FAILED: {why}"), tail=crashed[0].log[-_TAIL:]
        )
    if not last.ended.stopped:
        return outcome
    if last.optional and last.ended.overran and outcome.verdict == PASSED:
        return replace(outcome, lines=(*outcome.lines, f"{last.name} was {last.ended.stopped}, and is left out"))
    # What there is of it is worth telling, and what has failed has failed.
    why = f"{last.name} was {last.ended.stopped}"
    if outcome.verdict == FAILED:
        return replace(outcome, why=f"{outcome.why}; then {why}", finished=False)
    return replace(outcome, verdict=UNJUDGED, why=why, tail=outcome.tail or last.log[-_TAIL:], finished=False)


def as_typed(step: Step, directory: Path) -> str:
    """The command as it can be given by hand: of this Python only its program, of the part's files only the names."""
    words = [*step.command]
    if words[:2] == [sys.executable, "-m"]:
        words = ["pd-radix", *words[3:]] if words[2] == "sglang_pd_radix.tools.cli" else ["python", *words[1:]]
    shown = hidden([word.replace(f"{directory.parent}/", "") for word in words])
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in step.environment), shlex.join(shown)])


def hidden(words: Sequence[str]) -> list[str]:
    """A command line without the secrets in it, and of paths only the last part."""
    shown: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if shown and shown[-1] in _SECRET:
            shown.append("...")
        elif equals and _SECRET_VARIABLE.fullmatch(name):
            shown.append(f"{name}=...")
        elif name in _SECRET:
            shown.append(f"{name}=..." if equals else name)
        elif shown and _is_line(shown[-1]):
            shown.append(_hidden_line(word))
        elif _is_line(name) and equals:
            shown.append(f"{name}={_hidden_line(value)}")
        elif word.startswith("/"):
            shown.append(Path(word).name)
        else:
            shown.append(f"{name}={Path(value).name}" if value.startswith("/") else word)
    return shown


def _is_line(option: str) -> bool:
    """Whether its value is a command line, also where the option is cut short, as argparse takes it."""
    return len(option) > len("--") and any(name.startswith(option) for name in _LINES)


def _hidden_line(line: str) -> str:
    """Options of engines that are one word of a command, after the name of a side if there is one."""
    side = re.match(r"[a-z][a-z0-9-]*:|", line)
    named = side[0] if side else ""
    try:
        return named + shlex.join(hidden(shlex.split(line.removeprefix(named))))
    except ValueError:
        return "..."


def read_json(path: Path) -> Any:
    """What a command has written there; None if it has not, or not all of it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def without_result(done: Done) -> Outcome:
    """Of a step that has left none: it crashed, unless it was stopped."""
    lines = done.log
    if done.ended.stopped:
        return Outcome(UNJUDGED, tail=lines[-_TAIL:])
    return Outcome(FAILED, ended_with(done, " and without a result"), tail=lines[-_TAIL:])


def ended_with(done: Done, more: str = "") -> str:
    """How it ended, and what it has said of that itself."""
    own = [line.partition("pd-radix: ")[2] for line in done.log if line.startswith("pd-radix: ")]
    why = f"{done.name} ended with exit status {done.ended.code}{more}"
    return f"{why}: {own[-1]}" if own else why
