"""Sweeps of trlX as those of `trainkit sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.errors import describe
from trainkit_migrate.tables import framework
from trainkit_migrate.translation import Remark, Translation

SEARCHES = {"none": "random", "random": "random", "bohb": "tpe"}
"""What chooses parameters, as `sampler`."""
SCHEDULERS = {"none": "none", "fifo": "none", "hyperband": "hyperband", "hyperbandforbohb": "hyperband"}
"""What ends trials early, as `pruner`."""
METRICS = {"reward/mean": "eval/reward", "mean_reward": "eval/reward", "metrics/reward": "eval/reward"}
NUMBERS = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2, "qrandint": 3, "lograndint": 2}
"""The strategies that are ranges, and how many numbers each needs; one of logarithms may also have its base."""


def translate_sweep(given: Mapping[str, Any]) -> Translation:
    """Translate a sweep of trlX; the configuration of the result is a sweep of trainkit, which lacks what it runs.

    Args:
        given: the content of the file, with ``tune_config``.
    """
    found, tune = Translation(), given["tune_config"]
    if not isinstance(tune, Mapping):
        found.refused.append(Remark("tune_config", f"should be a mapping; given {describe(tune)}"))
        tune = {}
    spaces = {path: about for path, about in given.items() if path != "tune_config"}
    kinds = {str(about.get("strategy")) for about in spaces.values() if isinstance(about, Mapping)}
    found.config["run"] = {"config": "CONFIG.yaml"}
    found.remarks.append(
        Remark(
            "run",
            "a sweep of trlX names a script on the command line; name the configuration that trainkit migrate has "
            "translated, and as task a function FILE.py:FUNCTION that returns what main gives to trlx.train",
        )
    )
    _tuned(tune, found)
    if kinds == {"grid"}:
        found.config["sampler"] = "grid"
        found.config.pop("trials", None)
    elif "grid" in kinds:
        found.remarks.append(Remark("tune_config.num_samples", "grids are choices beside parameters that are drawn"))
    parameters = found.config.setdefault("parameters", {})
    for path, about in spaces.items():
        key, space = _named(path, found), _space(path, about, found)
        if key and space is not None:
            parameters[key] = space
    return found


def _tuned(tune: Mapping[str, Any], found: Translation) -> None:
    metric = str(tune.get("metric", "reward/mean"))
    found.config["metric"] = METRICS.get(metric, f"eval/{metric.removeprefix('metrics/')}")
    found.config["direction"] = "minimize" if tune.get("mode") == "min" else "maximize"
    found.config["trials"] = tune.get("num_samples", 1)
    for theirs, ours, known in (("search_alg", "sampler", SEARCHES), ("scheduler", "pruner", SCHEDULERS)):
        word = str(tune.get(theirs)).lower()
        if word in known:
            found.config[ours] = known[word]
        else:
            told = f"given {word!r}; write {ours}: {' or '.join(dict.fromkeys(known.values()))}"
            found.refused.append(Remark(f"tune_config.{theirs}", told))
    if str(tune.get("search_alg")).lower() == "bohb":
        found.remarks.append(Remark("tune_config.search_alg", "the model of bohb is that of tpe; draws differ"))
    if most := tune.get("max_concurrent_trials"):
        found.config["workers"] = most
    settings = {"mode", "metric", "search_alg", "scheduler", "num_samples", "max_concurrent_trials"}
    for name in sorted(tune.keys() - settings):
        found.refused.append(Remark(f"tune_config.{name}", "trainkit sweep has no such setting; remove it"))


def _named(path: str, found: Translation) -> str:
    """Return the setting of trainkit; trlX before 0.4 named those of a section alone."""
    settings = framework("trlx").settings
    full = path if path in settings else next((each for each in settings if each.endswith(f".{path}")), path)
    rest = settings.get(f"{full.rpartition('.')[0]}.*")
    setting = settings.get({"lr_init": "optimizer.kwargs.lr"}.get(path, full), rest)
    to = setting.to if setting and setting.to else {"method.num_rollouts": "rollout.num_rollouts"}.get(full, "")
    to = "train.batch_size" if full == "train.batch_size" else to.replace("*", path.rpartition(".")[2])
    if not to:
        found.refused.append(Remark(path, "is no setting that a sweep can change; write that of trainkit by its path"))
    return f"rollout.{to.partition('.')[2]}" if to.startswith("eval.") else to


def _space(path: str, about: Any, found: Translation) -> Any:
    """Return the choices or the range of a parameter."""
    about = about if isinstance(about, Mapping) else {}
    kind, values = str(about.get("strategy")), about.get("values")
    if kind in ("choice", "grid", "grid_search") and isinstance(values, list):
        return values
    numbers = values if isinstance(values, list) and all(isinstance(each, int | float) for each in values) else []
    if len(numbers) < NUMBERS.get(kind, 100):
        said = f"write choices, or low and high with log or step; known are choice, grid and {', '.join(NUMBERS)}"
        found.refused.append(Remark(path, f"given {describe(about)}; {said}"))
        return None
    space = {"low": numbers[0], "high": numbers[1]}
    if kind in ("uniform", "loguniform", "quniform"):
        space = {name: float(each) for name, each in space.items()}
    elif kind != "qrandint":
        space["high"] -= 1  # which Ray leaves out
    if kind.startswith("log"):
        return {**space, "log": True}
    return {**space, "step": numbers[2]} if kind.startswith("q") else space
