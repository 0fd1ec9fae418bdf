"""Best-of-n sampling."""

from trainkit_trl.extras.best_of_n_sampler import BestOfNSampler

__all__ = ["BestOfNSampler"]
