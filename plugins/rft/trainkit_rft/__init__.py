"""RFT: sample responses, keep the best to each prompt and fine-tune on them, with thresholds that rise.

Dong et al. 2023 (RAFT); Gulcehre et al. 2023 (ReST: thresholds that rise between two rounds of sampling)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_rft.config import RFTConfig
    from trainkit_rft.trainer import RFTRows, RFTTrainer, epoch, place, select, share, written

__all__ = ["RFTConfig", "RFTRows", "RFTTrainer", "epoch", "place", "select", "share", "written"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
