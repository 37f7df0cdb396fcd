"""What pages of KV are called in a PegaFlow server: a namespace per model, a chain of hashes per prompt.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = [
    "HASH_BYTES",
    "KV_OPTIONS",
    "NOT_FROM_FILES",
    "WEIGHT_OPTIONS",
    "config_by_path",
    "config_file",
    "config_of_folder",
    "deepgemm_experts",
    "experts_apart",
    "files_digest",
    "first_hash",
    "model_files",
    "model_namespace",
    "name_to_read",
    "only_where_set",
    "page_hashes",
    "rank_namespace",
    "weights_fingerprint",
]

HASH_BYTES = 32
_TOKEN = array("q")

# Options by which the KV of the same tokens of the same model may differ: those that are part of each name.
KV_OPTIONS = (
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "load_format",
    "model_impl",
    "quantization",
    "quantization_param_path",
    "torchao_config",
)
# And those that make other weights of the same files. In a namespace only where they are set, for what was saved before
# they were.
WEIGHT_OPTIONS = (
    "custom_weight_loader",
    "model_loader_extra_config",
    "modelopt_checkpoint_restore_path",
    "modelopt_quant",
    "quantize_and_serve",
    "rl_quant_profile",
)
# Of these, what changes only how files are read.
_LOADER = "model_loader_extra_config"
_ONLY_HOW = ("enable_multithread_load", "num_threads")
# What came to names later, of storages too, and is in them only where it is set: what a model computes beside its
# weights, in which precision, and which experts; and the same in the environment.
_LATER_OPTIONS = (
    "enable_precise_embedding_interpolation",
    "ep_dispatch_algorithm",
    # With DeepGEMM, Blackwell has other weights of those in blocks of fp8.
    "fp8_gemm_runner_backend",
    "flashinfer_mxfp4_moe_precision",
    "forward_hooks",
    "rl_on_policy_target",
)
# Values of these that change nothing: "fake" experts are chosen by chance; "auto" takes DeepGEMM wherever it can.
_CHANGE_NOTHING = ("auto", "deep_gemm", "default", "static", "dynamic")
_ENVIRONMENT = (
    envs.SGLANG_DISABLED_MODEL_ARCHS,
    envs.SGLANG_ENABLE_JIT_DEEPGEMM,
    envs.SGLANG_EXTERNAL_MODEL_PACKAGE,
    envs.SGLANG_FORCE_FP8_MARLIN,
    envs.SGLANG_FP8_IGNORED_LAYERS,
    envs.SGLANG_INT4_WEIGHT,
    envs.SGLANG_MAMBA_CONV_DTYPE,
    envs.SGLANG_MAMBA_SSM_DTYPE,
    envs.SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN,
    envs.SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE,
    envs.SGLANG_QUANT_ALLOW_DOWNCASTING,
    envs.SGLANG_ROCM_DISABLE_LINEARQUANT,
    # With it, the KV of what is generated is that of other tokens.
    envs.SGLANG_SIMULATE_ACC_LEN,
    envs.SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR,
    envs.SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR,
    envs.SGLANG_USE_AITER_FP8_PER_TOKEN,
)
# The same of variables that the engine reads past its list: in small letters, what they are where they are not set.
_READ_DIRECTLY = {
    "ROCM_QUICK_REDUCE_QUANTIZATION": "none",
    "SGLANG_AITER_FP8_PREFILL_ATTN": "true",
    "SGLANG_CUTEDSL_MOE_SCALAR_INPUT_SCALE": "true",
    "SGLANG_MORI_DISPATCH_DTYPE": "auto",
    "SGLANG_MORI_FP4_DISP": "",
    "SGLANG_MORI_FP8_COMB": "false",
    "SGLANG_MORI_FP8_DISP": "",
    "SGL_USE_DEEPGEMM_BMM": "false",
}
_WORDS = {"0": "false", "1": "true"}
# Exchanges of tokens among experts with which DeepGEMM computes these where nothing is said.
_DEEPGEMM_EXCHANGES = ("deepep", "mooncake", "nixl")
# Of experts that KTransformers computes, of files of their own.
_EXPERTS_OPTIONS = ("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token")
# Load formats with which a worker has the weights of another, or of a server.
NOT_FROM_FILES = ("remote", "remote_instance")
# With weights made up at start, these decide which.
_RANDOM_WEIGHTS_OPTIONS = ("random_seed",)
# Advanced when a name no longer says what it said: as when an option came to names, under whose old ones its KV lies.
_VERSION = 4
# How the names of files end that the engine loads weights from.
_WEIGHTS = (".bin", ".gguf", ".pt", ".safetensors")
# And of what else says what is computed. The rest of a repository comes and goes: the engine downloads less than all.
_COUNT = (*_WEIGHTS, ".json", ".py")
# But for what makes tokens of a text, or chooses the next one: KV is kept under tokens.
_OF_TOKENS = (
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
# Load formats whose loaders read what lies in the model's folder itself, and nothing in the folders below it.
_IN_THE_FOLDER = (
    *("auto", "bitsandbytes", "dummy", "fastsafetensors", "flash_rl", "layered", "mistral", "pt", "safetensors"),
)
# Of these, those that read safetensors alone where there are any; but for models that find their files by themselves.
_SAFETENSORS_FIRST = ("auto", "bitsandbytes", "flash_rl", "layered")
_FIND_THEIR_OWN = ("CLIP", "Grok")
# A path with one of these has the engine make a config of params.json, with "eagle" in it another one.
_MISTRAL_PATHS = ("leanstral", "mistral-large-3", "mistral-small-4")
# Options that are paths: what is there counts.
_SCALES = "quantization_param_path"
_PATHS = ("modelopt_checkpoint_restore_path", "rl_quant_profile")


def first_hash(extra_key: str | None) -> bytes:
    """What the hash of a prompt's first page is chained to: another one for each ``extra_key`` (salt, adapter)."""
    return hashlib.sha256(
        b"none" if extra_key is None else b"key:" + extra_key.encode("utf-8", "surrogatepass")
    ).digest()


def page_hashes(token_ids: Sequence[int], page_size: int, before: bytes) -> list[bytes]:
    """One hash for each whole page of ``token_ids``, SHA-256 of the hash before it and the page's tokens (int64).

    before: the hash of the page that ends where ``token_ids`` begin, or `first_hash`. A rest of less than a page has
    none. Cost: about a microsecond per page and what SHA-256 takes for 8 bytes per token.
    """
    step = page_size * _TOKEN.itemsize
    data = array("q", token_ids).tobytes()
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        before = hashlib.sha256(before + data[start : start + step]).digest()
        hashes.append(before)
    return hashes


def weights_fingerprint(
    model_path: str,
    revision: str | None,
    named_by: str = "--model-path",
    args: ServerArgs | None = None,
    option: str = "--enable-pegaflow",
) -> str:
    """`files_digest` of the weights that ``model_path`` names, a path or a repository that has been downloaded.

    named_by: the option that gives the path. args, option: see `model_files`. Raises ValueError if there is neither, or
    no weights in them.
    """
    return files_digest(model_files(model_path, revision, option, named_by, args))


def files_digest(files: Sequence[tuple[str, Path]]) -> str:
    """A digest of files, in any order: of each its name, size and content or time of change.

    Of a file that a hub's cache has by the digest of its content, that counts: it is the same on all hosts. The same
    file in two snapshots counts once.
    """
    lines = set()
    for name, file in files:
        stat = file.stat()
        lines.add(f"{name}\0{stat.st_size}\0{_blob(file) or stat.st_mtime_ns}\n")
    return hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def _blob(file: Path) -> str | None:
    """The digest by which a hub's cache has the content of this file; None for a file that is in none.

    The first link to its ``blobs`` has it. From there another may lead to what several repositories share, which has
    another name.
    """
    while file.is_symlink():
        file = file.parent / file.readlink()
        if file.parent.name == "blobs" and (file.parents[1] / "snapshots").is_dir():
            return file.name
    return None


def model_files(
    model_path: str, revision: str | None, option: str, named_by: str, args: ServerArgs | None = None
) -> list[tuple[str, Path]]:
    """The files of the model that ``model_path`` names, or of its snapshots that have been downloaded, with names.

    What the engine does not load has no part in it: what else a repository has comes with one download and not with
    another. A config comes from the hub's cache, weights from there or from --download-dir: from which of them depends
    on the revision, and on what was there before the start. What either has counts, so that the engine's weights do.
    option: that needs them. named_by: the one that gives the path. args: of an engine that loads them, which may be
    from --download-dir, and of which it is known what it loads; None, or where nothing of that is there: all count.
    Raises ValueError if they are not on this machine, or if snapshots are without weights that are not made up.
    """
    path = Path(model_path)
    download_dir = None if args is None else args.download_dir
    made_up = args is not None and args.load_format == "dummy"
    found = [path] if path.exists() else _snapshots(model_path, revision, download_dir)
    folders = [_below(one) for one in found]
    files = [file for folder in folders for file in folder]
    weights = any(file.suffix in _WEIGHTS for _, file in files)
    if not found or not (path.exists() or made_up or weights):
        raise ValueError(
            f"{option} cannot tell which weights {model_path!r} has, since they are not on this machine: "
            f"download them first (`huggingface-cli download`), or give a directory as {named_by}."
        )
    if args is None or not (weights or made_up):
        return files
    files = [(name, file) for name, file in files if file.suffix in _COUNT and file.name not in _OF_TOKENS]
    config = _read_config(files)
    if args.load_format not in _IN_THE_FOLDER or _others_load(args) or _own_code_runs(files, config, args):
        return files
    if not config_by_path(model_path) and "config.json" in dict(files):
        files = [file for file in files if file[0] != "params.json"]
    return [file for folder in folders for file in _loaded(set(folder) & set(files), config, args)]


def _loaded(files: set[tuple[str, Path]], config: dict[str, Any] | None, args: ServerArgs) -> list[tuple[str, Path]]:
    """Of ``files`` of a folder that may count, by their names there, those that the engine's own loaders read."""
    found = {name: file for name, file in files if "/" not in name and file.suffix != ".py"}
    own = any(str(one).startswith(_FIND_THEIR_OWN) for one in _architectures(config))
    if args.load_format in _SAFETENSORS_FIRST and not own and any(name.endswith(".safetensors") for name in found):
        for name in list(found):
            if name.endswith((".bin", ".bin.index.json", ".gguf", ".pt")):
                del found[name]
    return list(found.items())


def _others_load(args: ServerArgs) -> bool:
    """Whether a loader other than the engine's ordinary ones may read a model's files, or a draft's."""
    names = ("quantization", "speculative_draft_model_quantization")
    modelopt = any(str(getattr(args, name, None)).startswith("modelopt") for name in names)
    return modelopt or bool(_weight_options(args) or envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get())


def _own_code_runs(files: Sequence[tuple[str, Path]], config: dict[str, Any] | None, args: ServerArgs) -> bool:
    """Whether code that comes with a model may run, which may read any of its files; nothing is said where not.

    The engine asks for --trust-remote-code for a config's code, and not for that of a model that it does not know.
    """
    if not any(file.suffix == ".py" for _, file in files):
        return False
    if getattr(args, "trust_remote_code", False) or getattr(args, "model_impl", None) not in (None, "auto", "sglang"):
        return True
    # Another config than the one that is looked at here.
    if (getattr(args, "json_model_override_args", None) or "{}") != "{}":
        return True
    if getattr(args, "decrypted_config_file", None) or getattr(args, "decrypted_draft_config_file", None):
        return True
    from sglang.srt.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    return config is not None and not any(one in known for one in _architectures(config))


def _read_config(files: Sequence[tuple[str, Path]]) -> dict[str, Any] | None:
    """The config.json among ``files``; None where there is none, or the engine could not read it."""
    for name, file in files:
        if name == "config.json":
            try:
                found = json.loads(file.read_bytes())
            except (OSError, ValueError):
                return None
            return found if isinstance(found, dict) else None
    return None


def _architectures(config: dict[str, Any] | None) -> list[Any]:
    found = (config or {}).get("architectures")
    return found if isinstance(found, list) else []


def config_by_path(path: str) -> str:
    """For a name: which config the engine makes of a model since its path has certain words; "" as a rule."""
    path = path.lower()
    if not any(word in path for word in _MISTRAL_PATHS):
        return ""
    return "params.json of a draft" if "eagle" in path else "params.json"


def config_of_folder(model_path: str, revision: str | None) -> tuple[str | None, str]:
    """A digest of a model's own config.json, and the architecture that it names, which is what a reader knows it by.

    (None, "") where it is not on this machine.
    """
    path = Path(model_path)
    for folder in [path] if path.exists() else _snapshots(model_path, revision, None):
        file = folder / "config.json"
        if file.is_file():
            named = _architectures(_read_config([("config.json", file)]))
            return hashlib.sha256(file.read_bytes()).hexdigest(), str(named[0]) if named else ""
    return None, ""


def name_to_read(text: str) -> str:
    """What of ``text`` may begin the name of a folder, or "model". The rest of a name tells apart, this does not."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:64] or "model"


def _below(path: Path) -> list[tuple[str, Path]]:
    """The files in that folder, each with its name there; without those of git and of downloads.

    Or the file ``path``: what that is called is of no account.
    """
    if not path.is_dir():
        return [("", path)]
    files = ((file.relative_to(path), file) for file in sorted(path.rglob("*")))
    return [
        (name.as_posix(), file)
        for name, file in files
        if file.is_file() and not any(part.startswith(".") for part in name.parts)
    ]


def _snapshots(model_path: str, revision: str | None, download_dir: str | None) -> list[Path]:
    """The folders that the hub's cache, and ``download_dir``, have of a repository's ``revision``.

    The hub's own search says of what the engine has downloaded, weights without a README, that it is not there.
    """
    from huggingface_hub import constants

    found = []
    for cache in dict.fromkeys((constants.HF_HUB_CACHE, download_dir or constants.HF_HUB_CACHE)):
        # As the hub's library does it.
        repository = Path(cache).expanduser() / f"models--{model_path}".replace("/", constants.REPO_ID_SEPARATOR)
        ref = repository / "refs" / (revision or "main")
        commit = ref.read_text().strip() if ref.is_file() else revision
        if commit and (repository / "snapshots" / commit).is_dir():
            found.append(repository / "snapshots" / commit)
    return found


def config_file(
    given: str | None, named_by: str, model_path: str, revision: str | None, path_option: str, weights_named: bool
) -> str | None:
    """A digest of the config that the engine reads in the place of a model's; None where no file is ``given``.

    named_by: the option that gives it. One that is not absolute is in the model's folder, or beside a model that is one
    file. path_option: the option that gives ``model_path``. weights_named: the user has given the weights a name; where
    the model is not on this machine its config has then what is ``given`` for one. Raises ValueError where it cannot
    be read, or looked for.
    """
    if not given or not given.strip():
        return None
    path = Path(given.strip())
    if not path.is_absolute():
        # The engine looks in the hub's cache, where the model's own config is, whatever --download-dir says.
        found = [Path(model_path)] if Path(model_path).exists() else _snapshots(model_path, revision, None)
        if not found:
            if weights_named:
                return given.strip()
            raise ValueError(
                f"{named_by} {path} is looked for in the folder of {model_path!r}, which is not on this machine: "
                f"give an absolute path, or a directory as {path_option}."
            )
        path = (found[0].parent if found[0].is_file() else found[0]) / path
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(
            f"{named_by} {path} cannot be read, and names of pages that are kept have its content: {error.strerror}. "
            "Give a file."
        ) from error


def only_where_set(args: ServerArgs, weights_named: bool) -> dict[str, Any]:
    """For a name: what else KV depends on, only what is set. Raises ValueError for a config that cannot be read.

    weights_named: see `config_file`.
    """
    found = {name: getattr(args, name, None) for name in _LATER_OPTIONS}
    found = {name: value for name, value in found.items() if value and value not in _CHANGE_NOTHING}
    found |= {field.name: field.get() for field in _ENVIRONMENT if field.get() != field.default}
    for name, default in _READ_DIRECTLY.items():
        value = os.environ.get(name, default).strip().lower()
        if _WORDS.get(value, value) != default:
            found[name] = value
    if deepgemm_experts(args):
        found["experts_by"] = "deep_gemm"
    by_path = config_by_path(args.model_path)
    if by_path:
        found["config_by_path"] = by_path
    found |= _at_paths(args, weights_named)
    config = getattr(args, "decrypted_config_file", None)
    config = config_file(
        config, "--decrypted-config-file", args.model_path, args.revision, "--model-path", weights_named
    )
    return found if config is None else {**found, "config": config}


def deepgemm_experts(args: ServerArgs, whose: str = "") -> bool:
    """Whether DeepGEMM computes experts: then Blackwell has other weights of those in blocks of fp8.

    whose: "speculative_" of a draft's.
    """
    runner = getattr(args, f"{whose}moe_runner_backend", None) or "auto"
    exchange = getattr(args, f"{whose}moe_a2a_backend", None) or getattr(args, "moe_a2a_backend", None)
    return runner == "deep_gemm" or (runner == "auto" and exchange in _DEEPGEMM_EXCHANGES)


def _at_paths(args: ServerArgs, weights_named: bool) -> dict[str, str]:
    """What is at the paths that options give; a path where nothing is there, as the engine goes on then, stays one.

    weights_named: see `config_file`; weights are then as they are called.
    """
    found = {}
    scales = getattr(args, _SCALES, None)
    if scales and Path(scales).is_file():
        found[_SCALES] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    for name in () if weights_named else _PATHS:
        path = getattr(args, name, None)
        if path and Path(path).exists():
            found[name] = files_digest(_below(Path(path)))
    return found


def experts_apart(args: ServerArgs, weights_of: Callable[[str], str]) -> dict[str, Any]:
    """For a name: what the KV depends on of experts that have files of their own; nothing where there are none.

    weights_of: what the weights of a path are called that --kt-weight-path gives.
    """
    path = getattr(args, "kt_weight_path", None)
    if path is None:
        return {}
    return {"experts": [weights_of(path), *(getattr(args, name, None) for name in _EXPERTS_OPTIONS)]}


def _changes_weights(given: Any) -> Any:
    """What of the loader's options, JSON, may make other weights; all of them where they cannot be read."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given
    return {key: found[key] for key in found if key not in _ONLY_HOW} if isinstance(found, dict) else given


def _weight_options(args: ServerArgs) -> dict[str, Any]:
    """Those of `WEIGHT_OPTIONS` that are set, without what changes nothing of weights."""
    given = {name: getattr(args, name, None) for name in WEIGHT_OPTIONS}
    given[_LOADER] = _changes_weights(given[_LOADER])
    return {name: value for name, value in given.items() if value}


def model_namespace(args: ServerArgs) -> str:
    """The part of the namespace that can be told from the options: model, weights, number formats, page size.

    Of weights that do not come from files, the user's name is what there is. Raises ValueError where the files are not
    on this machine, or a config in the place of theirs is not.
    """
    options = {name: getattr(args, name, None) for name in KV_OPTIONS}
    options |= _weight_options(args)
    options |= experts_apart(args, lambda path: weights_fingerprint(path, None, "--kt-weight-path"))
    remote = args.load_format in NOT_FROM_FILES
    options |= only_where_set(args, remote)
    if remote:
        # No file tells two of them apart that have one name of the user.
        options["path"] = Path(args.model_path.rstrip("/")).name
    if args.load_format == "dummy":
        options |= {name: getattr(args, name, None) for name in _RANDOM_WEIGHTS_OPTIONS}
    options |= {
        "weights": None if remote else weights_fingerprint(args.model_path, args.revision, args=args),
        "page_size": args.page_size,
        "tp_size": args.tp_size,
        "user": args.pegaflow_namespace,
        "version": _VERSION,
    }
    text = json.dumps(options, sort_keys=True, default=str)
    name = name_to_read(config_of_folder(args.model_path, args.revision)[1])
    return f"sglang-{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def rank_namespace(model: str, layout: Sequence[object], tp_rank: int | None, tp_size: int) -> str:
    """The namespace of one TP rank: its own part of the heads, or, with ``tp_rank`` None (MLA), what all ranks share.

    layout: what one page is made of, as registered (layers, bytes, number format).
    """
    shape = hashlib.sha256(repr(list(layout)).encode()).hexdigest()[:16]
    return f"{model}-{shape}-tp{'all' if tp_rank is None else tp_rank}of{tp_size}"
