"""What the conformance kit needs to know about distillation: a teacher, and what the settings do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure, tiny_gpt2

MIXED = {"method.divergence": "jensen_shannon"}


@torch.no_grad()
def loss_of_the_teacher_itself(trainer: Any) -> float:
    """Return the loss of a policy that equals its teacher."""
    trainer.unwrapped.load_state_dict(trainer.reference.policy.state_dict())
    return float(trainer.loss(trainer.store.experience.to(trainer.accelerator.device))[0])


@torch.no_grad()
def loss_by_its_formula(trainer: Any) -> float:
    """Return the loss divided by the mean of β KL(teacher‖m) + (1 − β) KL(π‖m), m = β teacher + (1 − β) π."""
    batch, beta = trainer.store.experience.to(trainer.accelerator.device), trainer.method.beta
    loss, x = trainer.loss(batch)[0], batch.sequences
    logits = [
        model(input_ids=x.input_ids, attention_mask=x.attention_mask).logits[:, :-1][x.response_mask[:, 1:]]
        for model in (trainer.unwrapped.model, trainer.reference.policy.model)
    ]
    policy, teacher = (each.double().softmax(-1) for each in logits)
    mixture = beta * teacher + (1 - beta) * policy
    parts = (weight * p * (p / mixture).log() for weight, p in ((beta, teacher), (1 - beta, policy)))
    return float(loss / sum(part.sum(-1).mean() for part in parts))


EFFECTS: dict[str, Effect | list[Effect]] = {
    "divergence": [
        Effect("loss", rises=("jensen_shannon", "reverse")),
        Effect("loss", rises=("jensen_shannon", "forward")),
        Effect(loss_of_the_teacher_itself, equals={"reverse": 0.0, "forward": 0.0, "jensen_shannon": 0.0}),
    ],
    "beta": Effect(loss_by_its_formula, equals={0.1: 1.0, 0.5: 1.0, 0.8: 1.0}, under=MIXED),
    "reward_coef": Effect("size of advantages", proportional=(0.5, 1.0, 2.0)),
}
OF_DIVERGENCE = Structure(surrogate="none", detached=())
REWARDED = Structure(scores="collection", detached=(), under={"method.reward_coef": 1.0})
# the tests have 10 tokens; the weights of the teacher are larger than the policy's
TEACHER = {"config": {"model": {"reference_path": tiny_gpt2(10, initializer_range=0.5)}}}
OFFLINE = Declaration(
    arguments=TEACHER,
    contexts={"beta": MIXED},
    effects={name: EFFECTS[name] for name in ("divergence", "beta")},
    structure=(OF_DIVERGENCE,),
)
KIT = {
    "DistillTrainer": replace(
        OFFLINE,
        variants={"rewards": {"method.reward_coef": 10.0}},
        effects=EFFECTS,
        structure=(OF_DIVERGENCE, REWARDED),
    ),
    "DistillOfflineTrainer": OFFLINE,
}
