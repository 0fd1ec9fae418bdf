"""Checks of the policy: which distribution is sampled, compared and trained, and on which tokens."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from trainkit.data import Sequences
from trainkit.models.trunk import tiny_input
from trainkit.testing import EOS, PAD, character_tokenizer, tiny_gpt2, tiny_t5
from trainkit.testing.trainers import LETTERS
from trainkit_kit.checking import check
from trainkit_kit.checks.tools import (
    Ids,
    Logged,
    for_loss,
    gradient,
    ids_of,
    push_away,
    readings,
    require_close,
    require_same_weights,
    sequences_in,
    weighted,
    weights,
)
from trainkit_kit.checks.traces import printed
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench, Subject

VOCABULARY = len(LETTERS) + 2
DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
SHARP = {"initializer_range": 0.2}
"""Weights with which some tokens are much likelier than others, so that distributions differ clearly."""
LORA = {"r": 4, "target_modules": "all-linear"}


def samples_text(subject: Subject) -> bool:
    """Return whether the subject learns from text that it samples."""
    return subject.samples_text


def compares(subject: Subject) -> bool:
    """Return whether the subject compares a policy over tokens with a reference."""
    return subject.writes_text and subject.needs_reference


def has_a_first_ratio(subject: Subject) -> bool:
    """Return whether the subject compares its policy with the sampling policy, or with a reference that equals it."""
    return subject.samples_text or (compares(subject) and not subject.chooses_reference)


# ------------------------------------------------------------------------------------------------- one distribution


@check(where=has_a_first_ratio)
def first_update(bench: Bench) -> None:
    """Check that before the first update the divergence from the reference is 0 and the importance ratio is 1.

    Any difference between the sampling policy, the trained policy and the reference, e.g. in temperature, dropout or
    number of layers, is otherwise learnt from as if the policy had changed. The check configures
    dropout and a temperature other than 1. The divergence from a reference that the settings name is not checked.

    Causes: old log-probabilities of the sampler at another temperature, or in lower precision; `get_arch` without
    `temperature=config.rollout.temperature`; dropout that is on in one of the passes.
    """
    require_one_policy(bench, model=tiny_gpt2(VOCABULARY, **SHARP, **DROPOUT), rollout__temperature=0.7)


def require_one_policy(bench: Bench, **changes: Any) -> None:
    """Fail unless policy, behaviour and reference agree before the first update, and so do the logged metrics."""
    trainer, start = bench.collected(**changes), not bench.subject.chooses_reference
    if start and bench.subject.needs_reference:
        trainer.policy.train()
        for reading in readings(trainer, trainer.store.experience):
            with torch.no_grad():
                own, other = (each(reading.sequences).logprobs for each in (trainer.policy, trainer.reference))
            require_close(own, other, "log-probabilities of policy and reference", rtol=0, atol=0)
    logged = Logged()
    bench.learnt(callbacks=[logged], **changes, train__total_steps=1)
    _require_unmoved(logged.steps[1], from_start=start)
    sampling = bench.collected(**changes, model__disable_dropout=False)  # sampling disables dropout nevertheless
    recorded = {name: value for name, value in sampling.recorder.pending.items() if name.startswith("policy/kl")}
    _require_unmoved({name: float(value.compute()) for name, value in recorded.items()}, from_start=start)


def _require_unmoved(metrics: dict[str, float], *, from_start: bool) -> None:
    """Fail unless the divergence is exactly 0, and what the loss computes with a gradient is within rounding."""
    still = {"policy/approx_kl": (0.0, 1e-6), "policy/ratio": (1.0, 1e-6)}
    if from_start:
        still |= {"policy/kl": (0.0, 0.0), "policy/kl_per_token": (0.0, 1e-6)}
    for name in still.keys() & metrics.keys():
        at, rounding = still[name]
        seen = f"{name} is {metrics[name]:.7g} before the first update, and should be {at:g}"
        require(abs(metrics[name] - at) <= rounding, seen)


@check(where=samples_text)
def sampling_distribution(bench: Bench) -> None:
    """Check that sampler, policy and reference have one distribution, with sampling temperature and logit mask.

    Importance ratios between two temperatures, or over tokens that cannot be sampled, are learnt from as if the policy
    had changed. Truncation by top-k and top-p is not part of that distribution.

    Causes: `get_arch` that passes no temperature or no logit mask to `make_policy`; a sampler with a copy of the
    weights that updates do not reach.
    """
    letters = torch.arange(VOCABULARY) < len(LETTERS)
    no_repeats = letters.unsqueeze(0) & ~torch.eye(VOCABULARY, dtype=torch.bool)
    bench = bench.in_one_turn()
    for mask in (None, letters, no_repeats):
        trainer = bench.trainer(
            model=tiny_gpt2(VOCABULARY, **SHARP, **DROPOUT),
            model__disable_dropout=False,
            arguments={"logit_mask": mask},
            rollout__temperature=0.7,
            rollout__top_k=4,
            rollout__top_p=0.9,
        )
        _require_one_distribution(
            trainer, mask, with_reference=bench.subject.needs_reference and not bench.subject.chooses_reference
        )
        push_away(trainer.unwrapped.model, by=0.1)  # as updates do; the sampler must follow
        _require_one_distribution(trainer, mask, with_reference=False)


def _require_one_distribution(trainer: Any, mask: Tensor | None, *, with_reference: bool) -> None:
    rollouts = trainer.sample([{"prompt": prompt} for prompt in ("a", "bcd", "ef", "gh")])
    _require_allowed(rollouts.sequences, mask)
    under = "" if mask is None else f" under a logit mask {tuple(mask.shape)}"
    trainer.unwrapped.eval()  # the mode that it should have sampled in
    with torch.no_grad():
        told = {"policy": trainer.policy(rollouts.sequences).logprobs}
        if with_reference:
            told["reference"] = trainer.reference(rollouts.sequences).logprobs
    for who, logprobs in told.items():
        what = f"log-probabilities of the sampler and of the {who} at temperature 0.7{under}"
        require_close(rollouts.logprobs, logprobs, what, rtol=0, atol=1e-5)


def _require_allowed(sequences: Sequences, mask: Tensor | None) -> None:
    if mask is None:
        return
    for query, response in ids_of(sequences):
        pairs = zip((*query[-1:], *response), response, strict=False)
        allowed = all(mask[token] if mask.dim() == 1 else mask[previous, token] for previous, token in pairs)
        require(allowed, f"the response {response} to {query} has tokens that the logit mask forbids")


@check(where=compares)
def reference_is_frozen(bench: Bench) -> None:
    """Check that the reference gets no gradient, does not change in a run, and has no dropout.

    A reference in training mode gives different log-probabilities at each call, and a reference that shares trained
    weights changes with the policy; the divergence is then meaningless.

    Causes: a copy that shares parameters with the policy; a reference that is not in evaluation mode; a second model
    that is made without `self.frozen`.
    """
    changes = {"model": tiny_gpt2(VOCABULARY, **DROPOUT), "model__disable_dropout": False}
    trainer = bench.collected(**changes)
    reading, *_ = readings(trainer, trainer.store.experience)
    trainer.loss(for_loss(trainer, trainer.store.experience))[0].backward()
    frozen = dict(trainer.reference.policy.named_parameters())
    taking = [name for name, p in frozen.items() if p.requires_grad or p.grad is not None]
    require(not taking, f"the reference has trainable parameters: {', '.join(taking[:3])}")
    trained = {p.data_ptr() for p in trainer.unwrapped.parameters() if p.requires_grad}
    shared = [name for name, p in frozen.items() if p.data_ptr() in trained]
    require(not shared, f"the reference shares trained parameters with the policy: {', '.join(shared[:3])}")
    trainer.policy.train()
    first, before = trainer.reference(reading.sequences).logprobs, _copied(trainer.reference.policy)
    require_close(
        first,
        trainer.reference(reading.sequences).logprobs,
        "log-probabilities of two calls of the reference",
        rtol=0,
        atol=0,
    )
    trainer.optimizer.zero_grad()
    trainer.learn()
    require_same_weights(before, _copied(trainer.reference.policy), "weights of the reference before and after a run")
    after = trainer.reference(reading.sequences).logprobs
    require_close(first, after, "log-probabilities of the reference before and after a run", rtol=0, atol=0)


def _copied(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# --------------------------------------------------------------------------------------------------- the trained tokens


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that merges any two letters, so that nearly every sampled text has other ids, too.

    It has as many tokens as that of `tiny_trainer`, so that it fits second models, such as a teacher.
    """
    pairs = [(one, other) for one in "ab" for other in "ab"]
    names = ["a", "b", *(one + other for one, other in pairs), "<c>", "<d>", EOS, PAD]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=pairs))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


@check(where=samples_text)
def sampled_ids(bench: Bench) -> None:
    """Check that the ids that were sampled are the ids that are trained.

    Text that is tokenised again may give other ids, which the policy did not sample with the probability that is
    reinforced. The prompts are those that the algorithm declares, if it does, in other letters; if they have further
    columns, such as answers, or it learns from samples too, it may train on these.

    Causes: texts of rollouts that are encoded again; a response mask that begins one token early or includes the
    prompt.
    """
    tokenizer = merging_tokenizer()
    columns = further_columns(bench.subject)
    own = bench.subject.declaration.arguments.get("prompts")
    prompts = ["a", "b", "ab", "bab"] if own is None else [_in_two_letters(row) for row in own]
    samples = [(prompt, "ba") for prompt in ("a", "b", "ab", "bab")]
    arguments = {"tokenizer": tokenizer, "prompts": prompts, "samples": samples}
    trainer = bench.in_one_turn().collected(model=tiny_gpt2(len(tokenizer)), arguments=arguments)
    sampled = {ids for rollouts in trainer.collector.collection.rollouts for ids in ids_of(rollouts.sequences)}
    changed = [r for _, r in sampled if tuple(tokenizer(tokenizer.decode(list(r)))["input_ids"]) != r]
    require(len(changed) > len(sampled) // 8, "too few responses would change if they were tokenised again")
    texts = {(query, tokenizer.decode(list(response))) for query, response in sampled}
    for reading in readings(trainer, weighted(trainer.store.experience)):
        for query, response in ids_of(reading.sequences):
            given = (columns or "samples" in trainer.inputs) and (query, tokenizer.decode(list(response))) not in texts
            require(given or (query, response) in sampled, f"{query} → {response} is trained but was never sampled")


def _in_two_letters(value: Any, key: str = "") -> Any:
    """Return a row, or a part of it, with texts of the letters of `merging_tokenizer`; roles of messages are kept."""
    if isinstance(value, str) and key != "role":
        return "".join("ab"[ord(letter) % 2] for letter in value)
    if isinstance(value, Mapping):
        return {name: _in_two_letters(each, name) for name, each in value.items()}
    return [_in_two_letters(each) for each in value] if isinstance(value, list) else value


def further_columns(subject: Subject) -> list[str]:
    """Return the columns besides the prompt that the declared prompts of an algorithm have."""
    rows = subject.declaration.arguments.get("prompts", ())
    return [name for name in (rows[0] if rows and isinstance(rows[0], Mapping) else ()) if name != "prompt"]


@check(where=lambda subject: subject.language)
def eos_is_trained(bench: Bench) -> None:
    """Check that the EOS of a response is trained like its other tokens, exactly once, also if padding has its id.

    A mask of the ids that are not padding excludes EOS if the tokenizer pads with EOS, as is common with GPT-2, and the
    model never learns to stop.

    Causes: a mask of `input_ids != pad_token_id`; a response that is cut before its EOS; the EOS appended twice.
    """
    tokenizer = character_tokenizer(LETTERS, pad_token=EOS)
    trainer = bench.in_one_turn().collected(arguments={"tokenizer": tokenizer})
    ended = _ended(trainer, of_episodes=bench.subject.needs_environment)
    require(
        not bench.subject.online or len(set(ended.values())) == 2, "no response was truncated, or none ended with EOS"
    )
    for reading in readings(trainer, weighted(trainer.store.experience)):
        segments = reading.sequences.segments
        many = [1] * len(reading.sequences) if segments is None else segments.amax(1).tolist()
        real = [
            ids[keep] for ids, keep in zip(reading.sequences.input_ids, reading.sequences.attention_mask, strict=True)
        ]
        for (ids, credit), row, count in zip(reading.rows(), real, many, strict=True):
            due = count if not bench.subject.online else int(ended.get(ids, True))
            _require_eos(tokenizer, ids, credit, row, due)


def _ended(trainer: Any, *, of_episodes: bool) -> dict[Ids, bool]:
    """Return whether EOS ended each response; an environment says only whether it ended the episode."""
    eos, found = trainer.tokenizer.eos_token_id, dict[Ids, bool]()
    for part in trainer.collector.collection.rollouts:
        for ids, terminated in zip(ids_of(part.sequences), part.terminated.tolist(), strict=True):
            found[ids] = ids[1][-1] == eos if of_episodes else terminated
    return found


def _require_eos(tokenizer: Any, ids: tuple[Any, Any], credit: Tensor, row: Tensor, due: int) -> None:
    text, response = tokenizer.decode(row), ids[1]
    ends = [index for index, token in enumerate(response) if token == tokenizer.eos_token_id]
    counted = int((row == tokenizer.eos_token_id).sum())
    require(
        len(ends) == counted == due,
        f"{text!r} has {counted} EOS, of which {len(ends)} are trained; both should be {due}",
    )
    require(not due or ends[-1] == len(response) - 1, f"the EOS of {text!r} is not the last token of its response")
    if credit.any():
        require(bool(credit[ends].all()), f"the loss on {text!r} does not depend on its EOS, but on other tokens")


# ------------------------------------------------------------------------------------------------------- other models


def trains_encoder_decoders(subject: Subject) -> bool:
    """Return whether the subject can train encoder-decoders, which do not read the turns of an episode as one text."""
    return subject.language and subject.trainer_class.encoder_decoders and not subject.needs_environment


@check(where=trains_encoder_decoders)
def encoder_decoder(bench: Bench) -> None:
    """Check that encoder-decoders are trained like causal models: exact means, one policy before the first update.

    They read prompt and response separately, so positions counted from the prompt's end are off by its length. A
    trainer that does not support them sets ``encoder_decoders = False``, and is not checked; neither is one that needs
    an environment.

    Causes: positions that are counted from the prompt's end; `policy.model` called directly instead of `self.policy`.
    """
    model = tiny_t5(VOCABULARY)
    trainer = bench.collected(model=model)
    batch = trainer.store.experience
    read = [row for reading in readings(trainer, batch) for row in reading.rows()]
    noise = 1e-6 * max(float(credit.abs().max()) for _, credit in read if len(credit))  # of a difference that is 0
    for ids, credit in read:
        counted = int((credit.abs() > noise).sum())
        require(counted in (0, len(credit)), f"for {ids} the loss reads {counted} of {len(credit)} response tokens")
    _require_one_gradient(trainer, "an encoder-decoder")
    if has_a_first_ratio(bench.subject):
        require_one_policy(bench, model=tiny_t5(VOCABULARY, dropout_rate=0.5), rollout__temperature=0.7)
    before = weights(trainer)
    trainer.learn()
    moved = [name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])]
    require(moved, "a run on an encoder-decoder changes no weight")


def _require_one_gradient(trainer: Any, what: str) -> None:
    batch = trainer.store.experience
    whole, share = gradient(trainer, batch), batch.weight
    parts = [gradient(trainer, micro) * (micro.weight / share) for micro in batch.split(3)]
    require_close(torch.stack(parts).sum(0), whole, f"gradients of {what} in micro-batches of 3 and whole")


def trains_on_images(subject: Subject) -> bool:
    """Return whether the subject can learn from prompts with images, and Pillow, which reads them, is there."""
    can = subject.language and subject.trainer_class.images and not subject.needs_environment
    return can and find_spec("PIL") is not None


@check(where=trains_on_images)
def images(bench: Bench) -> None:
    """Check that a model that reads images learns from prompts with images of different sizes.

    Means are exact, no token of an image is trained, the policy before the first update is the one that sampled, what
    reads the images is trained, a response is trained with the image that it was sampled for, also if another prompt
    differs by its image alone, and a resumed run ends bit-equal. A trainer that learns from text alone sets
    ``images = False``, and is not checked; neither is one that needs an environment.

    Causes: sequences that are made again from token ids, without `Sequences.images`; rows that are reordered, and their
    images not; prompts that are told apart by their token ids; `policy.model` called directly instead of `self.policy`.
    """
    from trainkit.testing.images import idefics_processor, pictured, tiny_idefics3

    processor = idefics_processor()
    given: dict[str, Any] = {
        "model": tiny_idefics3(processor.tokenizer),
        "arguments": {"tokenizer": processor, **pictured(bench.subject.inputs)},
    }
    trainer = bench.collected(**given)
    token = trainer.text.model_config.image_token_id
    for reading in readings(trainer, trainer.store.experience):
        rows = reading.sequences
        require(rows.images is not None, "the loss calls the policy without the images of the prompts")
        require(not (rows.response_mask & (rows.input_ids == token)).any(), "tokens of images are trained")
    _require_one_gradient(trainer, "a model that reads images")
    if bench.subject.online:
        sampled = {row for rollouts in trainer.collector.collection.rollouts for row in _pictured(rollouts.sequences)}
        trained = {row for part in sequences_in(trainer.store.experience) for row in _pictured(part)}
        ids = {ids for ids, _ in sampled}  # the others are of a dataset
        astray = {row for row in trained - sampled if row[0] in ids}
        require(not astray, "a response is trained with the image of another prompt than it was sampled for")
    place, logged = bench.place(), Logged()
    bench.learnt(place, callbacks=[logged], **given, train__save_interval=1, train__total_steps=1)
    if has_a_first_ratio(bench.subject):
        _require_unmoved(logged.steps[1], from_start=not bench.subject.chooses_reference)
    resumed = bench.learnt(place, **given, train__save_interval=1, train__total_steps=2, train__resume="auto")
    straight = bench.trainer(**given, train__save_interval=1, train__total_steps=2)
    before = weights(straight)
    straight.learn()
    moved = [name for name, tensor in weights(straight).items() if not torch.equal(tensor, before[name])]
    require(any("vision" in name for name in moved), "a run changes nothing in what reads images")
    require_same_weights(
        weights(straight), weights(resumed), "weights of an uninterrupted and of a resumed run on images"
    )


def _pictured(sequences: Sequences) -> list[tuple[Any, str]]:
    """Return the ids of each row with a response, and what the model reads of its image, without padding."""
    rows = [(ids, sequences.select(torch.tensor([at])).images) for at, ids in enumerate(ids_of(sequences)) if ids[1]]
    inputs = [{} if images is None else images.inputs for _, images in rows]
    return [
        (ids, printed({name: x[x != 0] for name, x in each.items()}))
        for (ids, _), each in zip(rows, inputs, strict=True)
    ]


@check(where=lambda subject: subject.language)
def adapter(bench: Bench) -> None:
    """Check that with an adapter only the adapter and the heads are trained, and resuming and exporting work.

    The reference is then the model without its adapter; if the adapter is not disabled, the policy is compared with
    itself.

    Causes: a reference that keeps the adapter on; parameters that are made trainable in `get_arch`.
    """
    changes: dict[str, Any] = {"model__peft_config": LORA, "optimizer__lr": 1e-2}
    if has_a_first_ratio(bench.subject):
        require_one_policy(bench, **changes)
    trainer = bench.trainer(**changes, train__save_interval=3)
    before = weights(trainer)
    probe = Sequences.from_lists([[0, 1], [2]], [[3, 4], [5, 6, 7]])
    told = _asked(trainer, probe) if compares(bench.subject) else None
    trainer.learn()
    moved = [name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])]
    astray = [name for name in moved if name.startswith("model.") and "lora_" not in name]
    require(any("lora_B" in name for name in moved), "a run does not change the adapter")
    require(not astray, f"a run with an adapter changes {', '.join(astray[:3])} of the base model")
    if told is not None:
        require_close(
            told, _asked(trainer, probe), "log-probabilities of the reference before and after a run", rtol=0, atol=0
        )
    _require_adapter_is_kept(bench, trainer, changes)


def _asked(trainer: Any, probe: Sequences) -> Tensor:
    answer: Tensor = trainer.reference(probe.to(trainer.accelerator.device)).logprobs
    return answer


def _require_adapter_is_kept(bench: Bench, trainer: Any, changes: dict[str, Any]) -> None:
    place = bench.place()
    bench.learnt(place, **changes, train__save_interval=3, train__total_steps=3)
    resumed = bench.learnt(place, **changes, train__save_interval=3, train__resume="auto")
    require_same_weights(
        weights(trainer), weights(resumed), "weights of an uninterrupted and of a resumed run with an adapter"
    )
    loaded = AutoModelForCausalLM.from_pretrained(trainer.save_pretrained(bench.place()))
    model = trainer.unwrapped.model
    inputs = tiny_input(loaded.to(model.device))
    with torch.no_grad():
        own, other = model(**inputs).logits, loaded(**inputs).logits
    require_close(own, other, "logits of the adapted model and of its export", rtol=0, atol=1e-5)
