"""Trying trained models: talking to them, generating responses to many prompts, evaluating."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.console import RemoteCode, aligned
from trainkit.cli.files import read_data
from trainkit.cli.training import task_arguments
from trainkit.errors import ConfigError, DataError, printable, suggest
from trainkit.plugins import load_function

if TYPE_CHECKING:
    from trainkit.trainer.inference import Estimate, Evaluated, Tried

Model = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="A run, its export, another model directory, or a hub id.")
]
Best = Annotated[bool, typer.Option("--best", help="Of a run, the best export instead of the last.")]
Temperature = Annotated[float | None, typer.Option(metavar="NUMBER", help="Sampling temperature; 0: greedy.")]
TopP = Annotated[float | None, typer.Option(metavar="NUMBER", help="Sample from this probability mass.")]
MaxNewTokens = Annotated[int | None, typer.Option(metavar="N", help="The longest response, in tokens.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The seed of the random numbers.")]
BatchSize = Annotated[int | None, typer.Option(metavar="N", min=1, help="Responses that are generated at a time.")]
WRITTEN = ("output", "finish_reason")
"""The columns that `generate` adds to those of the prompts, and with --best-of also ``score``."""
SHOWN = 3
"""The best and the worst responses that are printed, of each."""


def generate(
    model: Model,
    prompts: Annotated[str, typer.Option(metavar="DATA", help="The prompts; DATA as for `trainkit train`.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSON lines; one that was begun is continued.")],
    samples_per_prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Responses to each prompt.")] = 1,
    best_of: Annotated[
        int | None,
        typer.Option(
            "--best-of", metavar="N", min=1, help="Sample so many to each prompt; write those that score best."
        ),
    ] = None,
    reward_fn: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="The reward function, for --best-of.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    best: Best = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Generate responses to prompts, and write each with the columns of its prompt, `output` and `finish_reason`.

    finish_reason is `stop` (the end token or a stop string) or `length`. The sampling settings are those of the run,
    or of the model's generation config. A response depends on its prompt's position and the seed, not on the batch.
    With --best-of, the --samples-per-prompt best are written, with the `score` of the reward function, the best first.
    """
    from trainkit.data import prompt_rows
    from trainkit.trainer.inference import respond

    if (best_of is None) != (reward_fn is None):
        raise ConfigError("--best-of chooses responses by their scores; give --best-of and --reward-fn, or neither")
    if best_of is not None and samples_per_prompt > best_of:
        raise ConfigError(f"--samples-per-prompt is {samples_per_prompt}, and --best-of {best_of}; lower the first")
    rows, written = prompt_rows(read_data(prompts)), (*WRITTEN, *(["score"] if best_of else []))
    for name in written:
        if any(name in row for row in rows):
            raise DataError(f"the prompts have a column {name!r}, which is written into {out}; rename the column")
    score = {"reward_fn": reward_fn and load_function(reward_fn)}
    tried = load_model(model, best, temperature, top_p, max_new_tokens, seed, batch_size, trust_remote_code, **score)
    settings = {**_settings(tried, samples_per_prompt), "best_of": best_of, "reward_fn": reward_fn}
    done = _continued(out, rows, samples_per_prompt, settings, written)
    total = len(rows) * samples_per_prompt
    with out.open("a", encoding="utf-8") as file:
        for response in _shown(respond(tried, rows, samples_per_prompt, done, best_of=best_of), done, total):
            line = {**response.row, "output": response.output, "finish_reason": response.finish_reason}
            line |= {"score": response.score} if best_of else {}
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            file.flush()
    note = f", of which {done} were there" if done else ""
    typer.echo(f"{out}: {total} responses to {len(rows)} prompts{note}")


def load_model(
    model: str,
    best: bool,
    temperature: float | None,
    top_p: float | None,
    max_new_tokens: int | None,
    seed: int | None,
    batch_size: int | None,
    trust_remote_code: bool,
    **arguments: Any,
) -> Tried:
    """Load a model with the options that were given; print what is said about it."""
    from transformers.utils import logging

    from trainkit.trainer.inference import load_tried

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    options = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    tried = load_tried(
        model,
        best=best,
        settings={name: value for name, value in options.items() if value is not None},
        seed=seed,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
        **arguments,
    )
    for note in tried.notes:
        typer.echo(printable(note), err=True)
    return tried


def _settings(tried: Tried, samples_per_prompt: int) -> dict[str, Any]:
    """Return what decides responses besides the prompts."""
    return {
        "model": str(Path(tried.source.model).resolve()) if Path(tried.source.model).exists() else tried.source.model,
        "mark": tried.source.mark,
        "seed": tried.trainer.config.train.seed,
        "samples_per_prompt": samples_per_prompt,
        "sampling": tried.settings.model_dump(mode="json"),
    }


def _continued(
    out: Path,
    rows: list[dict[str, Any]],
    samples_per_prompt: int,
    settings: dict[str, Any],
    written: tuple[str, ...],
) -> int:
    """Return how many responses ``out`` has already; remove a last line that is cut off; write the settings beside it.

    Raises:
        DataError: its responses are to other prompts, or were made with other settings.
    """
    beside = out.with_name(f"{out.name}.settings.json")
    another = f"give another --out, or remove {out}"
    if not out.exists() or (beside.is_file() and not out.stat().st_size):  # none was made, or not one response
        out.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return 0
    if out.is_dir():
        raise DataError(f"{out} is a directory; give a file as --out, such as {out / 'responses.jsonl'}")
    if not beside.is_file():
        raise DataError(f"{out} exists, and is not of this command, which leaves {beside} beside it; {another}")
    before = _read_json(beside.read_text(encoding="utf-8"), str(beside), another)
    if differ := [name for name in settings if before.get(name) != json.loads(json.dumps(settings[name]))]:
        name = differ[0]
        raise DataError(f"{out} was begun with {name} {before.get(name)}, and given is {settings[name]}; {another}")
    text = out.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    lines = whole.decode("utf-8").split("\n")[:-1]
    expected = [row for row in rows for _ in range(samples_per_prompt)]
    for at, line in enumerate(lines):
        line_settings = _read_json(line, f"{out}, line {at + 1}", another)
        row = {name: value for name, value in line_settings.items() if name not in written}
        if at >= len(expected) or row != json.loads(json.dumps(expected[at], default=str)):
            raise DataError(f"{out} was begun with other prompts (line {at + 1}); {another}")
    if len(whole) < len(text):
        out.write_bytes(whole)
    return len(lines)


def _read_json(text: str, where: str, another: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: not a JSON object ({error}); {another}") from error


def _shown(responses: Any, done: int, total: int) -> Any:
    """Yield the responses, with a progress bar if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield from responses
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("responses", total=total, completed=done)
        for response in responses:
            yield response
            progress.advance(task)


def evaluate(
    model: Model,
    prompts: Annotated[str | None, typer.Option(metavar="DATA", help="The prompts to evaluate on.")] = None,
    reward_fn: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="The reward function.")] = None,
    metric_fn: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="The metric function.")] = None,
    environment: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="The environment: a class or function of a row.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="The task that the run was trained with, for all of these."),
    ] = None,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", metavar="TASKS", help="Tasks of lm-evaluation-harness, with commas.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every response as a JSON line.")] = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    best: Best = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Evaluate a model as training does, without training: rewards, metrics and lengths of responses to prompts.

    Of a run, the settings are the run's: on the same prompts the numbers are those of its last evaluation.
    """
    settings = {
        "reward_fn": reward_fn and load_function(reward_fn),
        "metric_fn": metric_fn and load_function(metric_fn),
        "environment": environment and load_function(environment),
    }
    arguments = _of_task(task, model, best) if task else {}
    arguments |= {name: value for name, value in settings.items() if value}
    data = arguments.pop("eval_prompts", None) if prompts is None else read_data(prompts)
    arguments.pop("eval_prompts", None)
    if data is None and lm_eval is None:
        raise ConfigError("there is nothing to evaluate on; give --prompts, or --lm-eval TASKS")
    if data is not None and not {"reward_fn", "metric_fn", "environment"} & arguments.keys():
        raise ConfigError("there is nothing to measure responses with; give --reward-fn, --metric-fn or --environment")
    tried = load_model(model, best, temperature, None, max_new_tokens, seed, batch_size, trust_remote_code, **arguments)
    report: dict[str, Any] = {"model": tried.source.model, **tried.source.mark}
    if data is not None:
        from trainkit.trainer.inference import evaluate

        evaluated = evaluate(tried, data)
        report |= _report(evaluated)
        if out is not None:
            lines = [json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in evaluated.records]
            out.write_text("".join(lines), encoding="utf-8")
        if not as_json:
            typer.echo("\n".join(_text(report, evaluated)))
    if lm_eval is not None:
        report["lm_eval"] = _harness(tried, lm_eval, batch_size, show=not as_json)
    if as_json:
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False, default=str))


OF_TASKS = ("reward_fn", "metric_fn", "environment", "eval_prompts", "logit_mask", "tokenizer", "stop_sequences")
"""The arguments of `trainkit.train` that an evaluation uses."""


def _of_task(task: str, model: str, best: bool) -> dict[str, Any]:
    """Return the arguments for an evaluation from the task of a run, called with the seed of the run."""
    from trainkit.runs import Record
    from trainkit.runs.exports import find_model

    run = find_model(model, best=best).run
    seed = 0 if run is None else Record(run).setting("train", "seed", 0)
    arguments = task_arguments(task, seed)
    return {name: arguments[name] for name in OF_TASKS if arguments.get(name) is not None}


def _report(evaluated: Evaluated) -> dict[str, Any]:
    ranked = evaluated.ranked()
    return {
        "responses": len(evaluated.records),
        "metrics": evaluated.metrics,
        "means": {
            name: {"mean": mean.mean, "std": _number(mean.std), "interval": [*map(_number, mean.interval)]}
            for name, mean in evaluated.means.items()
        },
        "best": ranked[:SHOWN],
        "worst": ranked[SHOWN:][-SHOWN:][::-1],
    }


def _number(value: float) -> float | None:
    return None if value != value else value


def _text(report: dict[str, Any], evaluated: Evaluated) -> list[str]:
    """Return the lines of a report: a table of the means, other metrics, the best and the worst responses."""
    step = f" after step {report['step']} of {report['method']}" if "step" in report else ""
    lines = [f"{report['model']}{step}: {report['responses']} responses", ""]
    rows = [("", "mean", "std", "95 % interval"), *(_cells(name, mean) for name, mean in evaluated.means.items())]
    lines += aligned(rows)
    others = [name for name in evaluated.metrics if name.removeprefix("eval/") not in evaluated.means]
    lines += [f"{name.removeprefix('eval/')}  {evaluated.metrics[name]:.4g}" for name in others]
    for which in ("best", "worst"):
        lines += ["", f"{which}:"] if report[which] else []
        lines += [f"  {each['reward']:.4g}  {_cut(each['prompt'])} → {_cut(each['output'])}" for each in report[which]]
    return [printable(line) for line in lines]


def _cells(name: str, mean: Estimate) -> tuple[str, ...]:
    low, high = mean.interval
    has_interval = mean.count > 1
    return (
        name,
        f"{mean.mean:.4g}",
        f"{mean.std:.4g}" if has_interval else "-",
        f"{low:.4g} to {high:.4g}" if has_interval else "-",
    )


def _cut(text: Any, width: int = 100) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


HARNESS = 'the package lm-eval is not installed; install it: pip install "trainkit-rl[eval]"'


def _harness(tried: Tried, tasks: str, batch_size: int | None, *, show: bool) -> dict[str, Any]:
    """Return the results of tasks of lm-evaluation-harness, by task; print its table if ``show``.

    Raises:
        ConfigError: it is not installed, or knows no such task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ModuleNotFoundError as error:
        raise ConfigError(HARNESS if error.name == "lm_eval" else f"lm-eval cannot be imported: {error}") from error
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    files = {name: Path(name) for name in names if name.endswith((".yaml", ".yml"))}
    manager = TaskManager(include_path=sorted({str(file.parent) for file in files.values()}) or None)
    asked: list[str] = []
    for name in names:
        task = _task_name(files[name]) if name in files else name
        matches = manager.match_tasks([task])
        if not matches:
            raise ConfigError(f"lm-eval has no task {task!r}{suggest(task, manager.all_tasks)}")
        asked += matches
    trainer = tried.trainer
    model = HFLM(pretrained=trainer.unwrapped.model, tokenizer=trainer.tokenizer, batch_size=batch_size or 8)
    seed = trainer.config.train.seed
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed)
    results = simple_evaluate(model=model, tasks=asked, task_manager=manager, log_samples=False, **seeds)
    if show:
        typer.echo("\n" + make_table(results))
    return dict(results["results"])


def _task_name(file: Path) -> str:
    """Return the name that a task's YAML file gives it."""
    try:
        match = re.search(r"^(?:task|group):\s*[\"']?([^\s\"'#]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError as error:
        raise ConfigError(f"cannot read the task {str(file)!r}: {error.strerror}") from error
    if match is None:
        raise ConfigError(f"{str(file)!r} names no task; give it a line `task: NAME`, as lm-eval's tasks have")
    return match[1]
