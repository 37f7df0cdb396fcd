"""Executes the patch files on top of the engine's modules.

A patch file is identified by its path: ``sglang/srt/disaggregation/decode.py`` under :func:`patch_root` belongs to the
engine module ``sglang.srt.disaggregation.decode``. If the engine has that module, the file is an *overlay*: it runs
after the engine's code in its own namespace, and the names in its ``__all__`` go into the module. Otherwise the file is
a *new module*, found through the ``__path__`` of the engine's package.

An *extra* is a folder ``extras/NAME`` with such a tree. Overlays of one module run in order: the core's, then those of
the extras in the order of ``extras/ORDER``. Each sees the module as the one before left it. A line of ORDER is
``NAME``, or ``NAME: OTHER`` if it imports another extra. New modules have unique names: an extra changes modules of the
engine, never of the core.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from sglang_pd_radix.environment import patches_engine
from sglang_pd_radix.errors import PatchError, PdRadixError

ENGINE_VERSION = "0.5.10.post1"
BUILT_IN_SINCE = (0, 5, 11)
WAY_OUT = "Set SGLANG_PD_RADIX=0 to run the engine without the patch set."
#: The extras that run: names separated by commas, or "none". Empty or unset: all.
EXTRAS = "SGLANG_PD_RADIX_EXTRAS"
# Set once the reason for being inactive has been printed, so that child processes do not repeat it.
_TOLD = "SGLANG_PD_RADIX_TOLD"


@dataclass
class _State:
    active: bool = False
    reason: str = "the engine has not been imported in this process"
    engine_root: Path | None = None
    extras: list[str] = field(default_factory=list)


_state = _State()
_applied: set[str] = set()
# Namespaces of the overlays that have run.
_namespaces: list[dict[str, Any]] = []
_failed: dict[str, PatchError] = {}


@dataclass(frozen=True)
class PatchFile:
    """A file of the patch set: dotted module name, path, whether the engine has that module, and its root among
    `patch_roots`."""

    module: str
    path: Path
    overlay: bool
    root: Path


class EngineView(ModuleType):
    """The module before the overlay; names that the overlay did not change are read from the live module.

    An overlay imports the module it changes (``from sglang.srt.x import decode as engine``). Without this view,
    ``engine.f`` in a function of the overlay would be the overlay's own ``f`` and recurse for ever.
    """

    def __init__(self, module: ModuleType, originals: dict[str, Any]) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(originals)
        self.__dict__["__pd_radix_module__"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["__pd_radix_module__"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["__pd_radix_module__"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["__pd_radix_module__"], name)


def patch_root() -> Path:
    """The directory of the patch tree ``sglang/``: inside the package in a wheel, the checkout's in an editable
    install."""
    package = Path(__file__).resolve().parents[1]
    carried = package / "_patches"
    return carried if carried.is_dir() else package.parent


def known_extras(root: Path | None = None) -> list[str]:
    """The extras that exist, in the order of their overlays.

    ``root`` is the directory that holds the patch tree (default: `patch_root`).
    """
    folder = (root or patch_root()) / "extras"
    return [name for name in needs(root) if (folder / name).is_dir()]


def needs(root: Path | None = None) -> dict[str, list[str]]:
    """The extras that each one imports, in that order, including missing ones."""
    order = (root or patch_root()) / "extras" / "ORDER"
    lines = order.read_text(encoding="utf-8").splitlines() if order.is_file() else []
    return {name.strip(): others.split() for name, _, others in (line.partition(":") for line in lines) if name.strip()}


def extras() -> list[str]:
    """The extras that run. Raises PdRadixError if SGLANG_PD_RADIX_EXTRAS names an unknown one, or leaves out a needed
    one."""
    known = known_extras()
    given = [name.strip() for name in os.environ.get(EXTRAS, "").split(",") if name.strip()]
    if given == ["none"]:
        return []
    for name in given:
        if name not in known:
            takes = f"none, or some of: {', '.join(known)}"
            raise PdRadixError(f"SGLANG_PD_RADIX_EXTRAS names {name!r}, and there is no such extra. It takes {takes}.")
    running = [name for name in known if name in given or not given]
    for name in running:
        if missing := [other for other in needs()[name] if other not in running]:
            raise PdRadixError(f"The extra {name} needs {missing[0]}, which is not there or not selected by {EXTRAS}.")
    return running


def patch_roots(names: Sequence[str], root: Path | None = None) -> list[Path]:
    """The directories with a patch tree: ``root`` (default: `patch_root`), and those of the extras ``names``."""
    root = root or patch_root()
    return [root, *(root / "extras" / name for name in names)]


def active() -> bool:
    """Whether the patch set is applied to the engine in this process."""
    return _state.active


def status() -> dict[str, Any]:
    """The loader's state in this process: ``active``, ``reason``, ``engine``, ``modules`` (dotted names patched so
    far), ``patch_root``, ``extras``."""
    return {
        "active": _state.active,
        "reason": _state.reason,
        "engine": str(_state.engine_root) if _state.engine_root else None,
        "modules": sorted(_applied),
        "patch_root": str(patch_root()),
        "extras": _state.extras,
    }


def engine_version() -> str | None:
    """The installed engine's version from its metadata, without an import; None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def engine_root() -> Path | None:
    """The engine's package directory, without an import; None if it is not installed."""
    spec = importlib.util.find_spec("sglang")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def inert_reason(version: str | None) -> str | None:
    """Why the patch set does not apply to this engine version; None if it does."""
    if version == ENGINE_VERSION:
        return None
    if version is None:
        return f"the engine's version is unknown (no package metadata), and only {ENGINE_VERSION} is patched"
    release = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if release and tuple(map(int, release.groups())) >= BUILT_IN_SINCE:
        return f"sglang {version} is not patched: this release has the flag built in"
    return f"sglang {version} is not patched: this patch set is for {ENGINE_VERSION} only"


def _of_another_installation(root: Path) -> str | None:
    """Why `engine_version` is not the version of the engine in ``root``; None if it is.

    A source tree on PYTHONPATH has no metadata: what is found belongs to an engine that does not run.
    """
    found = importlib.metadata.distribution("sglang")
    place = Path(str(found.locate_file("sglang")))
    folders = [place]
    with suppress(ValueError, KeyError, TypeError):
        source = json.loads(found.read_text("direct_url.json") or "{}")
        if source["dir_info"]["editable"]:
            # An editable installation: only its metadata is in site-packages.
            place = Path(unquote(urlsplit(source["url"]).path))
            folders += [place / within / "sglang" for within in ("", "python", "src")]
    # setuptools can also install a folder of links to each file ("strict").
    roots = {os.path.realpath(root), os.path.dirname(os.path.realpath(root / "__init__.py"))}
    if roots & set(map(os.path.realpath, folders)):
        return None
    installed = f"sglang {ENGINE_VERSION} is installed in {place}"
    return f"the engine that runs is in {root}, and its version is unknown: {installed}"


def patch_files(engine: Path, roots: Sequence[Path]) -> Iterator[PatchFile]:
    """Every file of the patch trees below ``roots``, tree by tree, sorted by path.

    ``engine``: the engine's package directory; not imported. Raises PatchError for a file that would hide a package of
    the engine, for a second new module of one name, and for an unreadable folder.
    """
    new: dict[str, Path] = {}
    paths = [(path, root) for root in roots for path in _python_files(root / "sglang")]
    for path, root in paths:
        relative = path.relative_to(root / "sglang")
        target = engine / relative
        parts = ("sglang", *relative.with_suffix("").parts)
        if parts[-1] == "__init__":
            parts = parts[:-1]
            hidden = target.parent.is_dir() and not target.is_file()
        else:
            hidden = target.with_suffix("").is_dir()
        if hidden:
            raise PatchError(f"patch file {path} would hide the engine's package {'.'.join(parts)}. {WAY_OUT}")
        file = PatchFile(".".join(parts), path, target.is_file(), root)
        if not file.overlay and (first := new.setdefault(file.module, path)) != path:
            raise PatchError(f"patch files {first} and {path} are the same new module, {file.module}. {WAY_OUT}")
        yield file


def _python_files(folder: Path) -> list[Path]:
    """Every Python file below ``folder``, sorted by path, except names and folders that begin with a dot.

    Editors and notebooks leave those, and they may be dangling links.
    """
    found = []
    for inside, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(inside, name) for name in files if name.endswith(".py") and not name.startswith(".")]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise PatchError(f"{error.filename} of sglang-pd-radix cannot be read: {error.strerror}. {WAY_OUT}") from error


def activate(engine: ModuleType) -> None:
    """Prepare the patches before the code of ``engine`` (the top-level package ``sglang``) runs.

    Applies to exactly one engine version; on others it prints the reason in one line on stderr and changes nothing.
    Raises PdRadixError for an invalid SGLANG_PD_RADIX or SGLANG_PD_RADIX_EXTRAS, and PatchError for an unreadable
    folder; later imports of the engine fail alike.
    """
    reason = inert_reason(engine_version())
    if reason is None and engine.__file__ is not None:
        reason = _of_another_installation(Path(engine.__file__).parent)
    if reason:
        _state.reason = reason
        if os.environ.get(_TOLD) != reason:
            os.environ[_TOLD] = reason
            print(f"sglang-pd-radix: inactive: {reason}.", file=sys.stderr)
        return
    if engine.__file__ is None:
        return
    patches_engine()
    _state.extras = extras()
    from sglang_pd_radix.supplied import cpu_host, torch_layers

    cpu_host.install()
    torch_layers.install()
    root = Path(engine.__file__).parent
    if not _state.active:
        _register(root)
    _state.active, _state.reason, _state.engine_root = True, f"applied to sglang {ENGINE_VERSION}", root
    _extend_packages()


def _register(root: Path) -> None:
    import wrapt

    # Read everything before the first hook is registered: a failure leaves nothing half done.
    files, packages = list(patch_files(root, patch_roots(_state.extras))), _packages()
    for file in files:
        if file.overlay:
            wrapt.register_post_import_hook(partial(_overlay, path=file.path), file.module)
    for name, folders in packages.items():
        # Namespace packages follow their parent's __path__.
        if any((folder / "__init__.py").is_file() for folder in (root.joinpath(*name.split(".")[1:]), *folders)):
            wrapt.register_post_import_hook(lambda module: _extend_packages(), name)


@cache
def _packages() -> dict[str, list[Path]]:
    """Our packages and their folders, in the order of the roots."""
    found: dict[str, list[Path]] = {}
    for root in patch_roots(_state.extras):
        folders = {path.parent for path in _python_files(root / "sglang")}
        folders |= {parent for folder in folders for parent in folder.parents if root in parent.parents}
        for folder in sorted(folders):
            found.setdefault(".".join(folder.relative_to(root).parts), []).append(folder)
    return found


def _extend_packages() -> None:
    """Append our folders to the ``__path__`` of every loaded package that has some, so new modules are found.

    Appended folders are searched after the engine's own.
    """
    for name, folders in _packages().items():
        package = sys.modules.get(name)
        for folder in map(str, folders if package is not None else ()):
            if folder not in list(package.__path__):  # type: ignore[union-attr]
                package.__path__.append(folder)  # type: ignore[union-attr]


def _overlay(module: ModuleType, path: Path) -> None:
    name = module.__name__
    _extend_packages()
    namespace: dict[str, Any] = {
        "__name__": name,
        "__file__": str(path),
        "__package__": module.__package__,
        "__spec__": module.__spec__,
        "__loader__": module.__loader__,
    }
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), namespace)
        names = _exported(namespace)
    except Exception as error:
        failure = PatchError(f"patch file {path} failed: {type(error).__name__}: {error}. {WAY_OUT}")
        _refuse(name, failure)
        raise failure from error

    originals = {key: vars(module)[key] for key in names if key in vars(module)}
    for key, value in namespace.items():
        if value is module:
            namespace[key] = EngineView(module, originals)
    for key in names:
        setattr(module, key, namespace[key])
    _rebind(module, originals)
    _namespaces.append(namespace)
    # The engine's originals, if an earlier overlay has changed the same names.
    before = vars(module).get("__pd_radix__", {"names": [], "originals": {}})
    module.__pd_radix__ = {  # type: ignore[attr-defined]
        "names": [*dict.fromkeys([*before["names"], *names])],
        "originals": originals | before["originals"],
    }
    _applied.add(name)


def _rebind(module: ModuleType, originals: dict[str, Any]) -> None:
    """Replace the old classes and functions in modules that have imported them: during this module's own execution (a
    circular import), before the loader (a late start), and in earlier overlays, also this module's."""
    changed = {
        id(old): vars(module)[key]
        for key, old in originals.items()
        if callable(old) and getattr(old, "__module__", None) == module.__name__
    }
    modules = [other for name, other in list(sys.modules.items()) if name.startswith("sglang.")]
    for names in [*(vars(other) for other in modules if type(other) is ModuleType), *_namespaces]:
        for key, value in list(names.items()):
            if id(value) in changed:
                names[key] = changed[id(value)]


def _exported(namespace: dict[str, Any]) -> list[str]:
    names = namespace.get("__all__")
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError("__all__ must list the names this file changes or adds")
    missing = [name for name in names if name not in namespace]
    if missing:
        raise NameError(f"__all__ names what the file does not define: {', '.join(missing)}")
    return list(names)


def _refuse(name: str, error: PatchError) -> None:
    """Make every later import of this module fail as the first did: a caller that retries after the error would
    otherwise get the engine's module without the patch."""
    _failed[name] = error
    if not any(isinstance(finder, _Refusal) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Refusal())  # type: ignore[arg-type]


class _Refusal:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _failed:
            raise _failed[name]
