"""Which framework a configuration file is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.errors import ConfigError, suggest
from trainkit.plugins import available_trainers
from trainkit_migrate.tables import FRAMEWORKS, Framework, framework

READ = (
    "trainkit migrate reads configurations of trlX, TRL, async_rlhf, ddpo-pytorch, axolotl, accelerate and DeepSpeed "
    "(.yml, .yaml, .json), and scripts (.py)"
)
MARKS: dict[str, tuple[set[str], ...]] = {
    "trlx": ({"method", "model"}, {"method", "train"}, {"method", "tokenizer"}),
    "ddpo_pytorch": ({"sample"}, {"pretrained", "train"}),
    "accelerate": ({"distributed_type"}, {"compute_environment"}),
    "deepspeed": ({"zero_optimization"}, {"train_micro_batch_size_per_gpu"}),
    "axolotl": ({"base_model"},),
}
"""Fields by which files of a framework are recognised; those of one set are enough."""
OLDER = {"evaluation_strategy", "max_seq_length", "gradient_checkpointing_use_reentrant"}
"""Fields by which files of TRL 0.8 are told from later ones that have the same fields otherwise."""


OTHERS = {"SftScriptArguments": "TRL 0.8", "DpoScriptArguments": "TRL 0.8", "RLOOConfig": "RLOO"}
"""What files are of that are taken for those of another class, which has the same fields."""


def recognised(given: Mapping[str, Any], cls: str = "") -> tuple[str, dict[str, Any], str]:
    """Return the framework of a configuration file, its sections as `translate` takes them, and what it may be instead.

    Files of trlX and ddpo-pytorch have sections; those of accelerate, DeepSpeed and axolotl have fields that no other
    has. The fields of TRL and async_rlhf are in no section; what they have in common does not say which class they are
    of. Those that TRL 0.8 and 1.x have in common are taken as 1.x.

    Args:
        given: the content of the file.
        cls: the class of its fields, such as ``DPOConfig``.

    Raises:
        ConfigError: there is no such class, no class has these fields, several have, or it is a file of trainkit.
    """
    method = given.get("method")
    if isinstance(method, str) or (isinstance(method, Mapping) and str(method.get("name")) in available_trainers()):
        raise ConfigError("the file is a configuration of trainkit already; trainkit config check FILE checks it")
    for name, fields in MARKS.items():
        if not cls and any(each <= given.keys() for each in fields):
            renamed = getattr(framework(name).functions, "RENAMED", {})
            return name, {renamed.get(field, field): value for field, value in given.items()}, ""
    without_adapter = [each for each in FRAMEWORKS if not framework(each).adapter]
    classes = [(name, each) for each in without_adapter for name in getattr(framework(each).functions, "METHODS", {})]
    if cls and cls not in (known := list(dict.fromkeys(name for name, _ in classes))):
        raise ConfigError(f"given the class {cls!r}{suggest(cls, known)}; known are {', '.join(known)}")
    most = _candidates(given, [each for each in classes if cls in ("", each[0])])
    homes = dict(reversed(most))  # of two frameworks with the same class, the first
    homes = {name: homes[name] for name, _ in most}
    older = [name for name, each in homes.items() if each == "trl_cli"]
    names = older if older and OLDER & given.keys() else [name for name in homes if name not in older] or older
    if {"GRPOConfig", "RLOOConfig"} <= {*names}:  # they have the same fields
        names.remove("RLOOConfig")
        older = [*older, "RLOOConfig"]
    other = next((name for name in older if name not in names), "")
    if not names:
        raise ConfigError(
            f"the file is of no framework that is known; given {', '.join(map(str, given))}. {READ}; trainkit config "
            "check FILE tells what settings of further frameworks are called in trainkit"
        )
    if len(names) > 1:
        raise ConfigError(
            "the file has no sections of trlX or ddpo-pytorch, and its fields are those of several classes; given "
            f"{', '.join(map(str, given))}; name the class by --config-class, which may be {', '.join(names)}"
        )
    about = framework(homes[names[0]])
    sections: dict[str, Any] = {names[0]: {}}
    for field, value in given.items():
        sections.setdefault(_home(str(field), names[0], about), {})[field] = value
    told = f"read as {names[0]} of TRL 1.x; a file of {OTHERS[other]} needs --config-class {other}" if other else ""
    return homes[names[0]], sections, told


def _candidates(given: Mapping[str, Any], classes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the classes, with their frameworks, that have most of the fields with those configured together with them.

    A class that is the only one may have none.
    """

    def known(cls: tuple[str, str]) -> int:
        about = framework(cls[1])
        return sum(f"{_home(field, cls[0], about)}.{field}" in about.settings for field in given)

    most = max(map(known, classes), default=0)
    return [each for each in classes if (most or len(classes) == 1) and known(each) == most]


def _home(field: str, cls: str, about: Framework) -> str:
    """Return the class that has a field: the given one, or one that belongs to no algorithm."""
    shared = {path.partition(".")[0] for path in about.settings} - {*about.functions.METHODS}
    return next((each for each in (cls, *sorted(shared)) if f"{each}.{field}" in about.settings), cls)
