"""Reward models: models that give a text one score, and their use as a reward function."""

from __future__ import annotations

import copy
import json
import logging
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from trainkit.config import ModelConfig
from trainkit.data import PromptEncoder, Sequences
from trainkit.data.batches import pass_cost
from trainkit.data.pipeline import beginning
from trainkit.errors import ConfigError, DataError, describe
from trainkit.functional import at_last
from trainkit.models.adapters import HEADS, MARK, adapter_base, has_adapter
from trainkit.models.images import image_inputs
from trainkit.models.joined import JoinedRows
from trainkit.models.loading import context_length, is_classifier, load_model, load_model_config, pad_id
from trainkit.models.policy import hidden_states, inputs_of, load_heads, needs_mask
from trainkit.models.prompts import SharedPrompts, why_not_joined, why_not_shared, with_ends
from trainkit.models.rope import fix_rope
from trainkit.models.trunk import Trunk, tiny_input
from trainkit.models.unloaded import decided
from trainkit.models.value_head import find_file, saved_heads, state_width
from trainkit.models.virtual import count_of
from trainkit.security import TRUST

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class Scorer(nn.Module):
    """A model that gives each sequence one score, r = wᵀ h_last: ``scorer(sequences) -> [B]``.

    h_last is the hidden state of the last attended token, which is found by the attention mask, not by a token id. The
    model is either a causal language model, to which a linear head is added, or a sequence classifier of transformers
    with one label, whose own head is used. A classifier that does not use the last token (BERT's uses the first) is
    called as it is.

    Args:
        model: the model, trained in place.

    Attributes:
        head: the added head; None for a classifier.
        reads_last: whether the score is that of the last attended token.

    Raises:
        ConfigError: the model is a classifier with several labels, or an encoder-decoder language model.
    """

    one_pass = False
    """Whether each call makes one forward pass, as in `Policy`."""
    can_share_prompts = False
    """Whether `why_not_shared` has found that prompts can be shared."""
    shares_prompts = False
    """Whether the prompt of several rows is run once. It changes results by rounding alone."""
    joins_rows = False
    """Whether rows are run without padding, as in `Policy`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        _check(model)
        self.model = model
        self.head = None if _is_classifier(model) else _new_head(model)
        self.reads_last = self.head is not None or decided(lambda: _reads_last(model), operator.not_)
        self.needs_mask = decided(lambda: needs_mask(model), bool)
        self.trunk = Trunk(model, None if self.reads_last else 0)

    @property
    def has_trunk(self) -> bool:
        """Whether there are frozen lower layers whose output can be computed once and reused."""
        return self.trunk.depth > 0

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the trained modules; frozen lower layers stay in evaluation mode."""
        super().train(mode)
        for module in self.trunk.frozen:
            module.eval()
        return self

    @torch.no_grad()
    def through_trunk(self, sequences: Sequences) -> Sequences:
        """Return the sequences with the output of the frozen trunk; unchanged if there is no trunk."""
        if not self.has_trunk or sequences.trunk is not None:
            return sequences
        return replace(sequences, trunk=self.trunk(self.model.base_model, self._inputs(sequences)))

    def _inputs(self, sequences: Sequences) -> dict[str, Any]:
        images = image_inputs(self.model, sequences.input_ids, sequences.attention_mask, sequences.images)
        return {**inputs_of(sequences, self.needs_mask), **images}

    def forward(self, sequences: Sequences) -> Tensor:
        """Return the scores of the sequences; rows of similar length share a forward pass, as in `Policy`. -> [B]."""
        if not self.reads_last:
            logits = self.model(input_ids=sequences.input_ids, attention_mask=sequences.attention_mask).logits
            return logits.squeeze(-1).float()  # type: ignore[no-any-return]
        head: Any = self.model.score if self.head is None else self.head
        states = self._last_states(sequences, self.shares_prompts)
        with torch.autocast(states.device.type, enabled=False):
            scores: Tensor = head(states.to(next(head.parameters()).dtype))
            return scores.float().sum(-1)  # of one number; FSDP2 warns of outputs that are views

    def _last_states(self, sequences: Sequences, shared: bool) -> Tensor:
        """Return the hidden states of the last tokens [B, D]; with ``shared``, a prompt of several rows is run once."""
        cost = None if self.one_pass else pass_cost(self.model, sequences.input_ids.device)
        if not self.joins_rows and (not shared or sequences.trunk is not None):
            buckets = [] if cost is None else sequences.buckets(cost)
            if len(buckets) <= 1:
                return self._separate(sequences)
            states = torch.cat([self._separate(sequences.select(rows)) for rows in buckets])
            return states[torch.cat(buckets).argsort()]
        wider, ends = with_ends(sequences)
        if self.joins_rows:
            rows, trunk = JoinedRows.of_rows(wider, shared=shared, chosen=ends), sequences.trunk
            with self.trunk.known(None if trunk is None else trunk[rows.places].unsqueeze(0)):
                return hidden_states(self.model, rows.inputs())[0, rows.read]
        parts = SharedPrompts.of_rows(wider, ends)
        (states,) = parts.run(
            lambda inputs: (hidden_states(self.model, inputs),), cost, partial(image_inputs, self.model)
        )
        return states[parts.chosen]

    def _separate(self, sequences: Sequences) -> Tensor:
        """Return the hidden states of the last tokens [B, D], from one pass over whole rows."""
        with self.trunk.known(sequences.trunk):
            return at_last(hidden_states(self.model, self._inputs(sequences)), sequences.attention_mask)

    def why_not_shared(self) -> str | None:
        """Return why the prompts of rows cannot be shared with this model; None if they can."""
        stored = "the output of frozen layers is stored for whole rows" if self.has_trunk else None
        return self._keeps_rows() or stored or why_not_shared(self.model, self._last_states)

    def why_not_joined(self) -> str | None:
        """Return why the rows of this model cannot be joined; None if they can."""

        def states(rows: Sequences, shared: bool | None) -> Tensor:
            before, self.joins_rows = self.joins_rows, shared is not None
            try:
                return self._last_states(rows, bool(shared))
            finally:
                self.joins_rows = before

        return self._keeps_rows() or why_not_joined(self.model, states)

    def _keeps_rows(self) -> str | None:
        """Return why the states of whole rows [B, T] are needed; None if they are not."""
        return None if self.reads_last else f"{type(self.model).__name__} does not read its score from the last token"


def _check(model: PreTrainedModel) -> None:
    if _is_classifier(model):
        labels, fault = model.config.num_labels, "a reward is one number; give a classifier with num_labels 1"
        if labels != 1:
            raise ConfigError(f"{type(model).__name__} has {labels} labels, and {fault}, or write a reward function")
    elif model.config.is_encoder_decoder:
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder, which cannot be a reward model; give a causal language "
            "model or a sequence classifier"
        )


def _is_classifier(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def _new_head(model: PreTrainedModel) -> nn.Linear:
    """Create a linear head with small random weights (Stiennon et al. 2020) on the model's device."""
    width = state_width(model.config)
    head = nn.Linear(width, 1, bias=False)
    nn.init.normal_(head.weight, std=(width + 1) ** -0.5)
    words, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if words is not None and words.weight is not embeddings.weight:
        words.requires_grad_(False)  # scores do not depend on the language-model head
    return head.to(model.device)


@torch.no_grad()
def _reads_last(classifier: PreTrainedModel) -> bool:
    """Return whether a classifier's output is its ``score`` layer applied to the state of the last token."""
    if not hasattr(classifier, "score"):
        return False
    training, probe = classifier.training, tiny_input(classifier)
    classifier.eval()
    expected = classifier(**probe).logits
    hidden = classifier.base_model(**probe).last_hidden_state
    classifier.train(training)
    score: Any = classifier.score
    return torch.allclose(score(hidden)[:, -1].float(), expected.float(), rtol=1e-4, atol=1e-4)


class RewardModel:
    """A model as a reward function: ``trainkit.train(reward_fn=RewardModel.from_pretrained(path), prompts=...)``.

    Prompt and output are read as one text that ends in EOS, as in reward training; or as two turns of a chat, in the
    tokenizer's chat template. The reward model has its own tokenizer, so the policy's may differ. Texts that are too
    long are truncated at the beginning, and `truncated` counts them. No gradients are computed, and the scores are in
    the order of the texts.

    Args:
        scorer: the model that scores sequences.
        tokenizer: the scorer's tokenizer.
        chat: whether to apply the tokenizer's chat template.
        batch_size: the number of texts per forward pass.
        max_length: the maximum number of tokens of a text, which the context of model and tokenizer limits further.
        device: the model's device; by default this process's GPU, or the CPU if there is none.
    """

    truncated: int
    """The number of texts that have been truncated so far."""

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: bool = False,
        batch_size: int = 32,
        max_length: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if chat and not tokenizer.chat_template:
            raise ConfigError("chat is True, but the tokenizer has no chat template; give chat=False")
        self.scorer = scorer.to(device or _default_device()).eval()
        self.tokenizer, self.chat, self.batch_size = tokenizer, chat, batch_size
        virtual, context = count_of(scorer.model), context_length(scorer.model.config)
        limits = (max_length, context and context - virtual, tokenizer.model_max_length)
        self.limit = min(limit for limit in limits if limit is not None)
        fix_rope(scorer.model, self.limit + virtual, "max_length")
        self.truncated = 0
        self._encoder = PromptEncoder(tokenizer, None)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel | Scorer,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        chat: bool | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Self:
        """Load the reward model at a path, or create one from a live model.

        Args:
            model: an export of reward training (also of an adapter), the directory or hub id of any sequence
                classifier with one label, or a live model or scorer.
            tokenizer: the tokenizer; by default the one saved with the model. Required with a live model.
            chat: as for the class. By default False for models that trainkit trained on plain texts; for other models
                True if the tokenizer has a chat template.
            dtype: the type of the weights, of a model that is loaded.
            trust_remote_code: whether Python code that comes with the model may run.
            **options: further arguments of the class.

        Raises:
            ConfigError: there is no such model, it gives no score, or it has no tokenizer.
        """
        if isinstance(model, str | Path):
            code = {TRUST: trust_remote_code}
            tokenizer = _checked_tokenizer(str(model), tokenizer, code)
            scorer = load_scorer(ModelConfig(model_path=str(model), dtype=dtype, kwargs=code))
            if scorer.head is not None and "head.weight" not in saved_heads(str(model), {}):
                raise ConfigError(
                    f"{str(model)!r} is a language model without a head for scores; give an export of reward training "
                    "or a sequence classifier with one label"
                )
        else:
            scorer = model if isinstance(model, Scorer) else Scorer(model)
        if tokenizer is None:
            raise ConfigError("a live reward model is given without a tokenizer; pass its tokenizer as tokenizer=")
        if chat is None:
            chat = bool(tokenizer.chat_template) and not _trained_here(model)
        return cls(scorer, tokenizer, chat=chat, **options)

    def __call__(
        self,
        samples: Sequence[str] | None = None,
        prompts: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        **_: Any,
    ) -> list[float]:
        """Return a score for each text.

        Args:
            samples: the texts; ignored if `chat` is set.
            prompts: their beginnings, used if `chat` is set or without ``samples``.
            outputs: one continuation per prompt.

        Raises:
            DataError: neither ``samples`` nor both of the others are given, something is not a list of strings, or
                the numbers of prompts and outputs differ.
        """
        rows = [self._fit(ids) for ids in self._encode(samples, prompts, outputs)]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        scores = [0.0] * len(rows)
        self.scorer.eval()
        for start in range(0, len(rows), self.batch_size):
            part = order[start : start + self.batch_size]
            for index, score in zip(part, self._score([rows[index] for index in part]), strict=True):
                scores[index] = score
        return scores

    def save_pretrained(self, directory: str | Path) -> Path:
        """Save the model for `from_pretrained`, and as a sequence classifier if transformers has one for it.

        ``AutoModelForSequenceClassification`` finds the last token of a text by the id of the padding token, so it
        gives the same scores only if no text contains that token. Where the padding token is EOS, which ends every
        text, no padding token is saved in the config; transformers then accepts one text at a time.

        Args:
            directory: created if it does not exist.

        Returns:
            The directory.

        Raises:
            ConfigError: the model has an adapter. `from_pretrained` merges the adapter of the trainer's export.
        """
        path = Path(directory)
        if has_adapter(self.scorer.model):
            raise ConfigError("the reward model has an adapter; load the trainer's export of it, and save that")
        classifier = self.scorer.model if self.scorer.head is None else _as_classifier(self.scorer)
        if classifier is not None and self.scorer.reads_last:
            name_padding(classifier.config, self.tokenizer)
        (classifier or self.scorer.model).save_pretrained(path)
        if classifier is None and self.scorer.head is not None:
            save_file({"head.weight": self.scorer.head.weight.detach().contiguous()}, path / HEADS)
        self.tokenizer.save_pretrained(path)
        (path / MARK).write_text(json.dumps({"method": "reward", "chat": self.chat}), encoding="utf-8")
        return path

    def _encode(
        self, samples: Sequence[str] | None, prompts: Sequence[str] | None, outputs: Sequence[str] | None
    ) -> list[list[int]]:
        """Return the token ids of the texts, not truncated."""
        if samples is not None and not self.chat:
            return [self._encode_text(text) for text in _texts("samples", samples)]
        if prompts is None or outputs is None:
            raise DataError(
                "a reward model with chat=True reads prompts and outputs; give both"
                if self.chat
                else "a reward model reads samples, or prompts and outputs; give samples, or both of the others"
            )
        prompts, outputs = _texts("prompts", prompts), _texts("outputs", outputs)
        if len(prompts) != len(outputs):
            raise DataError(f"there are {len(prompts)} prompts and {len(outputs)} outputs; give one output per prompt")
        turns = zip(prompts, outputs, strict=True)
        return [self._encode_chat(*each) if self.chat else self._encode_text("".join(each)) for each in turns]

    def _encode_text(self, text: str) -> list[int]:
        ids, eos = self._encoder(text) if text else [], self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    def _encode_chat(self, prompt: str, output: str) -> list[int]:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _fit(self, ids: list[int]) -> list[int]:
        if len(ids) <= self.limit:
            return ids
        if not self.truncated:
            log.warning("a text of %d tokens is truncated to %d, the reward model's limit", len(ids), self.limit)
        self.truncated += 1
        scored = 0 if self.scorer.reads_last else 1  # the token whose state an encoder scores
        first = min(max(beginning(self.tokenizer, ids), scored), self.limit - 1)
        return [*ids[:first], *ids[first - self.limit :]]

    @torch.no_grad()
    def _score(self, rows: list[list[int]]) -> list[float]:
        sequences = Sequences.from_lists(rows, [[]] * len(rows), pad_id(self.tokenizer))
        scores: list[float] = self.scorer(sequences.to(self.scorer.model.device)).tolist()
        return scores


def _checked_tokenizer(
    path: str, tokenizer: PreTrainedTokenizerBase | None, code: Mapping[str, bool]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or load the one at ``path``; raise a ConfigError if a model or tokenizer is missing."""
    missing = "model"
    try:
        AutoConfig.from_pretrained(adapter_base(path) or path, **code)
        missing = "tokenizer"
        return tokenizer or AutoTokenizer.from_pretrained(path, **code)
    except (OSError, ValueError, TypeError) as error:
        advice = f"give a hub id or directory with a {missing}" + (", or tokenizer=" if missing == "tokenizer" else "")
        raise ConfigError(f"the {missing} of the reward model {path!r} cannot be loaded: {error}; {advice}") from error


def _texts(name: str, value: Any) -> Sequence[str]:
    """Return the given texts as a list; raise a DataError if they are not strings."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise DataError(f"{name} should be a list of strings; given {describe(value)}")
    texts = list(value)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{name}[{index}] should be a string; given {describe(text)}")
    return texts


def _default_device() -> torch.device:
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )


def load_scorer(config: ModelConfig, model: PreTrainedModel | None = None) -> Scorer:
    """Load the scorer that ``config`` names, or create one from the live ``model``.

    The head is trained, also where an adapter is trained instead of the model's weights.

    Raises:
        ConfigError: as for `load_model` and `Scorer`.
    """
    if config.peft_config is not None and (
        is_classifier(load_model_config(config)) if model is None else _is_classifier(model)
    ):
        saved = {"modules_to_save": ["score", "classifier"], **config.peft_config}
        config = config.model_copy(update={"peft_config": saved})
    return load_heads(Scorer(load_model(config, model)), config.model_path, config.kwargs)


def name_padding(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Write the padding token into the config of a classifier; none if it is EOS, which ends every text.

    transformers takes the last token that is not padding for the end of a text. Return whether that would have been the
    token before EOS.
    """
    text, pad, eos = config.get_text_config(), tokenizer.pad_token_id, tokenizer.eos_token_id
    before = text.pad_token_id
    pad = before if pad is None or pad >= text.vocab_size else pad
    text.pad_token_id = config.pad_token_id = None if pad == eos else pad
    return before is not None and before == eos


def _trained_here(model: Any) -> bool:
    """Return whether trainkit has trained or saved the model to read texts without a chat template."""
    if isinstance(model, Scorer):
        return True
    mark = find_file(str(model), MARK, {}) if isinstance(model, str | Path) else None
    return mark is not None and not json.loads(Path(mark).read_text("utf-8")).get("chat", False)


def _as_classifier(scorer: Scorer) -> PreTrainedModel | None:
    """Return the scorer as a transformers classifier with shared weights; None if its architecture has none."""
    config = copy.deepcopy(scorer.model.config)
    config.num_labels = 1
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if scorer.head is None or kind is None or scorer.model.base_model is scorer.model:
        return None
    with torch.device("meta"):
        classifier: PreTrainedModel = kind(config)
    if type(classifier.base_model) is not type(scorer.model.base_model) or not hasattr(classifier, "score"):
        return None
    setattr(classifier, classifier.base_model_prefix, scorer.model.base_model)
    classifier.score = scorer.head
    return classifier.eval() if _reads_last(classifier) else None
