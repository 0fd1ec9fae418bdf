"""DPO and its variants: training on pairs of responses, of which one is preferred.

The pairs are those of a dataset (`dpo`), or the best and the worst of K responses sampled from the policy
(`online_dpo`). `best_of_k` trains on the best response alone. Rafailov et al. 2023 (DPO), Guo et al. 2024 (online).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_dpo.config import BestOfKConfig, DPOConfig, OnlineDPOConfig
    from trainkit_dpo.losses import kto_pair_losses, robust_loss
    from trainkit_dpo.trainer import (
        BestOfKTrainer,
        BestResponses,
        DPOBatch,
        DPOTrainer,
        OnlineDPOTrainer,
        PairTrainer,
        ScoredResponses,
        best_and_worst,
    )

__all__ = [
    "BestOfKConfig",
    "BestOfKTrainer",
    "BestResponses",
    "DPOBatch",
    "DPOConfig",
    "DPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PairTrainer",
    "ScoredResponses",
    "best_and_worst",
    "kto_pair_losses",
    "robust_loss",
]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "losses", "trainer")
