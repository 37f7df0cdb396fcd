"""In the names of pages that are kept: files of a model that is not a folder, and a config in the place of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.mem_cache.host_tier.storage_keys import model_folder
from sglang.srt.mem_cache.pegaflow.pages import model_namespace
from test_storage_names import options


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_a_config_beside_a_model_that_is_one_file_is_looked_for_in_its_folder(model):
    (model / "mine.json").write_text("{}")
    gguf = model / "m.gguf"
    gguf.write_bytes(b"weights")
    for named in (lambda args: model_folder(args, None), model_namespace):
        given = [named(options(gguf, decrypted_config_file=path)) for path in ("mine.json", str(model / "mine.json"))]
        assert given[0] == given[1] != named(options(gguf))


def test_a_config_of_a_model_that_is_not_here_counts_by_its_name_where_the_user_names_the_weights(model):
    """The engine gets it with the weights, from a server or another worker; these are not looked at either."""
    eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "org/no-such-draft"}
    for named, given, option in (
        (lambda args: model_folder(args, "name"), {"model_path": "redis://h:1/m"}, "decrypted_config_file"),
        (model_namespace, {"model_path": "redis://h:1/m", "load_format": "remote"}, "decrypted_config_file"),
        (lambda args: model_folder(args, "name"), eagle, "decrypted_draft_config_file"),
    ):
        names = [named(options(model, **{**given, option: path})) for path in (None, "a.json", " a.json ", "b.json")]
        assert len(set(names)) == 3 and names[1] == names[2]


def test_a_config_that_cannot_be_found_is_refused_with_the_cause(model):
    eagle = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "org/no-such-draft"}
    with pytest.raises(ValueError) as refused:
        model_folder(options(model, **eagle, decrypted_draft_config_file="a.json"), None)
    assert str(refused.value) == (
        "--decrypted-draft-config-file a.json is looked for in the folder of 'org/no-such-draft', which is not on this "
        "machine: give an absolute path, or a directory as --speculative-draft-model-path."
    )
    with pytest.raises(ValueError, match="give an absolute path, or a directory as --model-path"):
        model_namespace(options("org/no-such-model", decrypted_config_file="a.json"))


# ---- names of repositories ----

OLD, NEW = "a" * 40, "b" * 40
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "org/m"}


def snapshot(cache: Path, commit: str, **files: str) -> Path:
    """A hub's cache gets this commit of org/m as its main one. files: without their dot, and their content."""
    repository = cache / "models--org--m"
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for name, content in files.items():
        blob = repository / "blobs" / f"{name}-{content}"
        blob.write_text(content)
        file = repository / "snapshots" / commit / name.replace("_", ".")
        file.unlink(missing_ok=True)
        file.symlink_to(blob)
    return repository / "snapshots" / commit


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """The hub's cache, and a folder for --download-dir."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub", tmp_path / "down"


@pytest.fixture(params=["model", "draft", "pegaflow"])
def name_of(request, model):
    """Names the KV of a model, or of a draft, that is org/m."""
    if request.param == "draft":
        # The engine gives it this revision where nothing is said.
        given = {"model_path": str(model), **EAGLE, "speculative_draft_model_revision": "main"}
    else:
        given = {"model_path": "org/m"}
    named = model_namespace if request.param == "pegaflow" else lambda args: model_folder(args, None)
    return lambda **more: named(options(model, **{**given, **more}))


def test_weights_in_the_download_dir_count(caches, name_of):
    """The engine takes the config from the hub's cache, weights from --download-dir; another revision is another."""
    hub, down = caches
    snapshot(down, OLD, model_safetensors="old")
    names = [name_of(download_dir=str(down))]
    for commit, config, weights in ((OLD, "{}", "old"), (NEW, "{}", "new"), (NEW, "{ }", "new")):
        snapshot(hub, commit, config_json=config)
        snapshot(down, commit, model_safetensors=weights)
        names.append(name_of(download_dir=str(down)))
    assert len(set(names)) == 4


def test_old_weights_in_the_hubs_cache_do_not_name_those_of_the_download_dir(caches, name_of):
    """For a draft, whose revision is a branch, the engine loads the hub's; for a model those of --download-dir."""
    hub, down = caches
    snapshot(hub, OLD, config_json="{}", model_safetensors="old")
    old = name_of()
    # Not there: the engine loads the hub's, with an index that it then has there.
    assert name_of(download_dir=str(down)) == name_of(download_dir=str(hub)) == old
    snapshot(down, OLD, index_json="{}")
    only_an_index = name_of(download_dir=str(down))
    snapshot(down, NEW, model_safetensors="new")
    both = name_of(download_dir=str(down))
    assert len({old, only_an_index, both}) == 3 and name_of() == old


def test_without_weights_there_is_no_name(caches, name_of):
    hub, down = caches
    for cache in (hub, down):
        snapshot(cache, OLD, config_json="{}")
        with pytest.raises(ValueError, match="cannot tell which weights 'org/m' has, .*: download them first"):
            name_of(download_dir=str(down))
    with pytest.raises(ValueError, match="cannot tell which weights 'org/m' has"):
        name_of()
    # What is made up at start needs none.
    assert name_of(load_format="dummy", random_seed=1)


def test_what_the_engine_has_downloaded_of_a_repository_is_enough(caches, name_of):
    """The hub's own search says of weights without the rest of their repository that they are not there."""
    listing = pytest.importorskip("huggingface_hub._tree_cache")
    snapshot(caches[0], OLD, config_json="{}", model_safetensors="old")
    name = name_of()
    entry = listing.TreeCacheEntry(size=1, blob_id="0")
    listing.write_tree_cache(str(caches[0] / "models--org--m"), OLD, {"README.md": entry})
    assert name_of() == name
