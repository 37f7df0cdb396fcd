"""Whom arguments of a worker are for: processes that it starts, if these have its build of this package, and dumps."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context
from typing import Any

import pytest
from sglang.srt import server_args
from sglang.srt.managers import multi_tokenizer_mixin
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

from sglang_pd_radix.errors import PatchError
from sglang_pd_radix.patching import loader


@pytest.fixture
def args() -> ServerArgs:
    made: Any = object.__new__(ServerArgs)
    vars(made).update(model_path="m", radix_cache_is_unwanted=False)
    return made


@contextmanager
def another_build() -> Iterator[None]:
    before, loader._state.build = loader._state.build, "0" * 16
    try:
        yield
    finally:
        loader._state.build = before


def started_with(args: ServerArgs) -> bytes:
    """What goes to a process that is started with these arguments."""
    context.set_spawning_popen(object())
    try:
        return pickle.dumps((args,))
    finally:
        context.set_spawning_popen(None)


def test_a_process_is_started_with_arguments_of_its_own_build_only(args):
    told = started_with(args)
    (read,) = pickle.loads(told)
    assert type(read) is ServerArgs and vars(read) == vars(args)
    with another_build(), pytest.raises(PatchError, match="a process that was started by one with build"):
        pickle.loads(told)


def test_tokenizer_processes_read_arguments_of_their_own_build_only(args):
    memory = multi_tokenizer_mixin.write_data_for_multi_tokenizer("ports", args, {})
    try:
        ports, read, _ = multi_tokenizer_mixin.read_from_shared_memory(memory.name)
        assert ports == "ports" and type(read) is ServerArgs and vars(read) == vars(args)
        with another_build(), pytest.raises(PatchError, match="a process that was started by one with build"):
            multi_tokenizer_mixin.read_from_shared_memory(memory.name)
    finally:
        memory.unlink()


class Bare(pickle.Unpickler):
    """Reads as the engine alone."""

    def find_class(self, module: str, name: str) -> Any:
        """The engine's class, and of this package none."""
        assert "pd_radix" not in module
        if (module, name) == ("sglang.srt.server_args", "ServerArgs"):
            return server_args.__pd_radix__["originals"]["ServerArgs"]
        return super().find_class(module, name)


def test_a_dump_is_read_by_any_build_and_by_the_engine_alone(args, tmp_path):
    """After a crash it is the next release, or another machine, that looks at it."""
    manager: Any = object.__new__(TokenizerManager)
    manager.crash_dump_folder, manager.crash_dump_performed = str(tmp_path), False
    manager.server_args, manager.rid_to_state, manager.crash_dump_request_list = args, {}, [("request", {}, 1.0, 2.0)]
    with open(manager.dump_requests_before_crash("host"), "rb") as file:
        told = file.read()
    with another_build():
        read = pickle.loads(told)["server_args"]
        assert type(read) is ServerArgs and vars(read) == vars(args)
    bare = Bare(io.BytesIO(told)).load()["server_args"]
    assert type(bare) is not ServerArgs and bare.model_path == "m"
    assert not any("pd_radix" in str(argument) for _, argument, _ in pickletools.genops(told))


def test_arguments_can_be_copied(args):
    args.nested = [1]
    shallow, deep = copy.copy(args), copy.deepcopy(args)
    assert vars(shallow) == vars(deep) == vars(args)
    assert shallow.nested is args.nested and deep.nested is not args.nested
