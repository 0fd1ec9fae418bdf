"""Publishing exported models on the hub of Hugging Face."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.errors import ConfigError, DataError, HubError, TrainkitError, describe, printable
from trainkit.plain import to_yaml
from trainkit.runs.card import public_config
from trainkit.runs.record import Record
from trainkit.security import hidden

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from trainkit.runs.view import RunView

log = logging.getLogger(__name__)
_HINTS = {
    401: " (is the token valid? run `hf auth login`, or set HF_TOKEN)",
    403: " (does the token have the right to write there?)",
    404: " (does the token have the right to write there?)",
}
"""What to do, by the status of a hub's answer."""


def check_repo(repo: str, token: str | None = None) -> None:
    """Check what can be checked of a publication without a request.

    Args:
        repo: the id of the repository, ``owner/name``.
        token: the token of the hub. None: that of ``HF_TOKEN`` or of ``hf auth login``.

    Raises:
        ConfigError: the id is none, there is no token, or ``HF_HUB_OFFLINE`` is set.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{describe(repo)} is no id of a repository: {error}") from error
    if "/" not in repo:
        raise ConfigError(f"the id of a repository is owner/name; given {describe(repo)}")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{repo!r} cannot be published while HF_HUB_OFFLINE is set; unset it, or publish later")
    if not (token or get_token()):
        raise ConfigError(
            f"{repo!r} cannot be published without a token of the hub; run `hf auth login`, or set HF_TOKEN"
        )


def push(
    export: Path, repo: str, *, private: bool = True, revision: str | None = None, token: str | None = None
) -> str:
    """Publish an exported model in one commit, and return its address.

    All files of the directory are uploaded, except for hidden ones: weights, tokenizer, model card. With the export
    ``model/`` or ``best/`` of a run, its configuration, without secrets and paths, and its metrics are uploaded too.
    If the upload fails, another call continues it: large files that have arrived, or with the Xet protocol the blocks
    of them, are not sent again. A repository that exists keeps its visibility and its other files.

    Args:
        export: the directory of the exported model.
        repo: the id of the repository, ``owner/name``, which is created if there is none.
        private: whether a new repository is private.
        revision: the branch, which is created if there is none. None: ``main``.
        token: the token of the hub. None: that of ``HF_TOKEN`` or of ``hf auth login``.

    Raises:
        ConfigError: the id is none, there is no token, or ``HF_HUB_OFFLINE`` is set.
        DataError: the configuration or the metrics of the run cannot be read.
        HubError: the hub refused the model or could not be reached.
    """
    check_repo(repo, token)
    from huggingface_hub import HfApi

    api, files = HfApi(token=token), published(export)
    if base := _local_base(export):
        whole = f"trainkit export {shlex.quote(str(export))} merged, then trainkit push merged {repo}"
        log.warning(
            "%s is an adapter of %s, a directory that nobody else has. To publish the whole model: %s",
            export,
            base,
            whole,
        )
    try:
        with _bars_on_terminals():
            _upload(api, repo, files, private, revision)
    except Exception as error:  # of huggingface_hub, httpx and hf_xet
        again = command(export, repo, private=private, revision=revision)
        raise HubError(
            f"{repo!r} could not be published on {api.endpoint}: {_reason(error)}. To try again: {again}"
        ) from error
    return f"{api.endpoint}/{repo}{f'/tree/{revision}' * bool(revision)}"


def published(export: Path) -> dict[str, Path | bytes]:
    """Return what is published of an exported model, by path in the repository: files, or their content.

    Raises:
        DataError: the configuration of the run cannot be read.
    """
    files = (path for path in sorted(export.rglob("*")) if path.is_file())
    published: dict[str, Path | bytes] = {path.relative_to(export).as_posix(): path for path in files}
    published = {
        name: path for name, path in published.items() if not any(part.startswith(".") for part in name.split("/"))
    }
    run = export.resolve().parent
    if export.resolve().name in ("model", "best") and (run / "config.yaml").is_file():
        published.setdefault("config.yaml", _config(run))
        if (run / "metrics.jsonl").is_file():
            published.setdefault("metrics.jsonl", run / "metrics.jsonl")
    return published


def _local_base(export: Path) -> str:
    """Return the base model of an adapter, if it is a directory; else an empty string."""
    try:
        base = str(json.loads((export / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return base if Path(base).is_dir() else ""


def _config(run: Path) -> bytes:
    """Return the configuration of a run without secrets, paths of the machine, and sources."""
    try:
        return to_yaml(hidden(public_config(Record(run).config))).encode()
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{run / 'config.yaml'} is not the whole configuration of a run: {error!r}") from error


def _upload(api: HfApi, repo: str, files: dict[str, Path | bytes], private: bool, revision: str | None) -> None:
    from huggingface_hub import CommitOperationAdd

    api.create_repo(repo, private=private, exist_ok=True)
    if (private_there := api.model_info(repo).private) is not None and private_there != private:
        kind, asked = ("private", "public") if private_there else ("public", "private")
        log.warning("%s is there already and is %s, not %s; it stays %s", repo, kind, asked, kind)
    if revision:
        api.create_branch(repo, branch=revision, exist_ok=True)
    additions = [CommitOperationAdd(name, content) for name, content in files.items()]
    api.create_commit(repo, additions, commit_message="Upload a model by trainkit", revision=revision)


def _reason(error: BaseException) -> str:
    """Return why an upload failed, on one line, without the signatures that addresses of storage have."""
    while type(error) is RuntimeError and error.__cause__ is not None:  # it says which file
        error = error.__cause__
    text = re.sub(r" For more information check: \S+", "", " ".join(str(error).split()))
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
    status = getattr(getattr(error, "response", None), "status_code", None)
    hint = _HINTS.get(status or 0, "")
    if "404" in text and "xet-write-token" in text:
        hint = " (this hub has no Xet storage: set HF_HUB_DISABLE_XET=1)"
    return printable(f"{type(error).__name__}: {text[:300].rstrip('.')}{hint}")


def command(export: Path, repo: str, *, private: bool = True, revision: str | None = None) -> str:
    """Return the command line that publishes an exported model."""
    options = [*([] if private else ["--public"]), *(["--revision", revision] if revision else [])]
    return shlex.join(["trainkit", "push", str(export), repo, *options])


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Disable the progress bars of huggingface_hub inside the block, unless standard error is a terminal."""
    from huggingface_hub import utils

    hides = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    if hides:
        utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if hides:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


def push_at_end(trainer: RunView) -> None:
    """Publish the export of a run that has ended, if `train.push_to_hub` is set.

    A failure is logged with the command that tries again: the model is saved. Only the main process publishes, and the
    others do not wait for it.
    """
    repo = trainer.config.train.push_to_hub
    if repo is None or not trainer.parallel.is_main:
        return
    assert trainer.run_dir is not None
    export = trainer.run_dir / "model"
    try:
        log.warning("the model is published as %s", push(export, repo))
    except HubError as error:
        log.warning("the run has ended and its model is saved in %s. %s", export, error)
    except TrainkitError as error:
        log.warning(
            "the run has ended and its model is saved in %s; it is not published: %s. To publish it: %s",
            export,
            error,
            command(export, repo),
        )
