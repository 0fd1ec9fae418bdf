"""SFT: supervised fine-tuning, which maximises the likelihood of the outputs of samples.

Ouyang et al. 2022, the first of its three steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_sft.config import SFTConfig
    from trainkit_sft.trainer import SFTTrainer, best_fit

__all__ = ["SFTConfig", "SFTTrainer", "best_fit"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
