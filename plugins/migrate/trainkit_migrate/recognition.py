"""Which framework a configuration file is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.errors import ConfigError, suggest
from trainkit_migrate.tables import FRAMEWORKS, Framework, framework


def recognised(given: Mapping[str, Any], cls: str = "") -> tuple[str, dict[str, Any]]:
    """Return the framework of a configuration file, and its sections as `translate` takes them.

    Files of trlX and ddpo-pytorch have sections, one of accelerate the field ``distributed_type``. The fields of TRL
    and async_rlhf are in no section; what they have in common does not say which class they are of.

    Args:
        given: the content of the file.
        cls: the class of its fields, such as ``DPOConfig``.

    Raises:
        ConfigError: there is no such class, no class has these fields, or several have.
    """
    if "method" in given and {"model", "train", "tokenizer"} & given.keys():
        return "trlx", dict(given)
    if "sample" in given or {"pretrained", "train"} <= given.keys():
        return "ddpo_pytorch", dict(given)
    if "distributed_type" in given or "compute_environment" in given:
        return "accelerate", dict(given)
    without_adapter = [each for each in FRAMEWORKS if not framework(each).adapter]
    classes = {known: each for each in without_adapter for known in getattr(framework(each).functions, "METHODS", {})}
    if cls and cls not in classes:
        raise ConfigError(f"given the class {cls!r}{suggest(cls, classes)}; known are {', '.join(classes)}")
    names = [cls] if cls else _candidates(given, classes)
    if len(names) != 1:
        known = ", ".join(names or classes)
        raise ConfigError(
            "the file should have the sections of trlX (method, model, train) or ddpo-pytorch (sample, train), "
            "distributed_type of accelerate, or the fields of one class of TRL or async_rlhf; given "
            f"{', '.join(given)}; name the class by --config-class, which may be {known}"
        )
    about = framework(classes[names[0]])
    sections: dict[str, Any] = {names[0]: {}}
    for field, value in given.items():
        sections.setdefault(_home(field, names[0], about), {})[field] = value
    return classes[names[0]], sections


def _candidates(given: Mapping[str, Any], classes: Mapping[str, str]) -> list[str]:
    """Return the classes that have most of the fields, with those that are configured together with them."""

    def known(cls: str) -> int:
        about = framework(classes[cls])
        return sum(f"{_home(field, cls, about)}.{field}" in about.settings for field in given)

    most = max(map(known, classes), default=0)
    return [cls for cls in classes if most and known(cls) == most]


def _home(field: str, cls: str, about: Framework) -> str:
    """Return the class that has a field: the given one, or one that belongs to no algorithm."""
    shared = {path.partition(".")[0] for path in about.settings} - {*about.functions.METHODS}
    return next((each for each in (cls, *sorted(shared)) if f"{each}.{field}" in about.settings), cls)
