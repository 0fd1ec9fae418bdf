"""Best-of-n sampling: of n responses to a prompt, those with the highest scores."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from trainkit_migrate import refusing
from trainkit_trl.core import set_seed
from trainkit_trl.models import SUPPORTED_ARCHITECTURES
from trainkit_trl.overriding import Advised


class BestOfNSampler(Advised):
    """Samples several responses to each prompt, and returns those with the highest scores.

    Args:
        model: a model with a value head.
        tokenizer: the tokenizer.
        queries_to_scores: returns a score for each text, prompt and response together.
        length_sampler: returns the longest response to a prompt.
        sample_size: the number n of responses to a prompt.
        seed: seeds all random numbers, if given.
        n_candidates: how many are returned.
        generation_config: that of ``generate``.

    Raises:
        ValueError: the tokenizer or the model is of another type, or there are more candidates than responses.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        queries_to_scores: Callable[[list[str]], list[float]],
        length_sampler: Callable[[], int],
        sample_size: int = 4,
        seed: int | None = None,
        n_candidates: int = 1,
        generation_config: Any = None,
    ) -> None:
        if seed is not None:
            set_seed(seed)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"tokenizer should be a tokenizer of transformers; given {type(tokenizer).__name__}")
        if not isinstance(model, SUPPORTED_ARCHITECTURES):
            names = " or ".join(each.__name__ for each in SUPPORTED_ARCHITECTURES)
            raise ValueError(f"model should be an {names}; given {type(model).__name__}")
        if n_candidates > sample_size:
            raise ValueError(f"n_candidates is {n_candidates}, and sample_size {sample_size}; lower n_candidates")
        self.model, self.tokenizer, self.queries_to_scores = model, tokenizer, queries_to_scores
        self.length_sampler, self.gen_config = length_sampler, generation_config
        self.sample_size, self.n_candidates = sample_size, n_candidates

    def generate(
        self,
        tokenized_query: list[int] | Tensor | list[Tensor] | list[list[int]],
        skip_special_tokens: bool = True,
        device: str | torch.device | None = None,
        **generation_kwargs: Any,
    ) -> list[list[str]]:
        """Return the ``n_candidates`` best texts, prompt and response, of each prompt, the best first.

        Args:
            tokenized_query: token ids of a prompt, or of several.
            skip_special_tokens: whether special tokens are removed from the texts.
            device: where the prompts are put.
            **generation_kwargs: arguments of ``generate``.
        """
        several = len(tokenized_query) > 0 and not isinstance(tokenized_query[0], int)
        several = several and not (isinstance(tokenized_query, Tensor) and tokenized_query.dim() == 1)
        prompts: Any = tokenized_query if several else [tokenized_query]
        best = []
        for prompt in prompts:
            ids = torch.as_tensor(prompt).reshape(1, -1).repeat(self.sample_size, 1).to(device)
            config = GenerationConfig() if self.gen_config is None else copy.deepcopy(self.gen_config)
            given = {"pad_token_id": config.pad_token_id or self.tokenizer.pad_token_id, **generation_kwargs}
            config.update(max_new_tokens=self.length_sampler(), **given)
            with torch.no_grad():
                written = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            texts = self.tokenizer.batch_decode(written, skip_special_tokens=skip_special_tokens)
            scores = torch.as_tensor(self.queries_to_scores(texts), dtype=torch.float64)
            best.append([texts[index] for index in scores.topk(self.n_candidates).indices])
        return best


__getattr__ = refusing(__name__)
