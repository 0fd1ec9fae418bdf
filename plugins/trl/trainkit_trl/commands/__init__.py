"""What scripts of TRL 0.8 import from `trl.commands`."""

from trainkit_migrate import refusing
from trainkit_trl.commands.cli_utils import DpoScriptArguments, SftScriptArguments, TrlParser, init_zero_verbose

__all__ = ["DpoScriptArguments", "SftScriptArguments", "TrlParser", "init_zero_verbose"]

__getattr__ = refusing(__name__)
