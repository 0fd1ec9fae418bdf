"""The public names of trlX: ``import trainkit_trlx as trlx``, and modules of the same paths.

Configurations are those of trlX and are translated; everything that computes is trainkit's.
"""

from trainkit_migrate import refuse_modules, refusing
from trainkit_trlx.trlx import train
from trainkit_trlx.utils import logging

__all__ = ["logging", "train"]

refuse_modules(__name__)
__getattr__ = refusing(__name__)
