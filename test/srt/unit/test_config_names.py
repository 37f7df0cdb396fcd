"""In the names of pages that are kept: a config in the place of a model's that is not in a folder on this machine."""

from __future__ import annotations

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
