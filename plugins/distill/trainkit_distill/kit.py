"""What the conformance kit needs to know about distillation: a teacher, and what the settings do."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from trainkit.testing import Effect, Structure, tiny_gpt2

MIXED = {"method.divergence": "jensen_shannon"}


@torch.no_grad()
def loss_of_the_teacher_itself(trainer: Any) -> float:
    """Return the loss of a policy that equals its teacher."""
    trainer.unwrapped.load_state_dict(trainer.reference.policy.state_dict())
    return float(trainer.loss(trainer.store.experience.to(trainer.accelerator.device))[0])


EFFECTS: dict[str, Effect | list[Effect]] = {
    "divergence": [
        Effect("loss", rises=("jensen_shannon", "reverse")),
        Effect("loss", rises=("jensen_shannon", "forward")),
        Effect(loss_of_the_teacher_itself, equals={"reverse": 0.0, "forward": 0.0, "jensen_shannon": 0.0}),
    ],
    "beta": [Effect("loss", falls=(0.5, 0.9, 0.99), under=MIXED), Effect("loss", falls=(0.5, 0.1, 0.01), under=MIXED)],
    "reward_coef": Effect("size of advantages", rises=(0.5, 1.0, 2.0)),
}
OF_DIVERGENCE = Structure(surrogate="none", detached=())
REWARDED = Structure(scores="collection", detached=(), under={"method.reward_coef": 1.0})


class Declared:
    """The declarations of both trainers."""

    method_class: ClassVar[Any]

    @classmethod
    def tiny_arguments(cls) -> dict[str, Any]:
        """Return a teacher for the tests, which have 10 tokens; its weights are larger than the policy's."""
        return {"config": {"model": {"reference_path": tiny_gpt2(10, initializer_range=0.5)}}}

    @classmethod
    def tiny_variants(cls) -> dict[str, dict[str, Any]]:
        """Return distillation with rewards, if the trainer has any."""
        rewarded = "reward_coef" in cls.method_class.model_fields
        return {"rewards": {"method.reward_coef": 10.0}} if rewarded else {}

    @classmethod
    def tiny_contexts(cls) -> dict[str, dict[str, Any]]:
        """Return the settings under which `beta` may be set."""
        return {"beta": MIXED}

    @classmethod
    def tiny_effects(cls) -> dict[str, Any]:
        """Return what each setting does."""
        return {name: effect for name, effect in EFFECTS.items() if name in cls.method_class.model_fields}

    @classmethod
    def tiny_structure(cls) -> tuple[Structure, ...]:
        """Return the structure: rewards, where there are any, are compared with those of the whole collection."""
        return (OF_DIVERGENCE, *([REWARDED] if "reward_coef" in cls.method_class.model_fields else []))
