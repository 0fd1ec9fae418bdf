"""Exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.console import RemoteCode
from trainkit.cli.inference import Best, Model
from trainkit_tools.others import CONVERTER, Format, Server

Base = Annotated[
    str | None, typer.Option(metavar="PATH", help="The base model, if it has moved since the adapter was saved.")
]


def export(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory, or the new file of gguf.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="merged: for transformers; gguf: a file of llama.cpp; ollama: such a file with a Modelfile.",
        ),
    ] = "merged",
    weights: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="Of weights in GGUF: f32, f16, bf16, q8_0, auto.")
    ] = "auto",
    converter: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"{CONVERTER} of llama.cpp; by default that on the path.")
    ] = None,
    best: Best = False,
    base: Base = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Write a trained model for transformers, llama.cpp or Ollama. An adapter is merged into its base model.

    merged has the tokenizer and the heads; gguf and ollama are written by the converter of llama.cpp.
    """
    from trainkit.runs.exports import find_model
    from trainkit_tools.exporting import export_model

    source = find_model(model, best=best)
    told = export_model(source, out, form, weights, converter, base=base, trust_remote_code=trust_remote_code)
    typer.echo(told)


def serve(
    model: Model,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Further arguments of the server.")
    ] = None,
    server: Annotated[Server, typer.Option("--with", help="The server.")] = "transformers",
    host: Annotated[str, typer.Option(help="The address to listen on; by default this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port.")] = 8000,
    best: Best = False,
    base: Base = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Serve a trained model by transformers or vLLM, with the API of OpenAI, until it is interrupted.

    An adapter is merged for the server into a temporary directory.
    """
    from trainkit.runs.exports import find_model
    from trainkit_tools import exporting

    source = find_model(model, best=best)
    code = exporting.serve(source, server, host, port, arguments or [], base=base, trust_remote_code=trust_remote_code)
    raise typer.Exit(code)


def push(
    model: Model,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The id of the repository: owner/name.")],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; it is private by default.")
    ] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="The branch; main by default.")] = None,
    best: Best = False,
) -> None:
    """Publish an exported model on the hub of Hugging Face, with its card and the configuration and metrics of the run.

    An upload that failed is continued by the same command. The token is that of HF_TOKEN or of `hf auth login`.
    """
    from trainkit.runs.exports import find_model
    from trainkit.runs.hub import push

    export = find_model(model, best=best).directory
    typer.echo(push(export, repo, private=not public, revision=revision))
