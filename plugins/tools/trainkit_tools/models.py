"""Exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.console import RemoteCode


def merge(
    adapter: Annotated[
        Path, typer.Argument(metavar="RUN|ADAPTER", help="A run, or an exported adapter, e.g. runs/x/model.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the whole model.")],
    base: Annotated[
        str | None, typer.Option(metavar="PATH", help="The base model, if it has moved since the adapter was saved.")
    ] = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Merge an adapter into its base model. The whole model is saved with its tokenizer and heads."""
    from trainkit.runs.exports import find_model
    from trainkit_tools.merging import merge_export

    merge_export(find_model(str(adapter)).directory, out, base, trust_remote_code=trust_remote_code)
    typer.echo(f"{out}: load it with transformers, or give it as model.model_path")


def push(
    model: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run, or an exported model.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The id of the repository: owner/name.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; it is private by default.")
    ] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="The branch; main by default.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Publish best/ of the run instead of model/.")] = False,
) -> None:
    """Publish an exported model on the hub of Hugging Face, with its card and the configuration and metrics of the run.

    An upload that failed is continued by the same command. The token is that of HF_TOKEN or of `hf auth login`.
    """
    from trainkit.runs.exports import find_model
    from trainkit.runs.hub import push

    export = find_model(str(model), best=best).directory
    typer.echo(push(export, repo, private=not public, revision=revision))
