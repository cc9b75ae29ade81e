"""The Hugging Face hub: models and data sets by id, through its own client and cache (extra `hub`)."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

from headway.base.errors import HeadwayError, UsageError
from headway.base.extras import install_command

Kind = Literal["model", "dataset"]

TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
"""No code and no pickles: nothing of a repository is executed."""

_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<folder>[\w./-]+?))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubId:
    """`owner/name[/folder][@revision]`. A revision is a branch, a tag or a commit; none means the newest."""

    repo: str
    folder: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"/{self.folder}" if self.folder else "") + (f"@{self.revision}" if self.revision else "")


def parse_hub_id(text: str) -> HubId | None:
    """Read a hub id. None where `text` is none, or begins with a folder that is here: then it is a path."""
    found = _ID.fullmatch(text)
    if found is None or Path(text.partition("/")[0]).is_dir():
        return None
    return HubId(found["repo"], found["folder"] or "", found["revision"])


def download(hub_id: HubId, kind: Kind, patterns: list[str]) -> Path:
    """Return the folder of a snapshot in the client's cache, named after its commit, after downloading what it lacks.

    The client shows its progress, and reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE as it always does.
    """
    client = _client(hub_id)
    inside = [f"{hub_id.folder}/{pattern}" for pattern in patterns] if hub_id.folder else patterns
    # Subfolders of models hold copies in other formats.
    skipped = ["*/*"] if kind == "model" and not hub_id.folder else None
    try:
        folder = client.snapshot_download(
            hub_id.repo,
            repo_type=kind,
            revision=hub_id.revision,
            allow_patterns=inside,
            ignore_patterns=skipped,
            endpoint=os.environ.get("HF_ENDPOINT"),
            library_name="headway",
        )
    except Exception as error:  # of many kinds, and of several HTTP libraries
        raise _explained(client, hub_id, kind, error) from error
    return Path(folder)


def pinned(text: str, kind: Kind, patterns: list[str]) -> str:
    """Download what a hub id means now and write its commit into it, so that it means the same from now on.

    Any other text is returned as it is.
    """
    hub_id = None if Path(text).expanduser().exists() else parse_hub_id(text)
    if hub_id is None:
        return text
    return str(replace(hub_id, revision=download(hub_id, kind, patterns).name))


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as a model, whose repository is made where there is none. Returns the address of the commit."""
    hub_id = parse_hub_id(repo)
    if hub_id is None or hub_id.repo != repo:
        raise UsageError(f"--push takes the id of a model, owner/name (got {repo!r})")
    client = _client(hub_id)
    api = client.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="headway")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload weights trained by Headway")
    except Exception as error:  # of many kinds, and of several HTTP libraries
        raise _explained(client, hub_id, "model", error) from error
    return str(done.commit_url)


def _client(hub_id: HubId) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise UsageError(
            f"{hub_id} is no folder here; to take it from the Hugging Face hub, install the client: "
            f"{install_command('hub')}"
        ) from None
    return huggingface_hub


def _explained(client: ModuleType, hub_id: HubId, kind: Kind, error: Exception) -> HeadwayError:
    """Say what went wrong and what to do, without what the client knows of tokens."""
    errors = client.errors
    what = f"{kind} {hub_id}"
    if isinstance(error, errors.GatedRepoError):
        return UsageError(f"{what} asks for consent: accept its terms on the hub, then log in with `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(f"{what}: the repository has no revision {hub_id.revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UsageError(
            f"{what} is neither a folder here nor a {kind} on the hub; a private one needs `hf auth login` or HF_TOKEN"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        if client.constants.HF_HUB_OFFLINE:
            return UsageError(
                f"{what} is not whole in the cache, and HF_HUB_OFFLINE forbids downloads: unset it, or run "
                f"`hf download {hub_id.repo}` where there is a network and bring the folder of HF_HOME"
            )
        return HeadwayError(f"{what}: the hub does not answer, and the cache does not have it; check the network")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return UsageError(f"{what}: the hub refuses the token; log in with `hf auth login`, or set HF_TOKEN")
    return HeadwayError(f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
