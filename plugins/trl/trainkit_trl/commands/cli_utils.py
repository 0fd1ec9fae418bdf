"""The command lines of TRL's scripts: their arguments, and a parser that also reads a YAML file."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from trainkit.errors import ConfigError
from trainkit_migrate import refusing
from trainkit_trl.arguments import checked
from trainkit_trl.overriding import Advised


def init_zero_verbose() -> None:
    """Log errors alone, and warnings as log records."""
    logging.basicConfig(format="%(message)s", datefmt="[%X]", level=logging.ERROR)
    logging.captureWarnings(True)
    warnings.simplefilter("default")


@checked
@dataclass
class SftScriptArguments:
    """Arguments of TRL's script for SFT."""

    dataset_name: str = "timdettmers/openassistant-guanaco"
    dataset_text_field: str | None = None
    dataset_train_name: str = "train"
    dataset_test_name: str = "test"
    max_seq_length: int = 512
    packing: bool = False
    config: str | None = None
    gradient_checkpointing_use_reentrant: bool = False


@checked
@dataclass
class DpoScriptArguments:
    """Arguments of TRL's script for DPO."""

    dataset_name: str | None = None
    beta: float = 0.1
    max_length: int = 512
    max_prompt_length: int = 128
    max_target_length: int = 128
    sanity_check: bool = False
    ignore_bias_buffers: bool = False
    generate_during_eval: bool = False
    config: str | None = None
    gradient_checkpointing_use_reentrant: bool = False


class TrlParser(Advised, HfArgumentParser):
    """Reads dataclasses from the command line, and what is not given there from the YAML file of ``--config``.

    ``env`` in the file is a mapping of environment variables, which are set.

    Args:
        parsers: the dataclasses.
    """

    def __init__(self, parsers: Any) -> None:
        super().__init__(parsers)
        classes: Iterable[Any] = parsers if isinstance(parsers, Iterable) else [parsers]
        if not any(each.name == "config" for cls in classes for each in fields(cls)):
            self.add_argument("--config")

    def parse_args_and_config(self, args: Sequence[str] | None = None) -> tuple[Any, ...]:
        """Return the dataclasses with their values.

        Args:
            args: the words of the command; None: those of this process.

        Raises:
            ConfigError: the file has a key that is no argument, or is no mapping.
        """
        given = list(sys.argv[1:] if args is None else args)
        at = given.index("--config") + 1 if "--config" in given else len(given)
        if at < len(given):
            self._read(given[at])
        found = self.parse_args_into_dataclasses(given)
        names = {each.name for cls in self.dataclass_types for each in fields(cls)}
        return found if "config" in names else found[:-1]  # what no dataclass has comes last

    def _read(self, file: str) -> None:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
        if not isinstance(content, dict):
            raise ConfigError(f"{file} should be a mapping of arguments to values; given {type(content).__name__}")
        for name, value in (content.pop("env", None) or {}).items():
            os.environ[name] = str(value)
        actions = {action.dest: action for action in self._actions}
        if unknown := sorted(content.keys() - actions.keys()):
            raise ConfigError(f"{file} has {', '.join(unknown)}; arguments are {', '.join(sorted(actions))}; remove it")
        for name, value in content.items():
            actions[name].required = False
            several = isinstance(value, list | dict | bool)
            self.set_defaults(**{name: value if several or value is None else str(value)})


__getattr__ = refusing(__name__)
