"""Checks whether a named model that is no local directory is available."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from sglang_pd_radix.environment import YES
from sglang_pd_radix.errors import PdRadixError

# Seconds for an answer, including name resolution.
WAIT_S = 1.5


def check(name: str) -> None:
    """Raise PdRadixError if ``name`` is neither in the local cache nor at the engine's model host.

    The host is HF_ENDPOINT, queried once, and not with HF_HUB_OFFLINE. ModelScope is not queried.
    """
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in YES:
        return
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
    except ImportError:  # installed with the engine
        return
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
    if any(file.exists() for file in folder.glob("*/*.json")):
        return
    said = ["no answer"]
    # A request's time-out excludes name resolution, which has none.
    asking = threading.Thread(target=lambda: said.append(_ask(name)), daemon=True)
    asking.start()
    asking.join(WAIT_S)
    if said[-1]:
        raise PdRadixError(
            f"{name} is not on this machine, and {constants.ENDPOINT} does not give it ({said[-1]}): download it "
            f"(hf download {name}), name a directory, or make a small one (pd-radix make-model DIR)"
        )


def _ask(name: str) -> str:
    """Why the host does not offer a model; "" if it does."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=WAIT_S)
    except errors.EntryNotFoundError:
        # The model exists without that file; the engine will report problems.
        return ""
    except errors.GatedRepoError:
        return "it is gated: accept its terms there, then hf auth login"
    except errors.RepositoryNotFoundError:
        return "it has none of that name, or not for everybody: hf auth login"
    except errors.OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except Exception as error:  # HTTP libraries differ between versions
        return (str(error).splitlines() or [type(error).__name__])[0][:100]
    return ""
