"""KTO and BCO: learning from samples that are labelled as desirable or undesirable, without pairs.

Ethayarajh et al. 2024 (KTO), Jung et al. 2024 (BCO).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_kto.bco import BCOTrainer, bco_loss
    from trainkit_kto.config import BCOConfig, KTOConfig
    from trainkit_kto.trainer import KTOBatch, KTOTrainer, LabelledBatch, LabelTrainer, kto_loss

__all__ = [
    "BCOConfig",
    "BCOTrainer",
    "KTOBatch",
    "KTOConfig",
    "KTOTrainer",
    "LabelTrainer",
    "LabelledBatch",
    "bco_loss",
    "kto_loss",
]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer", "bco")
