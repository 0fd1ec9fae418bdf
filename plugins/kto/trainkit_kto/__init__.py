"""KTO: learning from samples that are labelled as desirable or undesirable, without pairs (Ethayarajh et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_kto.config import KTOConfig
    from trainkit_kto.trainer import KTOBatch, KTOTrainer, kto_loss

__all__ = ["KTOBatch", "KTOConfig", "KTOTrainer", "kto_loss"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
