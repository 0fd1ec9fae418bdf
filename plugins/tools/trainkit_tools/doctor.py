"""What trainkit runs on, and what the health monitor says of a run."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli.console import mark
from trainkit.errors import DataError, printable
from trainkit.security import MASK
from trainkit.version import __version__

Facts = dict[str, dict[str, Any]]
"""Values by group and name. The group ``checks`` has an empty text for each check that passes, and else what fails."""

VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU", "ACCELERATE_CONFIG_FILE",
    "TRAINKIT_DISABLE_PLUGINS", "TRAINKIT_LOAD_PLUGINS", "TRAINKIT_SWEEP_STORAGE", "TRAINKIT_TRACEBACK",
)  # fmt: skip
"""Variables of the environment that change what runs do. Of others that begin with ``TRAINKIT_``, which may be secrets
of plugins, only the names are shown."""
LITTLE = 2 * 1024**3
"""Free bytes on a disk below which checkpoints may not fit."""


def doctor(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The directory of a run.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for reports of bugs. It has no secrets.")
    ] = False,
) -> None:
    """Print versions, devices, plugins and what is wrong with them; of a run, what the health monitor has found."""
    if run is not None:
        from trainkit.runs import Record
        from trainkit.runs.health import found_in

        record = Record(run).checked()
        found = found_in(record)
        if not record.metrics:
            raise DataError(f"no metrics have been recorded in {run}; a run records them from its first step on")
        lines = [f"{mark(False)} {each['check']} (step {each['step']}): {each['message']}" for each in found]
        text = "\n".join(map(printable, lines)) or f"{mark(True)} nothing found in {printable(str(run))}"
        typer.echo(json.dumps(found, indent=2) if as_json else text)
        return
    facts = installation()
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(_table(facts)))
    if any(facts["checks"].values()):
        raise typer.Exit(1)


def _table(facts: Facts) -> Iterator[str]:
    for group, values in facts.items():
        yield f"{group}:"
        for name, value in values.items():
            if group == "checks":
                yield printable(f"  {mark(not value)} {name}{f': {value}' if value else ''}")
            else:
                yield printable(f"  {name}: {value}")


# ------------------------------------------------------------------------------------------------- the installation


def installation() -> Facts:
    """Return what trainkit runs on, by group and name, and the results of the checks."""
    disk = shutil.disk_usage(".")
    set_here = {name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith("TRAINKIT_")}
    return {
        "versions": _versions(),
        "devices": _devices(),
        "distributed launch": _launch(),
        "plugins": _plugins(),
        "machine": {
            "system": platform.platform(),
            "CPU cores": os.cpu_count(),
            "memory": _memory(),
            "disk": f"{_gigabytes(disk.free)} of {_gigabytes(disk.total)} free",
        },
        "environment": {
            name: _without_logins(value) if name in VARIABLES else "(set)" for name, value in sorted(set_here.items())
        },
        "checks": _checks(disk.free),
    }


def _without_logins(text: str) -> str:
    """Return ``text`` with a mask in place of user and password in each address, and of what follows its ``?``."""
    return re.sub(r"\?\S+", f"?{MASK}", re.sub(r"(^|\s|://)[^/\s@]+@", rf"\1{MASK}@", text))


def _gigabytes(amount: int) -> str:
    return f"{amount / 1e9:.1f} GB"


def _memory() -> str:
    """Return how much memory there is, and how much of it a run can get."""
    import psutil  # accelerate requires it

    found = psutil.virtual_memory()
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    held = f", limited to {_gigabytes(int(text))}" if text.isdecimal() and int(text) < found.total else ""
    return f"{_gigabytes(found.available)} of {_gigabytes(found.total)} available{held}"


def _versions() -> dict[str, str]:
    from trainkit.runs.provenance import library_versions

    return {"trainkit": __version__, **library_versions()}


def _devices() -> dict[str, Any]:
    import torch

    from trainkit.models.backend import use_fast_exact_matmul

    fast = use_fast_exact_matmul(torch.device("cpu"))
    found: dict[str, Any] = {"accelerators": torch.accelerator.device_count()}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found[f"cuda:{index}"] = f"{about.name}, {_gigabytes(free)} of {_gigabytes(total)} free"
    found["threads"] = torch.get_num_threads()
    found["float32 products on the CPU"] = "oneDNN" if fast else "the default library"
    found["CUDA"] = torch.version.cuda or "not in this build of torch"
    found["products in"] = ", ".join(dtype for dtype in ("float32", "bfloat16", "float16") if not _product(dtype))
    return found


def _launch() -> dict[str, Any]:
    import torch
    from accelerate.commands.config.config_args import default_config_file

    file = Path(os.environ.get("ACCELERATE_CONFIG_FILE") or default_config_file or "")
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
    return {
        "backends": ", ".join(backends),
        "processes of this launch": os.environ.get("WORLD_SIZE", "1"),
        "configuration of accelerate": str(file) if file.is_file() else "none",
    }


def _plugins() -> dict[str, str]:
    """Return the plugins of each installed distribution, by its name and version."""
    from trainkit.plugins import discover

    found: dict[str, list[str]] = {}
    for plugin in discover():
        state = " (disabled)" if plugin.disabled else " (cannot be used)" if plugin.why else ""
        found.setdefault(f"{plugin.distribution} {plugin.version}", []).append(f"{plugin.name}{state}")
    return {distribution: ", ".join(names) for distribution, names in sorted(found.items())}


def _checks(free: int) -> dict[str, str]:
    from trainkit.plugins.discovery import discover, reasons

    broken = reasons(plugin for plugin in discover() if not plugin.disabled)
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return {
        "plugins can be used": "; ".join(broken),
        "the working directory can be written to": _unwritable(Path()),
        "the cache of models can be written to": _unwritable(cache),
        "there is room for checkpoints": "" if free >= LITTLE else f"{_gigabytes(free)} are free",
        "a tensor can be multiplied on the device": _product("float32"),
        "processes can talk to each other": _group(),
    }


def _unwritable(directory: Path) -> str:
    """Return why nothing can be written into the directory, or into the nearest one above it; empty if it can."""
    there = next(each for each in [directory.absolute(), *directory.absolute().parents] if each.is_dir())
    return "" if os.access(there, os.W_OK) else f"{there} cannot be written to"


def _product(dtype: str) -> str:
    """Return what is wrong with products of a type on the device; empty if nothing is."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        ones = torch.ones(4, 4, device=device, dtype=getattr(torch, dtype))
        return "" if (ones @ ones).sum().item() == 64 else f"{device} computes wrong numbers"
    except RuntimeError as error:
        return f"{device}: {error}"


def _group() -> str:
    """Return why a group of processes, of this one alone, cannot be made over the loopback address; empty if it can."""
    import torch.distributed as dist

    if dist.is_initialized():
        return ""
    try:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:300]
    return ""


app = typer.Typer(rich_markup_mode=None)
app.command(epilog="Exit code: 1 if a check of the installation fails, else 0.")(doctor)
