"""A bandit small enough to enumerate, for which the optimum under a KL penalty is known in closed form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from trainkit.data import Row
from trainkit.rollouts import Environment, Turn
from trainkit.testing import character_tokenizer, tiny_gpt2

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Bandit:
    """One-letter prompts [P], all responses of ``length`` letters [R], and a reward in [0, 1] for each pair [P, R]."""

    length: int = 1
    prompts: str = "abcd"
    seed: int = 0

    @cached_property
    def responses(self) -> list[str]:
        """All responses, in the order of the columns of `rewards`."""
        return ["".join(letters) for letters in product(LETTERS, repeat=self.length)]

    @cached_property
    def rewards(self) -> Tensor:
        """The reward of each pair, float64 [P, R]."""
        shape = (len(self.prompts), len(self.responses))
        return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer with one token per letter."""
        return character_tokenizer(LETTERS)

    def reward(self, prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
        """Return the entries of `rewards`; this is the reward function."""
        at = {response: i for i, response in enumerate(self.responses)}
        return [float(self.rewards[self.prompts.index(p), at[o]]) for p, o in zip(prompts, outputs, strict=True)]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `trainkit.train` besides the configuration; EOS and padding are never sampled."""
        return {
            "model_path": tiny_gpt2(
                len(self.tokenizer), initializer_range=0.2
            ),  # so that the reference prefers something
            "tokenizer": self.tokenizer,
            "reward_fn": self.reward,
            "prompts": list(self.prompts),
            "logit_mask": torch.arange(len(self.tokenizer)) < len(LETTERS),
        }

    @property
    def environment(self) -> Callable[[Row], Environment]:
        """The same task as an environment: an episode of one turn, which pays the entry of `rewards`."""
        bandit = self

        class Pays:
            def __init__(self, row: Row) -> None:
                self.prompt = row["prompt"]

            def step(self, output: str) -> Turn:
                return Turn(reward=bandit.reward([self.prompt], [output])[0], done=True)

        return cast(Callable[[Row], Environment], Pays)

    @torch.no_grad()
    def logprobs(self, model: PreTrainedModel) -> Tensor:
        """Return log π of every response to every prompt, from the model's own logits in float64. -> [P, R]."""
        wide = copy.deepcopy(model).double().eval()
        texts = [prompt + response for prompt in self.prompts for response in self.responses]
        ids = torch.tensor([self.tokenizer(text)["input_ids"] for text in texts], device=model.device)
        letters = wide(ids[:, :-1]).logits[..., : len(LETTERS)].log_softmax(-1)  # [P·R, length, letters]
        chosen = letters.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(1)
        shaped: Tensor = chosen.view(len(self.prompts), len(self.responses)).cpu()
        return shaped

    def divergences(self, model: PreTrainedModel, reference: PreTrainedModel, beta: float) -> tuple[float, float]:
        """Return KL(π‖π*) and KL(π*‖π) in nats, means over prompts, with π* ∝ π_ref · exp(reward / β)."""
        policy = self.logprobs(model)
        optimum = (self.logprobs(reference) + self.rewards / beta).log_softmax(-1)
        forward, backward = policy.exp() * (policy - optimum), optimum.exp() * (optimum - policy)
        return float(forward.sum(-1).mean()), float(backward.sum(-1).mean())
