"""Exports of a run in the formats of other programs, and their servers."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shlex import join, quote

from trainkit.errors import ConfigError
from trainkit.models.adapters import ADAPTER_CONFIG, HEADS
from trainkit.runs import Record
from trainkit.runs.exports import Source
from trainkit_tools.merging import merge_export
from trainkit_tools.others import CONVERTER, Format, Server

NEEDS = {"transformers": ("fastapi", "uvicorn", "openai"), "vllm": ("vllm",)}
PARAMETERS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "num_predict": "max_new_tokens",
              "min_p": "min_p", "repeat_penalty": "repetition_penalty"}  # fmt: skip
"""Parameters of a Modelfile, and the settings of a run that are the same."""
WHOLE = ("auto", "f32", "f16", "bf16")
"""Types of weights in GGUF that are not quantised."""
INSTALL = {"transformers": 'pip install "transformers[serving]"', "vllm": "pip install vllm"}


def export_model(
    source: Source,
    out: Path,
    form: Format,
    weights: str = "auto",
    converter: Path | None = None,
    *,
    base: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Write an exported model in another format, and return what to do with it.

    Args:
        source: an export of a run, or another directory with a model. An adapter is merged into its base model.
        out: a new directory, or the new file of ``gguf``.
        form: ``merged``, a directory of transformers; ``gguf``, a file of llama.cpp; ``ollama``, such a file with a
            Modelfile, which has the sampling settings of the run.
        weights: the type of the weights in GGUF, as the converter names it.
        converter: the converter of llama.cpp; by default the one that is on the path.
        base: the base model's directory or hub id, instead of the one that the adapter names.
        trust_remote_code: whether Python code that comes with the base model may run.

    Raises:
        ConfigError: ``out`` exists, an option has no effect, there is no converter, or the model cannot be merged or
            converted.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; give a new {'file' if form == 'gguf' else 'directory'}")
    if form == "merged":
        if weights != "auto" or converter is not None:
            raise ConfigError("--type and --converter are for GGUF; give --format gguf or ollama, or neither of them")
        with whole(source, base, trust_remote_code) as directory:
            shutil.copytree(directory, out, dirs_exist_ok=True)
        return f"{out}: load it with transformers, or give it as model.model_path"
    options = [*(["--type", weights] if weights != "auto" else []), *(["--base", base] if base else [])]
    options += ["--trust-remote-code"] if trust_remote_code else []
    program = _converter(converter, source, out, ["--format", form, *options])
    file = out if form == "gguf" else out / "model.gguf"
    with whole(source, base, trust_remote_code) as directory:
        file.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, str(program), str(directory), "--outfile", str(file), "--outtype", weights])
        heads = (Path(directory) / HEADS).is_file()
    told = [f"{file}: without the heads beside the language model, which GGUF has no place for"] if heads else []
    if form == "gguf":
        smaller = quote(str(file.with_name(f"{file.stem}-Q4_K_M.gguf")))
        told += [f"llama-cli -m {quote(str(file))}"]
        if weights in WHOLE:  # llama-quantize reads no others
            told += [f"smaller: llama-quantize {quote(str(file))} {smaller} Q4_K_M"]
        return "\n".join(told)
    (out / "Modelfile").write_text(modelfile(source), encoding="utf-8")
    name = out.resolve().name
    return "\n".join([*told, f"ollama create {name} -f {quote(str(out / 'Modelfile'))}", f"ollama run {name}"])


def modelfile(source: Source) -> str:
    """Return the Modelfile of a ``model.gguf``; Ollama reads the chat template from that file."""
    lines = ["FROM ./model.gguf"]
    if source.run is not None:
        record = Record(source.run)
        lines += [f"PARAMETER {theirs} {record.setting('rollout', ours)}" for theirs, ours in PARAMETERS.items()]
        quoted = [text.replace('"', '\\"') for text in record.setting("rollout", "stop_sequences") or ()]
        lines += [f'PARAMETER stop "{text}"' for text in quoted]
    return "\n".join(lines) + "\n"


def serve(
    source: Source,
    server: Server,
    host: str,
    port: int,
    arguments: list[str],
    *,
    base: str | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Run a server of the model until it ends, and return its exit code; an adapter is merged for it.

    The server names a model of a run as the run's directory.

    Raises:
        ConfigError: the server is not installed, the address is in use, or the adapter cannot be merged.
    """
    program = shutil.which(server, path=str(Path(sys.executable).parent)) or shutil.which(server)
    if program is None or not all(map(find_spec, NEEDS[server])):
        raise ConfigError(f"the server of {server} is not installed; install it: {INSTALL[server]}")
    try:  # the server would find it out after it has loaded the model
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; give another --port, or an address of this machine as --host"
        ) from error
    with whole(source, base, trust_remote_code) as model, tempfile.TemporaryDirectory() as place:
        if isinstance(model, Path):  # servers name a model by its path, so that it is given by a link with a short one
            name = (source.run or source.directory).resolve().name
            (Path(place) / name).symlink_to(model.resolve(), target_is_directory=True)
        else:
            name = model
        trusts = ["--trust-remote-code"] * trust_remote_code
        command = [program, "serve", name, "--host", host, "--port", str(port), *trusts, *arguments]
        print(f"{join(command)}  (model: {name}; http://{host}:{port}/v1)", flush=True)
        process = subprocess.Popen(command, cwd=place)
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = process.wait()
        finally:  # an interrupt of the terminal reaches both
            process.terminate()
            process.wait()
            signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


@contextmanager
def whole(source: Source, base: str | None, trust_remote_code: bool) -> Iterator[Path | str]:
    """Give the directory of the whole model, merged into a temporary one if it is an adapter; or its hub id."""
    if source.pipeline:
        raise ConfigError(f"{source.model!r} is a diffusion pipeline ({source.pipeline}), and no language model")
    is_here = Path(source.model).exists()
    if base is not None and not (is_here and (source.directory / ADAPTER_CONFIG).is_file()):
        raise ConfigError(f"{source.model!r} is no adapter, and has no base model; omit --base")
    if not is_here:
        yield source.model
    elif not (source.directory / ADAPTER_CONFIG).is_file():
        yield source.directory
    else:
        with tempfile.TemporaryDirectory() as made:
            merged = Path(made) / "model"
            merge_export(source.directory, merged, base, trust_remote_code=trust_remote_code)
            yield merged


def _converter(given: Path | None, source: Source, out: Path, options: list[str]) -> Path:
    found = given or shutil.which(CONVERTER)
    if found is not None and Path(found).is_file():
        return Path(found)
    missing = f"there is no file {given}" if given else f"{CONVERTER} of llama.cpp is not on the path"
    again = ["trainkit", "export", source.model, str(out), *options, "--converter", f"llama.cpp/{CONVERTER}"]
    raise ConfigError(
        f"{missing}. To get it: git clone https://github.com/ggml-org/llama.cpp && pip install gguf sentencepiece. "
        f"Then: {join(again)}"
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-3:])
        raise ConfigError(f"the converter ended with {done.returncode}: {join(command)}\n{last}")
