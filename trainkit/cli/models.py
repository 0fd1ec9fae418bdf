"""Exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.console import RemoteCode


def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="An exported adapter, e.g. runs/x/model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the whole model.")],
    base: Annotated[
        str | None, typer.Option(metavar="PATH", help="The base model, if it has moved since the adapter was saved.")
    ] = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Merge an adapter into its base model. The whole model is saved with its tokenizer and heads."""
    from trainkit.models.loading import merge_export

    merge_export(adapter, out, base, trust_remote_code=trust_remote_code)
    typer.echo(f"{out}: load it with transformers, or give it as model.model_path")
