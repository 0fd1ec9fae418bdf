"""Best-of-n sampling."""

from trainkit_migrate import refusing
from trainkit_trl.extras.best_of_n_sampler import BestOfNSampler

__all__ = ["BestOfNSampler"]

__getattr__ = refusing(__name__)
