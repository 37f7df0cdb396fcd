"""A run of unit tests ends with what they have said, whatever threads of theirs are left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# A bootstrap server's thread, as the engine makes it, and a library that is still there when it wakes up.
LEFT = """
import ctypes, multiprocessing, tempfile, threading, time
import uvloop

left = tempfile.TemporaryDirectory(dir={folder!r})

def serve():
    loop = uvloop.new_event_loop()
    loop.call_later(15, print)
    serving.set()
    loop.run_forever()

def test_it():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=True).start()
    threading.Thread(target=serve, daemon=True).start()
    assert serving.wait(60)
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc.pause, ctypes.c_void_p), 0)
    assert False

serving = threading.Event()
"""


def test_a_thread_that_wakes_up_too_late_changes_no_verdict(tmp_path: Path) -> None:
    """And all else that is done at the end is done: no directory is left, and no child that keeps the output open."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "test_left.py").write_text(LEFT.format(folder=str(folder)))
    command = [sys.executable, "-m", "pytest", "-p", "end_of_a_run", "-p", "no:cacheprovider", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=80)
    assert "1 failed" in done.stdout and done.returncode == 1, done.stderr[-2000:]
    assert not list(folder.iterdir())
