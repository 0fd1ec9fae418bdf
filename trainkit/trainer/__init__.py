"""The base class of all algorithms, and the training loop."""

from trainkit.runs.progress import Progress
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit.trainer.base import BaseRLTrainer, Verdict
from trainkit.trainer.inputs import TrainerInputs
from trainkit.trainer.loop import AcceleratedLoop
from trainkit.trainer.setup import PreparedTrainer

__all__ = [
    "AccelerateRLTrainer",
    "AcceleratedLoop",
    "BaseRLTrainer",
    "PreparedTrainer",
    "Progress",
    "TrainerInputs",
    "Verdict",
]
