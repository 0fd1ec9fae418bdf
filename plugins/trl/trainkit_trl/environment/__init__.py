"""Episodes with tools."""

from trainkit_migrate import refusing
from trainkit_trl.environment.base_environment import TextEnvironment, TextHistory

__all__ = ["TextEnvironment", "TextHistory"]

__getattr__ = refusing(__name__)
