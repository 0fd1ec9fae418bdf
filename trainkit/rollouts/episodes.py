"""Episodes: several turns of sampling and observing per prompt, as rollouts whose response masks have holes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.config import EnvironmentConfig, SamplingConfig
from trainkit.data import Chat, Rollouts, Row, is_conversation
from trainkit.data.batches import Images
from trainkit.data.chat import SETTINGS
from trainkit.data.images import given_images, with_images
from trainkit.data.pipeline import encode_continuation
from trainkit.errors import DataError, EpisodeError, describe, printable
from trainkit.rollouts.environments import EnvironmentMaker, Episode, Prompt, Turn, fork, make, step
from trainkit.rollouts.sampler import assemble, decode, placed_at
from trainkit.seeding import PLACE, turn_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Sample = Callable[[list[Row], list[list[int]], SamplingConfig, list[int]], Rollouts]
"""Samples one response for each (row, context as token ids, seed)."""

PROBE = "ok"
"""Stands for the outputs of the model where a chat template is rendered: their tokens are never rendered again."""


NUMBERS = ("logprobs", "entropy", "hidden")
"""What a sampler may compute about the tokens that it samples."""


@dataclass
class _Script:
    """The token ids of an episode while it is played."""

    prompt: list[int]
    seed: int
    text: str
    messages: list[dict[str, Any]] | None
    """The conversation so far with `PROBE` for the model's outputs; None if the prompt is text."""
    shown: Row = field(default_factory=dict)
    """If the prompt has images, the columns of a row that has them; `Player.images` reads these."""
    ids: list[int] = field(default_factory=list)
    """The tokens after the prompt: outputs and observations."""
    sampled: list[bool] = field(default_factory=list)
    """Which of them were sampled."""
    rewards: list[float] = field(default_factory=list)
    """A reward for each of them."""
    numbers: dict[str, list[Tensor]] = field(default_factory=dict)
    """What the sampler computed about the sampled ones, a tensor per turn."""
    version: Tensor | None = None
    """The version [] of the weights of the first output; the same for all, because weights change between episodes."""
    said: list[dict[str, Any]] = field(default_factory=list)
    """The turns as text, for logs and reward functions."""
    done: bool = False
    """Whether no further turn follows."""
    terminated: bool = False
    """Whether the environment has ended the episode."""

    @property
    def context(self) -> list[int]:
        """The ids that the next output continues."""
        return self.prompt + self.ids

    def copy(self, seed: int) -> _Script:
        """Return a copy that another seed goes on."""
        numbers = {name: [*parts] for name, parts in self.numbers.items()}
        lists: dict[str, Any] = {name: [*getattr(self, name)] for name in ("ids", "sampled", "rewards", "said")}
        return replace(self, seed=seed, numbers=numbers, **lists)


@dataclass(frozen=True)
class Moment:
    """An episode before one of its outputs, from which it can be played in several ways."""

    episode: Episode
    script: _Script


class Player:
    """Plays episodes: samples an output for each, gives it to its environment, appends the observation, and so on.

    All episodes of a call are at the same turn. Sampled ids are never decoded and encoded again. An observation is
    encoded once. If the prompt is messages, an observation is written as the chat template writes it.

    Args:
        maker: makes the environments.
        tokenizer: encodes observations.
        encode: encodes the prompt of a row, text or token ids, with its images: ``encode(row, what)``.
        images: returns what the model reads of the images of such rows.
        config: how environments are called.
        max_turns: outputs per episode.
        max_tokens: tokens per episode; None: no limit.
        skip_special_tokens: omit special tokens from the text.
    """

    def __init__(
        self,
        maker: EnvironmentMaker,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[[Row, str], list[int]],
        images: Callable[[list[Row]], Images | None],
        config: EnvironmentConfig,
        *,
        max_turns: int,
        max_tokens: int | None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.maker, self.tokenizer, self.encode, self.images, self.config = maker, tokenizer, encode, images, config
        self.max_turns, self.max_tokens, self.skip = max_turns, max_tokens, skip_special_tokens
        self.seconds = 0.0
        """Time spent in environments by the last call."""
        self._proven: set[str] = set()
        self._warned = False

    def __call__(
        self,
        rows: list[Row],
        settings: SamplingConfig,
        seeds: Sequence[int],
        sample: Sample,
        eos: Sequence[int],
        *,
        forks: bool = False,
    ) -> Rollouts:
        """Play an episode for each row, and return them as rollouts, in the order of the rows.

        Args:
            rows: the rows, with ``episode_seed``, and with a ``prompt`` unless their environment's `reset` returns one.
            settings: how outputs are sampled; ``max_new_tokens`` is the limit of one turn.
            seeds: the seeds of the responses, from which the outputs are sampled.
            sample: samples one output for each context.
            eos: the token ids that end an output.
            forks: whether copies of the environments are kept, so that `branch` can go on from each output.

        Raises:
            EpisodeError: an environment failed or returned something invalid; a prompt does not fit into the context,
                or an observation cannot fit into it; or the tokenizer or its chat template cannot write one of them.
        """
        self.seconds = 0.0
        episodes, prompts = self._timed(lambda: make(self.maker, rows, self.config))
        scripts = [self._begin(*each) for each in zip(episodes, prompts, seeds, strict=True)]
        _check_same_task(episodes, scripts)
        return self._played(episodes, scripts, settings, sample, eos, [[] for _ in rows] if forks else None)

    def branch(
        self,
        moments: list[list[Moment]],
        settings: SamplingConfig,
        seeds: Sequence[int],
        sample: Sample,
        eos: Sequence[int],
    ) -> Rollouts:
        """Play on from the last of the moments of each episode. The other arguments are those of a call."""
        self.seconds = 0.0
        episodes = self._timed(lambda: fork([kept[-1].episode for kept in moments], self.config))
        scripts = [kept[-1].script.copy(seed) for kept, seed in zip(moments, seeds, strict=True)]
        return self._played(episodes, scripts, settings, sample, eos, [kept[:-1] for kept in moments])

    def _played(
        self,
        episodes: list[Episode],
        scripts: list[_Script],
        settings: SamplingConfig,
        sample: Sample,
        eos: Sequence[int],
        moments: list[list[Moment]] | None,
    ) -> Rollouts:
        """Play episodes to their ends; append what each is before an output to its ``moments``, unless None."""
        while playing := [at for at, script in enumerate(scripts) if self._goes_on(script)]:
            if moments is not None:
                copies = self._timed(lambda: fork([episodes[at] for at in playing], self.config))
                for at, copied in zip(playing, copies, strict=True):
                    moments[at].append(Moment(copied, scripts[at].copy(scripts[at].seed)))
            for some, limited in self._by_room(scripts, playing, settings):
                parts = [episodes[at] for at in some], [scripts[at] for at in some]
                self._sample_outputs(*parts, limited, sample)
            outputs = [scripts[at].said[-1]["output"] for at in playing]
            turns = self._timed(lambda: step([episodes[at] for at in playing], outputs, self.config))  # noqa: B023
            for at, answer in zip(playing, turns, strict=True):
                self._answer(episodes[at], scripts[at], answer, eos)
        return replace(self._rollouts(episodes, scripts), moments=moments)

    # ------------------------------------------------------------------------------------------------ the prompt

    def _begin(self, episode: Episode, prompt: Prompt | None, seed: int) -> _Script:
        first = episode.row.get("prompt") if prompt is None else prompt
        if first is None:
            raise episode.fault(
                "reset() returned no prompt, and the row has none; return one, or give rows with a prompt"
            )
        try:
            return self._written(episode, first, seed)
        except DataError as error:
            raise episode.fault(str(error)) from error

    def _written(self, episode: Episode, prompt: Prompt, seed: int) -> _Script:
        """Return the script that begins with a prompt."""
        what = "its prompt"
        if is_conversation(prompt):
            messages, chat = [dict(message) for message in prompt], self._chat(episode, what)
            text, images = chat.prompt(messages), chat.images(messages) if chat.reads_images else []
        else:
            messages, images = None, given_images(episode.row)
            text = prompt if isinstance(prompt, str) else decode(self.tokenizer, [prompt], self.skip)[0]
        shown = with_images({"prompt": text}, images) if images else {}
        ids = self.encode(shown or {"prompt": prompt if messages is None else text}, what)
        if self.max_tokens is not None and len(ids) >= self.max_tokens:
            raise episode.fault(
                f"its prompt has {len(ids)} tokens, and an episode may have {self.max_tokens}; shorten it, or raise "
                "rollout.max_episode_tokens or train.seq_length"
            )
        if messages is not None:
            self.check_template(messages, episode.row, what)
        return _Script(ids, seed, text, messages, shown)

    def check_template(self, messages: Sequence[Mapping[str, Any]], row: Row, what: str) -> None:
        """Check that the chat template renders all messages, and keeps them, once for each kind of conversation.

        Raises:
            DataError: it does not render a message; or as `check_template`.
        """
        copies = [dict(message) for message in messages]
        kind = _kind("prompt", row, *[message.get("role") for message in copies])
        if kind in self._proven:
            return
        chat = Chat(self.tokenizer, row, what)
        for index in range(len(copies)):
            if _is_ignored(chat, copies, index):
                raise DataError(f"{what}, message {index}: {_ignores(copies[index])}")
        check_template(self.tokenizer, copies, row, what)
        self._proven.add(kind)

    def _chat(self, episode: Episode, what: str) -> Chat:
        return Chat(self.tokenizer, episode.row, what)

    # --------------------------------------------------------------------------------------------------- the turns

    def _goes_on(self, script: _Script) -> bool:
        return not script.done and (self.max_tokens is None or len(script.context) < self.max_tokens)

    def _by_room(
        self, scripts: list[_Script], playing: list[int], settings: SamplingConfig
    ) -> list[tuple[list[int], SamplingConfig]]:
        """Return the episodes by the number of tokens that their next output may have."""
        groups: dict[int, list[int]] = {}
        for at in playing:
            room = settings.max_new_tokens
            if self.max_tokens is not None:
                room = min(room, self.max_tokens - len(scripts[at].context))
            groups.setdefault(room, []).append(at)
        least = settings.min_new_tokens
        return [
            (some, settings.model_copy(update={"max_new_tokens": room, "min_new_tokens": min(least, room)}))
            for room, some in groups.items()
        ]

    @staticmethod
    def _sample_outputs(
        episodes: list[Episode], scripts: list[_Script], settings: SamplingConfig, sample: Sample
    ) -> None:
        """Sample the next output of some episodes, and append it to their scripts."""
        drawn = sample(
            [{**episode.row, **script.shown} for episode, script in zip(episodes, scripts, strict=True)],
            [script.context for script in scripts],
            settings,
            [turn_seed(script.seed, episode.turn) for episode, script in zip(episodes, scripts, strict=True)],
        )
        _append_outputs(scripts, drawn)
        for episode, script, row in zip(episodes, scripts, drawn.rows, strict=True):  # a plugin's may add columns
            own = {"prompt", *script.shown}
            episode.row = {**episode.row, **{name: row[name] for name in row if name not in own}}

    def _answer(self, episode: Episode, script: _Script, turn: Turn, eos: Sequence[int]) -> None:
        """Record the reward of an output, and append the observation if the episode goes on."""
        ids: list[int] = []
        if not turn.done and episode.turn < self.max_turns:
            try:
                ids = self._observed(episode, script, turn.observation, eos)
            except EpisodeError as error:
                turn = episode.fail(error, self.config)
        script.rewards[-1] = turn.reward
        script.said[-1] |= {"reward": turn.reward, "observation": "" if turn.done else turn.observation}
        if episode.failure:
            script.said[-1]["error"] = episode.failure
            self._warn(episode)
        script.terminated = turn.done and not episode.failure
        no_room = self.max_tokens is not None and len(script.context) + len(ids) >= self.max_tokens
        script.done = turn.done or episode.turn >= self.max_turns or no_room
        if script.done:
            return
        script.ids += ids
        script.sampled += [False] * len(ids)
        script.rewards += [0.0] * len(ids)

    def _warn(self, episode: Episode) -> None:
        """Log the first failed episode; the others are counted."""
        if not self._warned:
            self._warned = True
            log.warning(
                "%s. The episode ends with the reward %g, because environment.on_error is 'fail_episode'. This is the "
                "first failure, and further ones are not logged: the metric environment/failures is their share, and "
                "samples.jsonl has the reason under 'error' in the last turn of a failed episode",
                printable(str(episode.failure)),
                self.config.fail_reward,
            )

    def _observed(self, episode: Episode, script: _Script, observation: Prompt, eos: Sequence[int]) -> list[int]:
        """Return the token ids of an observation, with the template's own text around it if there is one.

        Raises:
            EpisodeError: it cannot be written or encoded, or is longer than an episode may be.
        """
        try:
            text = self._text_of(episode, script, observation, eos)
            ids = encode_continuation(self.tokenizer, text, script.ids[-1], "its observation")
        except DataError as error:
            raise episode.fault(str(error)) from error
        if not ids:
            raise episode.fault(f"its observation {describe(text)} has no tokens; give text that the tokenizer keeps")
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise episode.fault(
                f"its observation has {len(ids)} tokens, and an episode may have {self.max_tokens}; shorten it, or "
                "raise rollout.max_episode_tokens or train.seq_length"
            )
        return ids

    def _text_of(self, episode: Episode, script: _Script, observation: Prompt, eos: Sequence[int]) -> str:
        """Return the text between the last output and the next one; append the observation to the messages."""
        if script.messages is None:
            if isinstance(observation, str):
                return observation
            raise episode.fault("its observation is messages, and its prompt is text; return text in both or neither")
        new = _observation(episode, observation)
        chat = self._chat(episode, "its observation")
        before = chat.prompt(script.messages) + PROBE
        script.messages = [*_answered(script.messages, PROBE), *new]
        whole = chat.prompt(script.messages)
        if not whole.startswith(before):
            raise _rewritten("its observation", before, whole)
        for index, message in enumerate(new, len(script.messages) - len(new)):
            kind = _kind("observation", episode.row, message["role"])
            if kind not in self._proven and _is_ignored(chat, script.messages, index):
                raise episode.fault(_ignores(message))
            self._proven.add(kind)
        text, last = whole[len(before) :], script.ids[-1]
        if last in eos:  # sampled, and so not written again
            text = text.removeprefix(decode(self.tokenizer, [[last]], skip_special_tokens=False)[0])
        return text

    def _timed(self, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - started

    # -------------------------------------------------------------------------------------------------- the result

    def _rollouts(self, episodes: list[Episode], scripts: list[_Script]) -> Rollouts:
        rows = [
            {**episode.row, **script.shown, "prompt": script.text}
            for episode, script in zip(episodes, scripts, strict=True)
        ]
        numbers: dict[str, Any] = {name: _joined(scripts, name) for name in NUMBERS}
        logprobs, versions = numbers["logprobs"], [script.version for script in scripts if script.version is not None]
        rollouts = assemble(
            self.tokenizer,
            [{name: value for name, value in row.items() if name != "episode_seed"} for row in rows],
            [script.prompt for script in scripts],
            [script.ids for script in scripts],
            sampled=[script.sampled for script in scripts],
            terminated=torch.tensor(
                [script.terminated for script in scripts], device=None if logprobs is None else logprobs.device
            ),
            **numbers,
            versions=torch.stack(versions) if len(versions) == len(scripts) else None,
            stops=[],
            skip_special_tokens=self.skip,
            images=self.images(rows) if any(script.shown for script in scripts) else None,
        )
        sequences = rollouts.sequences
        after = sequences.attention_mask & ~sequences.prompt_mask  # every prompt is followed by an output
        return replace(
            rollouts,
            rewards=placed_at(after, torch.tensor([reward for script in scripts for reward in script.rewards])),
            turns=[script.said for script in scripts],
            failed=torch.tensor([bool(episode.failure) for episode in episodes], device=rollouts.terminated.device),
        )


def _joined(scripts: list[_Script], name: str) -> Tensor | None:
    """Return the numbers of all sampled tokens, row after row; None if the sampler did not compute all of them."""
    parts = [part for script in scripts for part in script.numbers.get(name, [])]
    return torch.cat(parts) if len(parts) == sum(len(script.said) for script in scripts) else None


def _check_same_task(episodes: list[Episode], scripts: list[_Script]) -> None:
    """Raise an `EpisodeError` if environments of one row begin with different prompts: they would be compared."""
    first: dict[Any, list[int]] = {}
    for episode, script in zip(episodes, scripts, strict=True):
        place = episode.row.get(PLACE)
        if place is not None and first.setdefault(place, script.prompt) != script.prompt:
            raise episode.fault(
                "reset() returned another prompt than in another episode of the same row, with the same episode_seed; "
                "take all randomness of the task from row['episode_seed']"
            )


def _append_outputs(scripts: list[_Script], drawn: Rollouts) -> None:
    """Append the outputs that were sampled for some episodes, with what the sampler computed about them."""
    sequences, mask = drawn.sequences, drawn.sequences.response_mask
    after = sequences.attention_mask & ~sequences.prompt_mask  # a plugin's sampler may have inserted tokens
    for row, script in enumerate(scripts):
        ids = sequences.input_ids[row][after[row]].tolist()
        script.ids += ids
        script.sampled += mask[row][after[row]].tolist()
        script.rewards += [0.0] * len(ids)
        script.said.append({"output": drawn.outputs[row]})
        script.version = None if drawn.versions is None else drawn.versions[row]
        for name in NUMBERS:
            values = getattr(drawn, name)
            if values is not None:
                script.numbers.setdefault(name, []).append(values[row][mask[row]])


def _answered(messages: Sequence[dict[str, Any]], output: str) -> list[dict[str, Any]]:
    """Return a conversation with an output: a message of the assistant, or the rest of its last one."""
    if messages and messages[-1]["role"] == "assistant":
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1].get('content') or ''}{output}"}]
    return [*messages, {"role": "assistant", "content": output}]


def _observation(episode: Episode, observation: Prompt) -> list[dict[str, Any]]:
    """Return an observation as messages.

    Raises:
        EpisodeError: a message is the assistant's, or its content is not text.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    for message in observation:
        if message.get("role") == "assistant":
            raise episode.fault(
                "its observation has a message of the role 'assistant', which is that of the model's outputs; use "
                "'user' or 'tool'"
            )
        if "role" in message and not isinstance(message.get("content"), str):
            raise episode.fault(
                f"its observation has a message of the role {message['role']!r} with the content "
                f"{describe(message.get('content'))}; the content should be text"
            )
    return [dict(message) for message in observation]


def _kind(what: str, row: Row, *roles: Any) -> str:
    """Return what decides how messages are rendered, besides their content."""
    return repr((what, roles, [row.get(name) for name in SETTINGS]))


def _is_ignored(chat: Chat, messages: Sequence[dict[str, Any]], index: int) -> bool:
    """Return whether the chat template renders the same text with another content of a message."""
    content = messages[index].get("content")
    if not isinstance(content, str):  # e.g. calls of tools, of which no other value is known
        return False
    other = {**messages[index], "content": PROBE if content.strip() != PROBE else f"{PROBE} {PROBE}"}
    try:
        return chat.prompt(messages) == chat.prompt([*messages[:index], other, *messages[index + 1 :]])
    except DataError:  # the template reads the content, and refuses another one
        return False


def _ignores(message: Mapping[str, Any]) -> str:
    return (
        f"the chat template does not render the message of the role {message['role']!r} "
        f"({describe(message['content'], 40)}); use a template that supports the role, or another role, such as 'user'"
    )


def _rewritten(what: str, before: str, whole: str) -> DataError:
    at = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
    return DataError(
        f"{what}: the chat template renders what came before it differently ({describe(before[at:][:30])} becomes "
        f"{describe(whole[at:][:30])}), so the tokens that were sampled would not be those of the conversation. Use a "
        "template that keeps earlier messages as they are"
    )


def check_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], row: Row, what: str) -> None:
    """Check that the chat template keeps every message of a conversation as it is when others follow.

    Raises:
        DataError: it renders a message differently, or cannot render the conversation; names the message.
    """
    chat, told = Chat(tokenizer, row, what), [dict(message) for message in messages]
    for probe in (PROBE, f"<think>\n{PROBE}\n</think>\n\n{PROBE}"):
        answered = told
        for number in range(2):
            asked = chat.prompt(answered)
            answered = [*_answered(answered, probe), {"role": "user", "content": PROBE}]
            whole = chat.prompt(answered)
            if whole.startswith(asked + probe):
                continue
            which = f"{what}, message {len(told) + 2 * number} (a trial answer {probe!r})"
            header, found, _ = whole.removeprefix(asked).partition(probe)
            if whole.startswith(asked) and found and not header.isspace():
                raise DataError(
                    f"{which}: the chat template writes {describe(header)} before an answer, and not at the end of a "
                    "prompt, so the model would answer without it. Use a template that writes it there too, if "
                    "add_generation_prompt is true"
                )
            raise _rewritten(which, asked + probe, whole)
