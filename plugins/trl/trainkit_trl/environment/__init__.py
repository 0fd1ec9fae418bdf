"""Episodes with tools."""

from trainkit_trl.environment.base_environment import TextEnvironment, TextHistory

__all__ = ["TextEnvironment", "TextHistory"]
