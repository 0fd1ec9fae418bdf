"""Training by a configuration file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli.console import RemoteCode, StrictPlugins
from trainkit.cli.files import read_data
from trainkit.cli.plugins import require_sound
from trainkit.errors import ConfigError, describe, suggest
from trainkit.plugins import load_function

NO_PLUGIN = "--no-plugin"


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The configuration file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, e.g. train.seed=2 optimizer.lr=1e-5.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION", help="A function that returns arguments of trainkit.train; may take `seed`."
        ),
    ] = None,
    prompts: Annotated[str | None, typer.Option(metavar="DATA", help="Prompts.")] = None,
    samples: Annotated[str | None, typer.Option(metavar="DATA", help="Samples to learn from.")] = None,
    eval_prompts: Annotated[str | None, typer.Option(metavar="DATA", help="Prompts for evaluations.")] = None,
    eval_samples: Annotated[str | None, typer.Option(metavar="DATA", help="Held-out samples for evaluations.")] = None,
    reward_fn: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="The reward function.")] = None,
    environment: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="The environment: a class or function of a row.")
    ] = None,
    allow_drift: Annotated[
        bool, typer.Option("--allow-drift", help="Resume even if settings that affect training have changed.")
    ] = False,
    trust_remote_code: RemoteCode = False,
    no_plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Disable this plugin or distribution; repeatable. Same as TRAINKIT_DISABLE_PLUGINS=NAME,NAME.",
        ),
    ] = None,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Train with a configuration.

    DATA is a file (.jsonl, .json, .csv, .parquet, .txt), a directory of such files or of a saved dataset, or a hub id:
    owner/name, or owner/name@config:split.

    FILE.py:FUNCTION may also be module:FUNCTION. Code is imported only if an option names it, never from the
    configuration. The options for data and reward override what the task returns.
    """
    from trainkit.api import train as run
    from trainkit.config import read_config
    from trainkit.plugins import disabled, discover
    from trainkit.plugins.discovery import unknown_disabled
    from trainkit.plugins.hooks import entry_name

    with disabled(no_plugin or [], NO_PLUGIN):
        settled = read_config(config, parse_overrides(overrides or []))
        for by, message in unknown_disabled(map(entry_name, [*settled.plugins, *settled.train.trackers])):
            if by == NO_PLUGIN:
                raise ConfigError(f"{message}; `trainkit plugins` shows what is installed")
        if strict_plugins:
            require_sound(discover())
        arguments = {} if task is None else task_arguments(task, settled.train.seed)
        sources = {
            "prompts": prompts,
            "samples": samples,
            "eval_prompts": eval_prompts,
            "eval_samples": eval_samples,
        }
        arguments |= {name: read_data(source) for name, source in sources.items() if source is not None}
        if reward_fn is not None:
            arguments["reward_fn"] = load_function(reward_fn)
        if environment is not None:
            arguments["environment"] = load_function(environment)
        if allow_drift:
            arguments["allow_drift"] = True
        run(config=settled, trust_remote_code=trust_remote_code, **arguments)


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """Parse overrides such as ``["train.seed=2"]`` into changes by dotted path; values are YAML.

    Raises:
        ConfigError: an override is not of the form key=value, or its value is not YAML.
    """
    from trainkit.plain import parse_yaml

    changes: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not key or not equals:
            raise ConfigError(f"given {override!r}; an override is section.field=value, e.g. train.seed=2")
        changes[key] = parse_yaml(value, f"the value of the override {key!r}")
    return changes


def task_arguments(reference: str, seed: int) -> dict[str, Any]:
    """Call the task's function and return its result, checked to be arguments of `trainkit.train`.

    Raises:
        ConfigError: it returned something else, or needs arguments besides ``seed``.
    """
    from trainkit.api import train as run

    function = load_function(reference)
    arguments = function(**_seed_argument(reference, function, seed))
    allowed = [name for name in inspect.signature(run).parameters if name not in ("config", "trust_remote_code")]
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"--task {reference} returned {describe(arguments)}; return a dict of arguments of trainkit.train: "
            f"{', '.join(allowed)}"
        )
    for name in arguments:
        if name not in allowed:
            raise ConfigError(
                f"--task {reference} returned {name!r}, which trainkit.train does not take from a task"
                f"{suggest(str(name), allowed)}; known: {', '.join(allowed)}"
            )
    return dict(arguments)


def _seed_argument(reference: str, function: Callable[..., Any], seed: int) -> dict[str, int]:
    """Return ``{"seed": seed}`` if the function has a parameter ``seed``, else an empty dict."""
    parameters = inspect.signature(function).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in variadic]
    if others := [name for name in needed if name != "seed"]:
        raise ConfigError(
            f"--task {reference} cannot be called without {', '.join(others)}; only `seed` is passed to a "
            "task. Give its other parameters defaults"
        )
    return {"seed": seed} if "seed" in parameters else {}
