"""Second models of a run, frozen: a reference that the user chose, teachers; and what all models of a run share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from trainkit.config import TRLConfig
from trainkit.errors import ConfigError
from trainkit.models import Frozen, Policy, Reference, make_policy
from trainkit.models.loading import check_frozen, check_tokens, count_virtual, load_frozen, load_frozen_config
from trainkit.models.rope import fix_rope
from trainkit.models.stored import store_frozen
from trainkit.rollouts.replica import PRECISIONS
from trainkit.runs.view import RunView
from trainkit.seeding import global_rng
from trainkit.trainer.models import Models
from trainkit.trainer.sharing import PromptSharing
from trainkit.trainer.text import Text


class FrozenModels:
    """Makes the frozen models that an algorithm compares with.

    Args:
        view: the run, whose fingerprint has those of the models.
        models: the policy, and the list of frozen models.
        text: the tokenizer and the limit of lengths, which they have to fit.
        sharing: whether they share prompts.
    """

    def __init__(self, view: RunView, models: Models, text: Text, sharing: PromptSharing) -> None:
        self.view, self.models, self.text, self.sharing = view, models, text, sharing
        self.config: TRLConfig[Any] = view.config

    def add(self, source: Any, key: str) -> Frozen:
        """Check the second model that ``source`` is or names, and return it, to be loaded later.

        Args:
            source: the model, or what names it.
            key: the setting or call that gives it, for error messages.
        """
        check_frozen(self.text.model_config, load_frozen_config(self.config.model, source, key), key, self.text.limit)
        check_tokens(self.text.tokenizer, self.config.model, source, key)
        frozen = Frozen(partial(self._load, source, key, len(self.models.frozen)))
        self.models.frozen.append(frozen)
        if self.models.built:
            frozen.load()  # on all processes together
        return frozen

    def _load(self, source: Any, key: str, index: int) -> Policy:
        trained, parallel = self.models.load_policy(), self.models.parallel
        with global_rng(self.config.train.seed, "frozen", index, device=parallel.device):
            model: Any = load_frozen(self.config.model, source, key)
        moving = {id(parameter) for parameter in trained.parameters() if parameter.requires_grad}
        if any(id(parameter) in moving for parameter in model.parameters()):
            raise ConfigError(
                f"the model of {key} shares weights with the trained model, and would change with it; give a copy"
            )
        if not parallel.sharding.keeps_sharded or self.models.built:  # otherwise, when it is divided
            model.to(parallel.device)
            if not isinstance(source, str | Mapping):
                parallel.make_equal(model)  # any other is equal on all processes
        with torch.autocast(parallel.device.type, enabled=False), self.models.as_trained():
            if isinstance(trained, Policy):
                policy = make_policy(model, temperature=trained.temperature, logit_mask=trained.logit_mask)
                policy.vocabulary = trained.vocabulary
            else:  # of a model that scores text
                policy = make_policy(model)
            policy.row_limit = self.models.row_limit
        self.fix_rope(policy)
        if isinstance(source, str | Mapping):
            self._store(model.requires_grad_(False).eval(), rounds=True)
        self.view.run.resumption.check_frozen_models(policy)
        self.sharing.prepare(policy)
        return policy

    def copy(self, policy: Any) -> Reference:
        """Return a frozen copy of the policy as it is now; parameters that are not trained are shared with it."""
        reference = Reference(policy)
        self._store(reference.policy.model, beside=policy, rounds=True)
        return reference

    def store_trained(self, policy: Any) -> None:
        """Keep the frozen weights of the policy itself in 16 bits, if that changes none."""
        path = self.config.model.model_path if self.view.live_model is None else None
        if isinstance(path, str) and self.text.model_config.dtype == self._precision:
            self._store(policy.model)

    def _store(self, model: Any, **given: Any) -> None:
        if self._precision is not None:
            store_frozen(model, self._precision, **given)

    @property
    def _precision(self) -> torch.dtype | None:
        """The precision of the run in 16 bits."""
        return PRECISIONS.get(self.models.parallel.accelerator.mixed_precision)

    def fix_rope(self, policy: Any) -> None:
        """Let the numbers of a row not depend on its neighbours' lengths."""
        if self.text.limit is not None:
            fix_rope(policy, self.text.limit + count_virtual(self.config.model, self.view.live_model))
