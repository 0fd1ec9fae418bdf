"""Values of the YAML files of TRL's command line before 0.9 that trainkit writes differently."""

from __future__ import annotations

from trainkit_migrate.conversions import Context, Settings
from trainkit_migrate.trl1 import filled

METHODS = {"SftScriptArguments": "sft", "DpoScriptArguments": "dpo"}


def implied(config: Settings, context: Context) -> Settings:
    """Return the method, and what TRL does where a field is not given."""
    name = next((METHODS[each] for each in context.given if each in METHODS), "sft")
    usual = {"optimizer.lr": 5e-5, "train.seq_length": 512, "model.disable_dropout": name == "dpo"}
    return filled(name, usual, config, context)
