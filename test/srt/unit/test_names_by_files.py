"""Names of pages that are kept: from what a model's files say, wherever they lie and whoever has downloaded them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.host_tier.storage_keys import model_folder
from sglang.srt.mem_cache.pegaflow.pages import model_namespace
from test_storage_names import options

COMMIT = "a" * 40
LLAMA = json.dumps({"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "modeling_a.A"}})
#: What the engine downloads by itself.
ENGINES = {
    "config.json": LLAMA,
    "generation_config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors.index.json": "{}",
    "model-00001-of-00001.safetensors": "weights",
}
NAMES = {"storage": lambda args: model_folder(args, None), "pegaflow": model_namespace}


@pytest.fixture(params=NAMES)
def named(request) -> Any:
    return NAMES[request.param]


def write(folder: Path, files: dict[str, str], time: int = 1) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
        os.utime(folder / name, (time, time))
    return folder


@pytest.fixture
def download(tmp_path, monkeypatch):
    """Has a hub's cache of another host hold these files of org/m. The snapshot."""

    def one(files: dict[str, str]) -> Path:
        hub = tmp_path / f"hub{len(list(tmp_path.iterdir()))}"
        repository = hub / "models--org--m"
        write(repository, {"refs/main": COMMIT})
        snapshot = repository / "snapshots" / COMMIT
        for name, content in files.items():
            blob = "blobs/" + hashlib.sha256(content.encode()).hexdigest()
            write(repository, {blob: content})
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(repository / blob)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
        return snapshot

    return one


# ---- where files lie ----


def test_a_link_and_another_folder_have_the_name_of_the_files(tmp_path, named):
    model = write(tmp_path / "llama-3", ENGINES)
    name = named(options(model))
    (tmp_path / "current").symlink_to(model)
    assert named(options(tmp_path / "current")) == named(options(f"{model}/")) == name
    model.rename(tmp_path / "mnt")
    assert named(options(tmp_path / "mnt")) == name
    # It says what it is of; another architecture has another.
    assert name.removeprefix("sglang-").startswith("LlamaForCausalLM-")
    write(tmp_path / "mnt", {"config.json": '{"architectures": ["../a b"]}'})
    assert named(options(tmp_path / "mnt")) != name and "/" not in named(options(tmp_path / "mnt"))


def test_a_model_that_is_one_file_is_known_by_what_is_in_it(tmp_path, named):
    model = write(tmp_path, {"a.gguf": "weights"}) / "a.gguf"
    name = named(options(model, load_format="gguf"))
    (tmp_path / "current.gguf").symlink_to(model)
    assert named(options(tmp_path / "current.gguf", load_format="gguf")) == name
    write(tmp_path, {"a.gguf": "others"})
    assert named(options(model, load_format="gguf")) != name


def test_a_repository_and_its_snapshot_have_one_name(download, named):
    snapshot = download(ENGINES)
    assert named(options("org/m")) == named(options(snapshot))


def test_a_name_of_the_user_is_of_the_weights_wherever_they_lie(tmp_path):
    """And of those of a draft, and of experts; their configs count, which are the same in copies of another time."""

    def folder(host: str, weights: str, more: dict[str, str] | None = None, time: int = 1) -> str:
        model = write(tmp_path / host / f"model-{host}", ENGINES | (more or {}), time)
        draft = write(tmp_path / host / f"draft-{host}", ENGINES, time)
        experts = write(tmp_path / host / f"experts-{host}", {"layer.kt": "1"}, time)
        eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(draft)}
        return model_folder(options(model, kt_weight_path=str(experts), **eagle), weights)

    name = folder("a", "my/name")
    assert folder("b", "my/name", time=2) == name and name.startswith("my-name-")
    assert len({name, folder("a", "my-name"), folder("b", "my/name", {"config.json": "{}"})}) == 3


def test_words_of_a_path_by_which_the_engine_reads_another_config_count(tmp_path, named):
    model = write(tmp_path / "model", {**ENGINES, "params.json": "{}"})
    names = [named(options(model))]
    for path in ("Mistral-Large-3", "Mistral-Large-3-Eagle"):
        (tmp_path / path).symlink_to(model)
        names.append(named(options(tmp_path / path)))
    assert len(set(names)) == 3
    # There it is read, elsewhere not.
    write(model, {"params.json": "[1]"})
    assert named(options(model)) == names[0] and named(options(tmp_path / path)) != names[2]


def test_remote_weights_of_one_user_are_told_apart():
    remote = {"load_format": "remote", "pegaflow_namespace": "mine"}
    names = {model_namespace(options(f"redis://h:1/{model}", **remote)) for model in ("a", "b")}
    assert len(names) == 2


# ---- who has downloaded them ----


@pytest.mark.parametrize(
    "more",
    [
        ("original/params.json", "original/consolidated.00.pth"),
        ("inference/model.py", "inference/configs/config_671B.json", "configuration_a.py", "modeling_a.py"),
        ("original/config.json", "original/model.safetensors", "metal/model.bin"),
        ("onnx/model.onnx", "onnx/config.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pt", "a.gguf", "params.json"),
    ],
    ids=["Llama", "DeepSeek", "gpt-oss", "ONNX", "several formats"],
)
def test_what_the_engine_does_not_load_has_no_part(download, named, more):
    download(ENGINES)
    name = named(options("org/m"))
    download(ENGINES | dict.fromkeys(more, "more"))
    assert named(options("org/m")) == name


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ({}, "model-00001-of-00001.safetensors"),
        ({}, "more.safetensors"),
        ({}, "hf_quant_config.json"),
        ({"quantization": "gptq"}, "quantize_config.json"),
        ({"load_format": "mistral"}, "consolidated.safetensors"),
        ({"load_format": "pt"}, "model.pt"),
        ({"load_format": "npcache"}, "np/weight_names.json"),
        ({"load_format": "sharded_state"}, "part/model-rank-0-part-0.safetensors"),
        ({"load_format": "runai_streamer"}, "part/model.safetensors"),
        ({"load_format": "private"}, "part/model.bin"),
        ({"quantization": "modelopt_fp8"}, "part/model.safetensors"),
        ({"modelopt_quant": "fp8"}, "pytorch_model.bin"),
        ({"custom_weight_loader": ["m.f"]}, "part/model.bin"),
        # Code of the model's own may run, and read what it likes.
        ({"trust_remote_code": True}, "part/modeling.py"),
        ({"model_impl": "transformers"}, "part/modeling.py"),
        ({"json_model_override_args": '{"architectures": ["Own"]}'}, "modeling.py"),
        ({"decrypted_config_file": "config.json"}, "modeling.py"),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(f"{key}={value[key]}" for key in value),
)
def test_what_the_engine_may_load_counts(tmp_path, named, given, file):
    model = write(tmp_path / "model", ENGINES)
    names = [named(options(model, **given))]
    for content in ("1", "12"):
        write(model, {file: content})
        names.append(named(options(model, **given)))
    assert len(set(names)) == 3


def test_of_models_that_the_engine_does_not_know_code_counts(tmp_path, named):
    """It takes them from the model's folder without being told to trust it."""
    own = {"config.json": LLAMA.replace("Llama", "Own"), "modeling_a.py": ""}
    model = write(tmp_path / "model", ENGINES | own)
    name = named(options(model))
    write(model, {"modeling_a.py": "1"})
    assert named(options(model)) != name


def test_models_that_find_their_files_by_themselves(tmp_path, named):
    """Of Grok the engine reads .bin beside safetensors."""
    model = write(tmp_path / "model", ENGINES | {"config.json": LLAMA.replace("LlamaFor", "Grok1For")})
    name = named(options(model))
    write(model, {"model-000.bin": ""})
    assert named(options(model)) != name


def test_weights_of_another_format_in_another_cache_count(tmp_path, download, named):
    """The engine loads from either of them."""
    download(ENGINES)
    down = tmp_path / "down"
    name = named(options("org/m", download_dir=str(down)))
    write(down / "models--org--m", {"refs/main": COMMIT, f"snapshots/{COMMIT}/pytorch_model.bin": "1"})
    assert named(options("org/m", download_dir=str(down))) != name
