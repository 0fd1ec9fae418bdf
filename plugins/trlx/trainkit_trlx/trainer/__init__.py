"""The registry of trainers."""

from __future__ import annotations

import sys
from typing import Any

from trainkit import BaseRLTrainer

_TRAINERS: dict[str, Any] = {}

__all__ = ["BaseRLTrainer", "register_trainer"]


def register_trainer(name: Any) -> Any:
    """Register a trainer under its lower-case class name, or under a given name: ``@register_trainer("Name")``."""

    def register(cls: Any, key: str) -> Any:
        _TRAINERS[key.lower()] = cls
        setattr(sys.modules[__name__], key.lower(), cls)
        return cls

    return (lambda cls: register(cls, name)) if isinstance(name, str) else register(name, name.__name__)


register_trainer(BaseRLTrainer)
