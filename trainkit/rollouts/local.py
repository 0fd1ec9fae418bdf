"""The engine ``local``: trainkit's own sampler, on the trained model itself."""

from __future__ import annotations

from concurrent.futures import Future

from trainkit.rollouts.engines import Ability, Engine, Request, ServedModel, Weights
from trainkit.rollouts.sampler import Generated


class LocalEngine(Engine):
    """Generates with the trained model itself, by `trainkit.rollouts.sampler`; sampling and training take turns."""

    abilities = frozenset[Ability](("encoder_decoder", "images", "logit_mask", "steer"))
    own_copy = False
    exact = True

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.sampler, self.version = served.sampler(), 0

    def __str__(self) -> str:
        """Return its name."""
        return "'local'"

    def load(self, weights: Weights) -> None:
        """Note the version: the model has the weights already."""
        self.version = weights.version

    def submit(self, request: Request) -> Future[Generated]:
        """Generate now."""
        done: Future[Generated] = Future()
        done.set_result(
            self.sampler.generate(request.queries, request.settings, request.seeds, self.version, images=request.images)
        )
        return done
