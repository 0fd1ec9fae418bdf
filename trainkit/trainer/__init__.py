"""The contract, the loop, and the names of trainers."""

from trainkit.registry import available_trainers, get_trainer, register_trainer
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit.trainer.base import BaseRLTrainer

__all__ = ["AccelerateRLTrainer", "BaseRLTrainer", "available_trainers", "get_trainer", "register_trainer"]
