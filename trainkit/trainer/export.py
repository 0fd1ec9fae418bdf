"""Exports of language models: files that transformers and peft load, and heads in a file of their own."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from trainkit.data import Sequences, save_processor
from trainkit.models import Scorer
from trainkit.models.adapters import BASE, HEADS, has_adapter, save_model
from trainkit.models.images import reads_images
from trainkit.models.loading import auto_class, name_eos
from trainkit.models.reloading import fault_of, has_left_its_path
from trainkit.models.reward import name_padding
from trainkit.models.virtual import virtual_tokens
from trainkit.trainer.models import Models
from trainkit.trainer.text import Text

log = logging.getLogger(__name__)


class Exporter:
    """Writes the trained language model, or scorer, with its tokenizer.

    Args:
        models: the model.
        text: the tokenizer.
        generates: whether the model generates text, and does not score it.
        live: whether the user gave the model as an object, which need not be the one at its path.
    """

    def __init__(self, models: Models, text: Text, *, generates: bool, live: bool) -> None:
        self.models, self.text, self.generates, self.live = models, text, generates, live

    @property
    def _is_classifier(self) -> bool:
        """Whether the model is a classifier of transformers, whose score head is a part of it."""
        policy = self.models.unwrapped
        return isinstance(policy, Scorer) and policy.head is None

    def write(self, building: Path, target: Path) -> None:
        """Write model, tokenizer and heads so that transformers loads the model; with an adapter, only the adapter."""
        policy, tokenizer = self.models.unwrapped, self.text.tokenizer
        model = policy.model
        lacking = name_eos(model, tokenizer)
        # a classifier whose padding token is one by which texts end before their EOS
        renamed = self._is_classifier and policy.reads_last and name_padding(model.config, tokenizer)
        if has_adapter(model) and model.name_or_path and (renamed or (self.live and has_left_its_path(model))):
            log.warning(
                "the model below the adapter is not the one at %s%s; it is saved beside the adapter, in %s",
                model.name_or_path,
                ", whose padding token is EOS, so that transformers would score the token before it" if renamed else "",
                target / BASE,
            )
            model.name_or_path = ""
        save_model(model, building, target)
        if lacking and not any(building.rglob("config.json")):  # an adapter, whose base is elsewhere
            log.warning(
                "%s holds an adapter, and the configuration of its base does not name the tokenizer's EOS: %scall "
                "generate with eos_token_id=%d",
                target,
                "" if virtual_tokens(model) else "merge them (trainkit export), or ",
                tokenizer.eos_token_id,
            )
        save_processor(tokenizer, building)
        tokenizer.save_pretrained(building)
        state = policy.state_dict()
        if heads := {k: v.contiguous() for k, v in state.items() if not k.startswith("model.")}:
            save_file(heads, building / HEADS)

    def fault(self, directory: Path) -> str:
        """Load what `write` wrote, and return how it differs from the trained model; empty if not.

        Of a classifier, the scores are compared with those that training computes.
        """
        policy = self.models.unwrapped
        classifier = partial(_scores, policy) if self._is_classifier else None
        with self.models.as_trained():
            return fault_of(directory, policy.model, classifier, self.text.tokenizer.eos_token_id)

    def card(self) -> dict[str, str]:
        """Return the model card's entries: transformers loads language models and adapters, trainkit the heads."""
        kind = "image-text-to-text" if reads_images(self.text.model_config) else "text-generation"
        task = {"pipeline_tag": kind} if self.generates and not self.text.is_encoder_decoder else {}
        library = "peft" if has_adapter(self.models.unwrapped.model) else "transformers"
        return {"library_name": library, **task, "loading": self._loading()}

    def _loading(self) -> str:
        if not self.generates:
            return "from trainkit.models import RewardModel\n\nreward_fn = RewardModel.from_pretrained(directory)"
        policy, cls = self.models.unwrapped, str(auto_class(self.text.model_config).__name__)
        if reads_images(policy.model.config):  # transformers loads an adapter of it with its base
            return (
                f"from transformers import {cls}, AutoProcessor\n\nmodel = {cls}.from_pretrained(directory)\n"
                "processor = AutoProcessor.from_pretrained(directory)"
            )
        code = (
            f"from transformers import {cls}, AutoTokenizer\n\nmodel = {cls}.from_pretrained(directory)\n"
            "tokenizer = AutoTokenizer.from_pretrained(directory)"
        )
        if has_adapter(policy.model):
            code = code.replace(f"{cls}, ", "").replace(f"{cls}.", f"AutoPeft{cls[4:]}.")
            code = f"from peft import AutoPeft{cls[4:]}\n{code}"
        if getattr(policy, "value_head", None) is None:
            return code
        headed = f"{cls}WithValueHead"
        return (
            f"{code}\n\n# with its value head\nfrom trainkit.models import {headed}\n\n"
            f"critic = {headed}.from_pretrained(directory)"
        )


def _scores(scorer: Scorer, ids: Tensor) -> Tensor:
    """Return the scores of texts as training computes them. [B, T] -> [B]."""
    sequences = Sequences.from_lists(ids.tolist(), [[]] * len(ids), 0)
    scores: Tensor = scorer(sequences.to(ids.device))
    return scores
