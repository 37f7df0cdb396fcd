"""The table of the parts, in the order of worth: what each shows, what it takes, and of which commands it is made.

Least times are seconds. Those of a GPU host are of one H100, where a part of three workers took two minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_pd_radix.tools.cluster import has_option, option_value, with_defaults

from . import readings
from .outcome import Outcome
from .runner import Done, Part, Step
from .setting import TRITON, Setting, without_drafts

#: Pool of workers that no command sizes, tokens.
POOL = 16384
_CHAIN = {
    "--speculative-num-steps": "3",
    "--speculative-eagle-topk": "1",
    "--speculative-num-draft-tokens": "4",
}
# What only a chat's first tokens and bytes are wanted of is held in small.
_SMALL_CHAT = ("--clients", "2", "--turns", "3", "--document", "200", "--local-prefill", "off")
_CHAT = ("--local-prefill", "off")
#: Bounds of running requests for the exchange of ITL for requests/s; the first is none.
BOUNDS, SMALL_BOUNDS = ("256", "16", "48", "96"), ("256", "4", "12")


@dataclass(frozen=True)
class Row:
    """A part of the table. least_s: on a GPU host, and in small. The rest as of `Part`, given the setting."""

    name: str
    title: str
    share: float
    least_s: tuple[float, float]
    steps: Callable[[Setting, Path, float], Sequence[Step]]
    read: Callable[[Sequence[Done]], Outcome]
    needs: Callable[[Setting], str] = lambda setting: ""

    def part(self, setting: Setting) -> Part:
        # Workers that share a GPU start one after the other, unless it is a large one and their model is made.
        in_turn = not setting.small and not setting.together()
        return Part(
            self.name,
            self.title,
            self.share,
            self.least_s[setting.small] * (2 if in_turn else 1),
            functools.partial(self.needs, setting),
            functools.partial(self.steps, setting),
            self.read,
        )


# ------------------------------------------------------------------------------------------------------------- answers


def _demo(
    setting: Setting,
    directory: Path,
    model: str,
    *arguments: str,
    forced: Mapping[str, str] | None = None,
) -> Step:
    """A chat with the flag off and on, in exact float32."""
    chat = _SMALL_CHAT if setting.small else _CHAT
    out = directory / "chat"
    files = ("--json", str(out / readings.DEMO), "--work-dir", str(out / "work"))
    backend = () if "--backend" in arguments else ("--backend", setting.backend)
    return setting.tool(
        "chat",
        "demo",
        *("--model", model, *backend, *chat, *arguments, *files),
        options=setting.together(POOL),
        forced=forced,
        environment=setting.exact(),
        exact=True,
    )


def _exactness(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    if setting.model:
        return [_demo(setting, directory, setting.model)]
    return [setting.making("qwen3"), _demo(setting, directory, str(setting.model_of("qwen3")))]


def _verify(
    setting: Setting,
    directory: Path,
    model: str,
    options: Mapping[str, str | None],
    forced: Mapping[str, str] | None = None,
) -> Step:
    out = directory / "verify"
    files = ("--json", str(out / readings.VERIFY), "--work-dir", str(out / "logs"))
    return setting.tool(
        "verify",
        "verify",
        *("--model", model, "--backend", setting.backend, *files),
        options={**setting.together(), **options},
        forced=forced,
    )


def _rounding(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    if setting.model:
        return [_verify(setting, directory, setting.model, {})]
    model = str(setting.model_of("qwen3"))
    return [setting.making("qwen3"), _verify(setting, directory, model, {"--dtype": "bfloat16"})]


def _exact_in_small(
    setting: Setting, directory: Path, arch: str, forced: Mapping[str, str] | None = None
) -> list[Step]:
    """Of a made model the exact chat on a CPU host, and `pd-radix verify` in bfloat16 on a GPU."""
    model = str(setting.model_of(arch))
    if setting.small:
        return [setting.making(arch), _demo(setting, directory, model, forced=forced)]
    return [setting.making(arch), _verify(setting, directory, model, {"--dtype": "bfloat16"}, forced)]


def _read_exact_in_small(done: Sequence[Done]) -> Outcome:
    return readings.verify(done) if done[-1].name == "verify" else readings.demo(done)


def _mla(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    return _exact_in_small(setting, directory, "mla")


def _linear(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    # Larger pages need a strategy that a decode worker without the flag has on GPUs alone. On these the engine's kernel
    # for chunks of a prompt refuses float32.
    return _exact_in_small(setting, directory, "qwen3-next", {"--page-size": "1", "--max-mamba-cache-size": "80"})


def _eagle(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    target = setting.model_of("eagle")
    draft = {"--speculative-algorithm": "EAGLE", "--speculative-draft-model-path": f"{target}/draft"}
    return [setting.making("eagle"), _demo(setting, directory, str(target), forced={**draft, **_CHAIN})]


def _mooncake(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    model = str(setting.model_of("qwen3"))
    return [setting.making("qwen3"), _demo(setting, directory, model, "--backend", "mooncake")]


def _needs_mooncake(setting: Setting) -> str:
    if setting.backend == "mooncake":
        return "all parts go over it"
    return setting.host.mooncake


# ------------------------------------------------------------------------------------------------------------- kernels


def _kernels(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    assert setting.host.checkout
    # On a CPU the same kernels are interpreted.
    name = "test_triton_shared_attention.py" if setting.small else "test_triton_on_gpu.py"
    file = setting.host.checkout / "test" / "srt" / "unit" / name
    result = directory / "pytest" / readings.PYTEST
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={result}", str(file)]
    return [Step("pytest", command)]


def _needs_checkout(setting: Setting) -> str:
    if setting.host.checkout is None:
        return "the tests are in a checkout only, and this package is installed without one"
    return "" if setting.host.has_pytest else "pytest is not installed"


# -------------------------------------------------------------------------------------------------------- measurements


def _bench(
    setting: Setting,
    directory: Path,
    name: str,
    keys: str,
    *arguments: str,
    forced: Mapping[str, str] | None = None,
    environment: Sequence[tuple[str, str]] = (),
) -> Step:
    out = directory / name / "report"
    model = setting.model or ("" if setting.small else str(setting.model_of("billion")))
    small = ("--quick",) if setting.small else ()
    return setting.tool(
        name,
        "bench",
        *(*small, "--only", keys, "--backend", setting.backend, *(("--model", model) if model else ())),
        *(*arguments, "--work-dir", str(out)),
        options={**setting.together(), **_on_gpu(setting)},
        forced=forced,
        environment=tuple(environment),
    )


def _on_gpu(setting: Setting) -> dict[str, str | None]:
    """Options of measurements on a GPU; in small the benchmark has its own."""
    if setting.small:
        return {}
    graphs = {} if has_option(setting.engine_options, "--disable-cuda-graph") else {"--cuda-graph-max-bs": "128"}
    attention = {"--attention-backend": TRITON} if setting.triton_decodes() else {}
    # A made model's file is in float32, of which the engine would make float16.
    dtype = {} if setting.model else {"--dtype": "bfloat16"}
    return {**graphs, **attention, **dtype}


def _measured(setting: Setting, *steps: Step) -> list[Step]:
    """``steps``, and before them the model that they take; in small the benchmark makes its own."""
    return [*steps] if setting.model or setting.small else [setting.making("billion"), *steps]


def _shared(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    if setting.small:
        # It is on by default there.
        third = ["--compare", "unshared:SGLANG_CPU_SHARED_PREFIX_ATTENTION=0"]
    elif setting.triton_decodes():
        third = ["--compare", "shared:SGLANG_TRITON_SHARED_PREFIX_ATTENTION=1"]
    else:
        third = []
    runs = "2" if seconds > 2 * SHARED_LEAST_S[setting.small] else "1"
    return _measured(setting, _bench(setting, directory, "bench", "a", "--runs", runs, *third))


SHARED_LEAST_S = (240.0, 180.0)


def _read_shared(done: Sequence[Done]) -> Outcome:
    outcome = readings.bench(done, ("ttft", "itl", "running"))
    one = done[-1]
    if one.name != "bench" or "--compare" in one.command:
        return outcome
    chosen = option_value(one.command, "--decode-attention-backend", "--attention-backend") or "the engine's choice"
    left_out = f"without the side that reads once, which Triton's decode attention can alone: here it is {chosen}"
    return dataclasses.replace(outcome, why=outcome.why or left_out, lines=(*outcome.lines, left_out))


def _exchange(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    sizes = () if setting.small else ("--set", "a.requests=400", "--set", "a.rounds=2")
    first, *more = SMALL_BOUNDS if setting.small else BOUNDS

    def bound(most: str) -> Step:
        forced = {"--max-running-requests": most}
        return _bench(setting, directory, most, "a", "--runs", "1", *sizes, forced=forced)

    steps = [bound(first), *(bound(most) for most in more)]
    optional = [*steps[:2], *(Step(s.name, s.command, s.environment, optional=True) for s in steps[2:])]
    return _measured(setting, *optional)


def _chat(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    third = ("--compare", "sent:--disaggregation-decode-local-prefill off")
    keys = "c" if setting.small else "c,i"
    return _measured(setting, _bench(setting, directory, "bench", keys, "--runs", "1", *third))


def _placement(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    first, second = (gpu.index for gpu in setting.host.gpus[:2])
    sizes = ("--runs", "1", "--set", "a.requests=400", "--set", "a.rounds=2")
    places = {"same-gpu": first, "another-gpu": f"{first},{second}"}
    steps = [
        _bench(setting, directory, name, "a", *sizes, environment=[("CUDA_VISIBLE_DEVICES", visible)])
        for name, visible in places.items()
    ]
    return _measured(setting, *steps)


def _needs_two_gpus(setting: Setting) -> str:
    count = len(setting.host.gpus)
    return "" if count > 1 else f"it takes two GPUs, and {count or 'none'} can be seen here"


# -------------------------------------------------------------------------------------------------------------- faults

#: Seconds that chaos takes beside its storm.
_CALM_S = 240.0


def _faults(setting: Setting, directory: Path, seconds: float) -> list[Step]:
    out = directory / "storm"
    model = str(setting.model_of("qwen3"))
    files = ("--json", str(out / readings.STORM), "--log-dir", str(out / "logs"))
    router = ("--router", setting.router) if setting.router else ()
    common = ("--model", model, "--backend", setting.backend, *router, *files)
    # The model is a made one.
    given = without_drafts(setting.engine_options_in_float32())
    if _in_full(setting):
        assert setting.host.checkout
        options = with_defaults(given, setting.together())
        program = [str(setting.host.checkout / "benchmark" / "chaos.py"), "--one-host", "--distinct", "60"]
        more = ["--seconds", f"{max(60.0, seconds - _CALM_S):.0f}", f"--options={shlex.join(options)}"]
    else:
        program = ["-m", "sglang_pd_radix.tools.thorough.storm"]
        options = given
        more = ["--seconds", f"{0.6 * seconds:.0f}", *(["--", *options] if options else [])]
    command = [sys.executable, *program, *common, *more]
    return [setting.making("qwen3"), Step("storm", command, setting.exact())]


def _in_full(setting: Setting) -> bool:
    """Whether there is a checkout whose chaos can be run, and a host that is not too small for it."""
    return not setting.small and setting.host.checkout is not None


def _read_faults(done: Sequence[Done]) -> Outcome:
    in_full = any(os.path.basename(word) == "chaos.py" for word in done[-1].command)
    return readings.chaos(done) if in_full else readings.storm(done)


# --------------------------------------------------------------------------------------------------------------- table

#: In the order of worth: with few minutes the first are done.
ROWS = (
    Row(
        "exactness", "a chat in float32, off and on: every token is the same", 8, (140, 120), _exactness, readings.demo
    ),
    Row("rounding", "every answer and its KV against prefill's own pass", 10, (150, 120), _rounding, readings.verify),
    Row(
        "kernels", "kernels of shared prefixes against float64", 5, (60, 60), _kernels, readings.tests, _needs_checkout
    ),
    Row(
        "shared",
        "(a) shared prefixes, decode short of memory: off, on, read once",
        16,
        SHARED_LEAST_S,
        _shared,
        _read_shared,
    ),
    Row("exchange", "(a): what ITL is paid for requests/s", 14, (200, 180), _exchange, readings.exchange),
    Row(
        "chat",
        "chats: off, on, short turns computed on decode",
        10,
        (170, 120),
        _chat,
        functools.partial(readings.bench, pictures=("ttft", "turns")),
    ),
    Row("mla", "MLA", 6, (140, 120), _mla, _read_exact_in_small),
    Row("linear", "linear attention beside full attention", 6, (160, 180), _linear, _read_exact_in_small),
    Row("eagle", "EAGLE, in float32", 6, (140, 180), _eagle, readings.demo),
    Row("mooncake", "KV over Mooncake, in float32", 6, (140, 120), _mooncake, readings.demo, _needs_mooncake),
    Row(
        "placement",
        "prefill on decode's GPU, and on another",
        8,
        (240, 240),
        _placement,
        readings.placement,
        _needs_two_gpus,
    ),
    Row("faults", "workers killed, stopped and flushed: answers stay right", 20, (270, 240), _faults, _read_faults),
)
NAMES = tuple(row.name for row in ROWS)


def parts(setting: Setting, names: Sequence[str] = NAMES) -> list[Part]:
    """Those of ``names``, in the order of worth."""
    return [row.part(setting) for row in ROWS if row.name in names]
