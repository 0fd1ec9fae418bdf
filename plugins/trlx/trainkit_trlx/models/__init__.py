"""Models, heads and the settings of PPO and ILQL."""

from trainkit_migrate import refusing

__getattr__ = refusing(__name__)
