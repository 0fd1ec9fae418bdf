"""DPO and its variants: training on pairs of responses, of which one is preferred.

The pairs are those of a dataset (`dpo`), or the best and the worst of K responses sampled from the policy
(`online_dpo`). `best_of_k` trains on the best response alone. `xpo` compares a response with one of the reference,
`spin` a given output with a response. Rafailov et al. 2023 (DPO), Guo et al. 2024 (online), Xie et al. 2024 (XPO), Chen
et al. 2024 (SPIN).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_dpo.config import BestOfKConfig, DPOConfig, OnlineDPOConfig, SPINConfig, XPOConfig
    from trainkit_dpo.losses import kto_pair_losses, robust_loss
    from trainkit_dpo.spin import SPINBatch, SPINTrainer
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
    from trainkit_dpo.xpo import XPOBatch, XPOTrainer, xpo_loss

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
    "SPINBatch",
    "SPINConfig",
    "SPINTrainer",
    "ScoredResponses",
    "XPOBatch",
    "XPOConfig",
    "XPOTrainer",
    "best_and_worst",
    "kto_pair_losses",
    "robust_loss",
    "xpo_loss",
]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "losses", "trainer", "spin", "xpo")
