"""The runs of a trial, in processes of their own."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from optuna.trial import Trial

from trainkit.errors import TrainkitError, printable, suggest
from trainkit.plain import to_yaml
from trainkit.runs.lock import is_held
from trainkit_sweep.child import PATIENCE
from trainkit_sweep.lines import AddedLines
from trainkit_sweep.settings import DATA
from trainkit_sweep.sources import Sweep

TAIL = 12
"""Lines of a log that are kept of a run that has failed."""


@dataclass
class Run:
    """A run of a trial with one seed. It begins with `start`, and `poll` is called until it returns True.

    Args:
        sweep: the sweep.
        trial: the trial.
        parameters: the values of the settings.
        seed: the seed.
        slot: which of the parallel runs it is.
        options: further options of the command line.
    """

    sweep: Sweep
    trial: Trial
    parameters: Mapping[str, Any]
    seed: int
    slot: int = 0
    options: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    evaluations: dict[int, float] = field(default_factory=dict)
    """The metric by step, as far as it was evaluated."""
    reported: set[int] = field(default_factory=set)
    """The steps of which the pruner knows."""
    pruned: bool = False
    """Whether it was ended because its trial is pruned."""
    fault: str = ""
    """What is wrong with its evaluations."""
    hopeless: bool = False
    """Whether other parameters would not help."""
    _since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._metrics = AddedLines(self.directory / "metrics.jsonl")

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return folder(self.sweep.directory, self.trial.number) / f"seed_{self.seed}"

    @property
    def log(self) -> Path:
        """The file of what the process prints."""
        return self.directory.with_name(f"{self.directory.name}.log")

    def start(self) -> None:
        """Start the process, unless the run of a killed sweep still uses the directory; then it is started later."""
        if is_held(self.directory):
            if time.monotonic() - self._since > PATIENCE + 60:
                self.fault = f"{self.directory} is still used by a run of an earlier sweep"
            return
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **shared_machine(self.sweep.settings.workers, self.slot)},
                start_new_session=True,  # Ctrl-C reaches the sweep, which ends the run
            )

    def command(self) -> list[str]:
        """Return the command line of the run."""
        given = self.sweep.settings.run
        if given.script is not None:
            return self._of_script(given.script)
        config = given.config or str(default_file(self.sweep))
        settings = {
            **given.overrides,
            **self.parameters,
            "train.seed": self.seed,
            "train.run_dir": str(self.directory),
            "train.resume": "auto",
        }
        data = {name: getattr(given, name) for name in DATA}
        return [
            *(sys.executable, "-m", "trainkit_sweep.child", str(os.getpid()), "train", config),
            *(f"{name}={_as_yaml(value)}" for name, value in settings.items()),
            *(f"--{name.replace('_', '-')}={value}" for name, value in data.items() if value is not None),
            *self.options,
        ]

    def _of_script(self, script: str) -> list[str]:
        """Return the command line that calls ``main`` of a script with the settings of trlX."""
        hparams = {
            **self.sweep.settings.run.overrides,
            **self.parameters,
            "train.seed": self.seed,
            "train.checkpoint_dir": str(self.directory),
            "train.resume_from_checkpoint": "auto",
        }
        return [sys.executable, "-m", "trainkit_sweep.child", str(os.getpid()), script, json.dumps(hparams)]

    def poll(self) -> bool:
        """Read new evaluations, and return whether the run has ended or has to end."""
        if self.fault:
            return True
        if self.process is None:
            self.start()
            return False
        ended = self.process.poll() is not None
        self._read()
        return ended or bool(self.fault)

    def _read(self) -> None:
        """Read the evaluations since the last time, or all of them if the run was resumed and has removed some."""
        try:
            lines, anew = self._metrics.read()
        except TrainkitError as error:
            self.fault = str(error)
            return
        if anew:
            self.evaluations = {}
        name = self.sweep.settings.metric
        evaluated = [line for line in lines if any(each.startswith("eval/") for each in line)]
        self.evaluations |= {int(line["step"]): float(line[name]) for line in evaluated if name in line}
        if evaluated and not self.evaluations:
            known = list(dict.fromkeys(each for line in evaluated for each in line if each.startswith("eval/")))
            self.hopeless = True
            self.fault = (
                f"the evaluations have no metric {name!r}{suggest(name, known)}; they have {', '.join(known)}. "
                "Name one of them as the metric of the sweep"
            )

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Send a signal to the process; SIGKILL goes to the processes that it has started, too."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                if signum == getattr(signal, "SIGKILL", None):
                    os.killpg(self.process.pid, signum)
                else:
                    self.process.send_signal(signum)

    def wait(self) -> None:
        """Wait for the end of the process."""
        if self.process is not None:
            self.process.wait()

    @property
    def failure(self) -> str:
        """Why the run has no value; empty if it has one."""
        code = None if self.process is None else self.process.returncode
        if self.fault:
            return self.fault
        if code is None or code < 0:
            name = "" if code is None else signal.Signals(-code).name
            hint = ", perhaps because there was too little memory" if name == "SIGKILL" else ""
            return f"the run was killed by {name}{hint}" if name else "the run was not started"
        if code:
            return _tail(self.log) or f"the run ended with exit code {code}"
        if not self.evaluations:
            return "the run was not evaluated; give prompts or samples for evaluations, and see train.eval_interval"
        if not math.isfinite(self.value):
            return f"the last {self.sweep.settings.metric} is {self.value}"
        return ""

    @property
    def step(self) -> int:
        """The step of the last evaluation."""
        return max(self.evaluations, default=0)

    @property
    def value(self) -> float:
        """The metric of the last evaluation."""
        return self.evaluations[self.step]


def folder(directory: Path, number: int) -> Path:
    """Return the directory of a trial."""
    return directory / f"trial_{number:04}"


def default_file(sweep: Sweep) -> Path:
    """Write the configuration file of a sweep that names an algorithm alone, and return it."""
    path = sweep.directory / "method.yaml"
    path.write_text(to_yaml({"method": sweep.settings.run.method}), encoding="utf-8")
    return path


def shared_machine(workers: int, slot: int) -> dict[str, str]:
    """Return variables of the environment by which parallel runs share processors and accelerators.

    Each run gets its share of the processors, unless the user sets ``OMP_NUM_THREADS``, and one of several GPUs.
    """
    if workers == 1:
        return {}
    found: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // workers, 1))
    if len(devices := _devices()) > 1:
        found["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return found


@cache
def _devices() -> list[str]:
    """Return what names the GPUs in ``CUDA_VISIBLE_DEVICES``."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [each for each in given.split(",") if each]
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30).stdout
        return re.findall(r"UUID: (GPU-[\w-]+)", listed)
    return []


def _as_yaml(value: Any) -> str:
    """Return a value as it is written on the command line: JSON, which is YAML; no text names a variable."""
    return json.dumps(value, ensure_ascii=False).replace("${", "$${")


def _tail(log: Path) -> str:
    """Return the last lines of a log; of an error that trainkit explains, its message."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:]
    except OSError:
        return ""
    lines = [line for line in map(printable, lines) if line.strip() and not line.startswith("(TRAINKIT_TRACEBACK")]
    told = [at for at, line in enumerate(lines) if re.match(r"[A-Z]\w*(Error|Exception|Interrupt): ", line)]
    return "\n".join(lines[told[-1] :][:TAIL] if told else lines[-TAIL:])[:2000]
