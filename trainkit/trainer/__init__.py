"""The base class of all algorithms, and the training loop."""

from trainkit.runs.progress import Progress
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit.trainer.base import BaseRLTrainer, Verdict
from trainkit.trainer.collect import Collector
from trainkit.trainer.loop import AcceleratedLoop

__all__ = [
    "AccelerateRLTrainer",
    "AcceleratedLoop",
    "BaseRLTrainer",
    "Collector",
    "Progress",
    "Verdict",
]
