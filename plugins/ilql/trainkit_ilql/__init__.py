"""ILQL: implicit language Q-learning, offline from samples with rewards.

Snell et al. 2022 (the algorithm), Kostrikov et al. 2021 (implicit Q-learning); the formulas are those of trlX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_ilql.config import ILQLConfig, ILQLSampling
    from trainkit_ilql.trainer import (
        ILQLBatch,
        ILQLHeads,
        ILQLTrainer,
        QHead,
        awac_weights,
        expectile_loss,
        ilql_losses,
        next_values,
    )

__all__ = [
    "ILQLBatch",
    "ILQLConfig",
    "ILQLHeads",
    "ILQLSampling",
    "ILQLTrainer",
    "QHead",
    "awac_weights",
    "expectile_loss",
    "ilql_losses",
    "next_values",
]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
