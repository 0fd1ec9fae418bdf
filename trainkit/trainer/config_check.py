"""What a run refuses because of its settings, and of the config of its model, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.config import TRLConfig
from trainkit.errors import ConfigError
from trainkit.models.loading import check_adapter_dropout, check_trainable, count_virtual, load_model_config
from trainkit.plugins import get_trainer
from trainkit.trainer import optim
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit.trainer.base import checked_inputs
from trainkit.trainer.settings import check_distribution, check_length, check_run, check_split

Config = TRLConfig[Any]


def check_config(config: Config) -> None:
    """Check a configuration as the trainer of its algorithm does when it is made, in one process.

    The config of the model is read if it is a local directory, or fields.

    Raises:
        ConfigError: the trainer refuses it; has all reasons.
    """
    cls = get_trainer(config.method.name)
    online = "prompts" in checked_inputs(cls, config.method)
    k = int(getattr(config.method, cls.group)) if cls.group else 1
    checks: list[Callable[[], object]] = [
        lambda: check_split(config, k, 1),
        lambda: check_run(config),
        lambda: optim.check_settings(config),
    ]
    path = config.model.model_path
    if issubclass(cls, AccelerateRLTrainer):
        if online:
            checks.append(lambda: check_distribution(config))
        if path is not None and (not isinstance(path, str) or Path(path).is_dir()):
            checks.append(lambda: _check_model(config, online))
        else:
            checks.append(lambda: check_adapter_dropout(config.model))
    faults = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))


def _check_model(config: Config, online: bool) -> None:
    model_config = load_model_config(config.model)
    check_trainable(config.model, model_config, live=False)
    check_length(config, model_config, count_virtual(config.model), online=online)
