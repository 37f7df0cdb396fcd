"""In the names of pages that are kept: files of a model that is not a folder, and a config in the place of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from sglang.srt.mem_cache.host_tier import storage_keys
from sglang.srt.mem_cache.host_tier.storage import add_storage
from sglang.srt.mem_cache.host_tier.storage_keys import model_folder, weights_id
from sglang.srt.mem_cache.host_tier.storage_options import options_of
from sglang.srt.mem_cache.host_tier.storage_pages import HostPages
from sglang.srt.mem_cache.pegaflow import pages
from sglang.srt.mem_cache.pegaflow.pages import files_digest, model_namespace, weights_fingerprint
from storage_world import StorageWorld
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


def test_a_home_in_the_download_dir_is_the_users(caches, name_of, tmp_path, monkeypatch):
    """The hub's library writes there; no shell makes a path of ``--download-dir=~/models``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    snapshot(caches[1], OLD, model_safetensors="old")
    assert name_of(download_dir="~/down") == name_of(download_dir=str(caches[1]))


def test_the_weights_of_the_hubs_cache_have_the_same_name_once_they_are_in_the_download_dir_too(caches, name_of):
    """The engine puts an index there at the first start, and the weights at the second."""
    hub, down = caches
    files = {"model_safetensors": "old", "model_safetensors_index_json": "{}"}
    snapshot(hub, OLD, config_json="{}", **files)
    names = [name_of(download_dir=str(down))]
    for name in reversed(files):
        snapshot(down, OLD, **{name: files[name]})
        # A copy is of another time, and has the same digest.
        os.utime(down / "models--org--m" / "blobs" / f"{name}-{files[name]}", (1, 1))
        names.append(name_of(download_dir=str(down)))
    assert len(set(names)) == 1
    snapshot(down, OLD, model_safetensors="new")
    assert name_of(download_dir=str(down)) != names[0]


def test_a_revision_counts_by_the_commit_that_it_names(caches, name_of):
    def named(revision: str | None) -> str:
        return name_of(revision=revision, speculative_draft_model_revision=revision)

    repository = snapshot(caches[0], NEW, model_safetensors="new").parents[1]
    (repository / "refs" / "next").write_text(NEW)
    snapshot(caches[0], OLD, model_safetensors="old")
    assert named("next") == named(NEW) != named(OLD) == named("main") == named(None)
    for nothing in ("other", "c" * 40):
        with pytest.raises(ValueError, match="cannot tell which weights 'org/m' has"):
            named(nothing)


def test_all_kinds_of_weights_make_a_name(caches, name_of):
    names = []
    for kind in ("bin", "gguf", "pt", "safetensors"):
        snapshot(caches[0], OLD, **{f"model_{kind}": "weights"})
        names.append(name_of())
    assert len(set(names)) == 4


def test_what_has_no_part_in_what_is_computed_has_none_in_the_name(caches, name_of):
    """The engine downloads weights and configs; `hf download` the rest of a repository, and git more than that."""
    snapshot(caches[0], OLD, config_json="{}", model_safetensors="old")
    name = name_of()
    snapshot(caches[0], OLD, README_md="a", LICENSE="b", tokenizer_json="{}", vocab_json="{}", tokenizer_model="c")
    snapshot(caches[0], OLD, merges_txt="d", chat_jinja="e", original_pth="f")
    assert name_of() == name
    for file in ("modeling_py", "quantize_json", "more_safetensors"):
        snapshot(caches[0], OLD, **{file: "g"})
        assert name_of() != name
        name = name_of()


def test_a_folder_that_is_called_blobs_is_no_hub(tmp_path):
    """Its files have no names by their content: other weights of the same size had the same name."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    weights, link = tmp_path / "blobs" / "model.safetensors", tmp_path / "model" / "model.safetensors"
    weights.write_bytes(b"weights")
    link.symlink_to(weights)
    before = files_digest([("model.safetensors", link)])
    os.utime(weights, (1, 1))
    assert files_digest([("model.safetensors", link)]) != before


def test_hidden_folders_of_a_model_have_no_part_in_the_name(model):
    """git writes to its own with each pull, downloads of `hf` to theirs."""
    for named in (lambda args: model_folder(args, None), model_namespace):
        name = named(options(model))
        for folder in (".git", ".cache/huggingface"):
            (model / folder).mkdir(parents=True, exist_ok=True)
            (model / folder / "state.json").write_text("{}")
        assert named(options(model)) == name
        (model / "more.safetensors").write_text("")
        assert named(options(model)) != name
        (model / "more.safetensors").unlink()


def test_of_what_the_engine_does_not_load_by_its_name_all_counts(model, tmp_path):
    """Experts of KTransformers, or a model for a loader that nobody here knows."""
    other = tmp_path / "other"
    other.mkdir()
    for named in (lambda args: model_folder(args, None), model_namespace):
        for given in ({"path": other}, {"path": model, "kt_weight_path": str(other)}):
            names = []
            if "kt_weight_path" in given:
                (other / "embed.safetensors").write_text("")
            for content in ("", "1", "12"):
                (other / "layer.kt").write_text(content)
                names.append(named(options(**given)))
            assert len(set(names)) == 3
        (other / "embed.safetensors").unlink()


def test_weights_that_several_repositories_of_a_hub_share_have_the_digest_of_their_own(tmp_path):
    """huggingface_hub 1.33 links from a repository's digest to another one, which lies beside all repositories."""
    names = []
    for host, digest, shared in (("a", "12", False), ("b", "12", True), ("c", "12", True), ("d", "34", True)):
        folder = snapshot(tmp_path / host, OLD)
        blob = folder.parents[1] / "blobs" / digest
        target = tmp_path / host / "blobs" / "ab" / "abcd" if shared else blob
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("weights")
        os.utime(target, (len(names), len(names)))
        if shared:
            blob.symlink_to("../../blobs/ab/abcd")
        (folder / "model.safetensors").symlink_to(f"../../blobs/{digest}")
        # And a folder that somebody has made of links.
        (tmp_path / host / "mine").mkdir()
        (tmp_path / host / "mine" / "model.safetensors").symlink_to(folder / "model.safetensors")
        for path in (folder, tmp_path / host / "mine"):
            names.append((weights_id(str(path), None), weights_fingerprint(str(path), None)))
    assert len(set(names[:6])) == 1 and len(set(names[6:])) == 1 and names[0] != names[6]


# ---- files that options name, versions ----


@pytest.mark.parametrize("option", ["quantization_param_path", "modelopt_checkpoint_restore_path", "rl_quant_profile"])
def test_a_file_that_an_option_names_counts_by_what_is_in_it(model, tmp_path, option):
    file = tmp_path / "given"
    for named in (lambda args: model_folder(args, None), model_namespace):
        names = [named(options(model))]
        for content in ("a", "bc"):
            file.write_text(content)
            names.append(named(options(model, **{option: str(file)})))
        assert len(set(names)) == 3


def test_scales_of_kv_are_the_same_wherever_they_lie(model, tmp_path):
    for named in (lambda args: model_folder(args, None), lambda args: model_folder(args, "name"), model_namespace):
        names = []
        for place, scale in (("a", "1.0"), ("b", "1.0"), ("c", "0.5")):
            (tmp_path / place).write_text(scale)
            os.utime(tmp_path / place, (len(names), len(names)))
            names.append(named(options(model, quantization_param_path=str(tmp_path / place))))
        assert names[0] == names[1] != names[2]


def test_where_the_user_names_the_weights_a_checkpoint_counts_by_its_path(model, tmp_path):
    (tmp_path / "given").write_text("a")
    given = options(model, modelopt_checkpoint_restore_path=str(tmp_path / "given"))
    name = model_folder(given, "name")
    os.utime(tmp_path / "given", (1, 1))
    assert model_folder(given, "name") == name != model_folder(options(model), "name")


def test_experts_that_deepgemm_computes_have_a_name_of_their_own(model):
    """On Blackwell their weights are others; the engine takes DeepGEMM by itself for some exchanges of tokens."""
    other = [{"moe_runner_backend": "triton", "moe_a2a_backend": "deepep"}, {"moe_a2a_backend": "none"}]
    same = [{"moe_runner_backend": "deep_gemm"}, {"moe_runner_backend": "auto", "moe_a2a_backend": "nixl"}]
    for named in (lambda args: model_folder(args, None), model_namespace):
        assert {named(options(model, **one)) for one in other} == {named(options(model))}
        assert len({named(options(model, **one)) for one in same} | {named(options(model))}) == 2
    eagle = {**EAGLE, "speculative_draft_model_path": str(model)}
    drafts = [{}, {"speculative_moe_runner_backend": "deep_gemm"}, {"moe_a2a_backend": "deepep"}]
    drafts.append({"speculative_moe_a2a_backend": "none", "moe_a2a_backend": "deepep"})
    assert len({model_folder(options(model, **eagle, **one), None) for one in drafts}) == 4


def test_a_version_of_names_has_names_of_its_own(model, monkeypatch):
    before = model_folder(options(model), None), model_namespace(options(model))
    monkeypatch.setattr(storage_keys, "VERSION", storage_keys.VERSION + 1)
    monkeypatch.setattr(pages, "_VERSION", pages._VERSION + 1)
    assert not {model_folder(options(model), None), model_namespace(options(model))} & set(before)


# ---- copies of a model on several nodes ----


def add_on_a_node(rank: int, folder: str, shared: bool, missing: bool) -> tuple[str]:
    """A rank of two adds its storage, by a copy of the model of its own. The folder, or what it is refused with."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", f"{folder}/kv")
        patched.setattr(HostPages, "shared", shared)
        one = StorageWorld(Path(folder) / f"unused{rank}")
        one.close()
        copy = Path(folder) / str(rank) / "model"
        args = options("no/such" if missing and rank == 0 else copy)
        try:
            add_storage(one.tree, args, options_of(args), rank, 2, dist.group.WORLD)
        except ValueError as error:
            return (str(error),)
        finally:
            one.close()
        return (str(one.tier.storage.threads.files.place),)


def add_on_two_nodes(pair, folder: Path, shared: bool, missing: bool = False) -> list[str]:
    for rank in range(2):
        copy = folder / str(rank) / "model"
        copy.mkdir(parents=True, exist_ok=True)
        (copy / "model.safetensors").write_text("weights")
        os.utime(copy / "model.safetensors", (rank, rank))
    return [told for (told,) in pair.run(add_on_a_node, str(folder), shared, missing)]


def test_ranks_with_the_same_pages_look_where_the_first_one_writes(pair, tmp_path):
    """MLA: of the others none writes. Their node's copy of the model may have other times."""
    first, second = add_on_two_nodes(pair, tmp_path, True)
    assert first == second and first.endswith("-tpallof1")
    first, second = add_on_two_nodes(pair, tmp_path, False)
    assert first != second and first.endswith("-tp0of2") and second.endswith("-tp1of2")


def test_what_the_first_rank_is_refused_with_all_are(pair, tmp_path):
    first, second = add_on_two_nodes(pair, tmp_path, True, missing=True)
    assert first == second and "cannot tell which weights 'no/such' has" in first
