"""Measures what a GPU does with trainkit: probes, kernels, training steps beside TRL, profiles, and the tests for GPUs.

``make gpu`` runs it. Each stage of ``gpu_stages.py`` has a process and a deadline, so that one which fails or hangs
loses its own rows and nothing else; with ``--tiny`` all have one, which takes a third of the time. A row is written to
``OUT/gpu.jsonl`` as soon as it is measured, with the card, the versions and a hash of the sources. Stages that ended,
and training steps, kernels and profiles, that ``--known`` or ``OUT/gpu.jsonl`` has for the same card, versions and
sources are not measured again, so a second call goes on where the first one was stopped.

It runs from a plain checkout: the plugins are found in their folders, and nothing of trainkit is installed.
`benchmarks/README.md` lists the packages that are needed beside torch. ``--device cpu --tiny`` runs every stage with
small models on a CPU, to try whether it works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STAGES = {
    "ceilings": 30,
    "probes": 60,
    "attention": 30,
    "head": 60,
    "tokens": 30,
    "blocks": 120,
    "decode": 90,
    "sft": 150,
    "dpo": 150,
    "grpo": 200,
    "grpo-large": 300,
    "profile": 120,
    "tests": 420,
}
"""The stages, in order, and the most seconds of each."""
TARGETS = (
    ("sft-packed:32x1024, Q15, trainkit", "tokens_per_s", 40_000),
    ("sft-packed:32x1024, Q15, trainkit", "share_of_peak", 0.45),
    ("decode, Q15, 512 rows, 512+256", "tokens_per_s", 55_000),
    ("grpo:64x8,512+1024, Q15, trainkit", "steps_per_s", 1 / 28),
)
"""Rows with the figures that an H100 should reach at least."""
BESIDE = (
    ("dpo:8x256..1024, Q15", "seconds", 1.3),
    ("grpo:16x8,512+256, Q15, microbatch 16", "seconds", 1.4),
    ("grpo:16x8,512+256, Q15, microbatch 16", "peak", 1 / 0.6),
)
"""Rows of which TRL's figure should be at least so many times trainkit's."""
VERSIONS = """
import json, torch, transformers
card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(json.dumps({"card": card, "torch": torch.__version__, "transformers": transformers.__version__}))
"""
"""A program that prints the card and the versions."""


def sources() -> str:
    """Return a hash of everything that is measured."""
    found = hashlib.sha256()
    for folder in ("trainkit", "plugins", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def write_entry_points(site: Path) -> list[str]:
    """Write what an installation of trainkit and its plugins would tell Python; return the directories of modules."""
    folders = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        about = site / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
        about.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n"
        (about / "METADATA").write_text(text, encoding="utf-8")
        groups = [
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in project.get("entry-points", {}).items()
        ]
        (about / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    return [str(site), *map(str, folders)]


def read(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a file; none if there is no file."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def targets(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each target: what it is, what was measured, and whether that reaches it."""
    measured = {row["row"]: row for row in rows if "failed" not in row}
    for name, figure, least in TARGETS:
        own = measured.get(name, {})
        value = 1 / own["seconds"] if figure == "steps_per_s" and own else own.get(figure)
        yield _said(f"{name}: {figure}", value, least)
    for name, figure, least in BESIDE:
        sides = [measured.get(f"{name}, {system}", {}).get(figure) for system in ("trl", "trainkit")]
        yield _said(f"{name}: {figure} of TRL over trainkit's", None if None in sides else sides[0] / sides[1], least)


def _said(what: str, value: float | None, least: float) -> str:
    said = "not measured" if value is None else f"{value:.4g}, {'reached' if value >= least else 'NOT reached'}"
    return f"{what}: {said} (at least {least:.4g})"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--budget", type=float, default=1200, help="seconds in all")
    made.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="the directory of rows and profiles")
    made.add_argument("--known", type=Path, help="a file with rows that were measured before")
    made.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--tiny", action="store_true", help="small models and few rows")
    return made.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the stages within the budget; return 1 if one of them, or a row of it, failed, else 0."""
    options = parse(arguments)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    common = json.loads(subprocess.check_output([sys.executable, "-c", VERSIONS], text=True))
    if options.device == "cuda" and common["card"] == "CPU":
        raise SystemExit("there is no CUDA device; --device cpu --tiny tries the stages on a CPU")
    common |= {"sources": sources(), "tiny": options.tiny}
    rows = out / "gpu.jsonl"
    kept = [row for row in [*read(options.known), *read(rows)] if "failed" not in row]
    known = [row for row in kept if common.items() <= row.items()]
    names = {row["row"] for row in known}
    first = len(read(rows))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    ends, failed = time.monotonic() + options.budget, False
    with tempfile.TemporaryDirectory() as site:
        paths = [*write_entry_points(Path(site) / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        for stages in [options.only] if options.tiny else [[stage] for stage in options.only]:
            left = [stage for stage in stages if f"stage {stage}" not in names]
            if not left:
                continue
            started, before, said = time.monotonic(), len(read(rows)), ", ".join(left)
            limit = min(sum(map(STAGES.__getitem__, left)), ends - started)
            if limit < 5:
                print(f"-- {said}: no time left")
                continue
            fields = {"out": str(out), "device": options.device, "tiny": options.tiny, "limit": limit}
            settings = json.dumps({"stages": left, **fields, "common": common, "measured": known})
            script = str(Path(__file__).with_name("gpu_stages.py"))
            try:
                command = [sys.executable, "-W", "ignore", script, settings]
                subprocess.run(command, env=environment, timeout=limit, check=True)
                reason = "ended"
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                failed, reason = True, type(error).__name__
            if reason == "ended" and not any("failed" in row for row in read(rows)[before:]):
                with rows.open("a", encoding="utf-8") as file:
                    for stage in left:
                        print(json.dumps({"row": f"stage {stage}", **common}), file=file)
            print(f"-- {said}: {reason} after {time.monotonic() - started:.0f} s", flush=True)
    if not options.tiny:
        print("Targets, for an H100:", *targets([*known, *read(rows)]), sep="\n")
    return int(failed or any("failed" in row for row in read(rows)[first:]))


if __name__ == "__main__":
    sys.exit(main())
