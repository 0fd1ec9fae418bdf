"""Episodes: several turns of sampling and observing per prompt, as rollouts whose response masks have holes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.config import EnvironmentConfig, SamplingConfig
from trainkit.data import Chat, Rollouts, Row, is_conversation
from trainkit.data.chat import SETTINGS
from trainkit.data.pipeline import encode_text
from trainkit.errors import DataError, describe
from trainkit.rollouts.environments import EnvironmentMaker, Episode, Prompt, Turn, make, step
from trainkit.rollouts.sampler import assemble, decode, placed_at
from trainkit.seeding import PLACE, turn_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    ids: list[int] = field(default_factory=list)
    """The tokens after the prompt: outputs and observations."""
    sampled: list[bool] = field(default_factory=list)
    """Which of them were sampled."""
    rewards: list[float] = field(default_factory=list)
    """A reward for each of them."""
    numbers: dict[str, list[Tensor]] = field(default_factory=dict)
    """What the sampler computed about the sampled ones, a tensor per turn."""
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


class Player:
    """Plays episodes: samples an output for each, gives it to its environment, appends the observation, and so on.

    All episodes of a call are at the same turn. Sampled ids are never decoded and encoded again. An observation is
    encoded once. If the prompt is messages, an observation is written as the chat template writes it.

    Args:
        maker: makes the environments.
        tokenizer: encodes observations.
        encode: encodes a prompt's text, ``encode(text, what)``.
        config: how environments are called.
        max_turns: outputs per episode.
        max_tokens: tokens per episode; None: no limit.
        skip_special_tokens: omit special tokens from the text.
    """

    def __init__(
        self,
        maker: EnvironmentMaker,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[[Any, str], list[int]],
        config: EnvironmentConfig,
        *,
        max_turns: int,
        max_tokens: int | None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.maker, self.tokenizer, self.encode, self.config = maker, tokenizer, encode, config
        self.max_turns, self.max_tokens, self.skip = max_turns, max_tokens, skip_special_tokens
        self.seconds = 0.0
        """Time spent in environments by the last call."""
        self._proven: set[str] = set()

    def __call__(
        self, rows: list[Row], settings: SamplingConfig, seeds: Sequence[int], sample: Sample, eos: Sequence[int]
    ) -> Rollouts:
        """Play an episode for each row, and return them as rollouts, in the order of the rows.

        Args:
            rows: the rows, with ``episode_seed``, and with a ``prompt`` unless their environment's `reset` returns one.
            settings: how outputs are sampled; ``max_new_tokens`` is the limit of one turn.
            seeds: the seeds of the responses, from which the outputs are sampled.
            sample: samples one output for each context.
            eos: the token ids that end an output.

        Raises:
            EpisodeError: an environment failed, or returned something invalid.
            DataError: a prompt or an observation does not fit into the context, or the template cannot render it.
        """
        self.seconds = 0.0
        episodes, prompts = self._timed(lambda: make(self.maker, rows, self.config))
        scripts = [self._begin(*each) for each in zip(episodes, prompts, seeds, strict=True)]
        _check_same_task(episodes, scripts)
        for turn in range(self.max_turns):
            playing = [at for at, script in enumerate(scripts) if self._goes_on(script)]
            if not playing:
                break
            for some, limited in self._by_room(scripts, playing, settings):
                parts = [episodes[at] for at in some], [scripts[at] for at in some]
                self._sample_outputs(*parts, limited, turn, sample)
            outputs = [scripts[at].said[-1]["output"] for at in playing]
            turns = self._timed(lambda: step([episodes[at] for at in playing], outputs, self.config))  # noqa: B023
            for at, answer in zip(playing, turns, strict=True):
                self._answer(episodes[at], scripts[at], answer, eos)
        return self._rollouts(episodes, scripts)

    # ------------------------------------------------------------------------------------------------ the prompt

    def _begin(self, episode: Episode, prompt: Prompt | None, seed: int) -> _Script:
        given = episode.row.get("prompt") if prompt is None else prompt
        if given is None:
            raise episode.fault(
                "reset() returned no prompt, and the row has none; return one, or give rows with a prompt"
            )
        what = f"the prompt of {episode.name}, row {episode.index}"
        if is_conversation(given):
            messages = [dict(message) for message in given]
            text = self._chat(episode, what).prompt(messages)
        else:
            messages, text = None, given if isinstance(given, str) else decode(self.tokenizer, [given], self.skip)[0]
        ids = self.encode(given if messages is None else text, what)
        if self.max_tokens is not None and len(ids) >= self.max_tokens:
            raise episode.fault(
                f"its prompt has {len(ids)} tokens, and an episode may have {self.max_tokens}; shorten it, or raise "
                "rollout.max_episode_tokens or train.seq_length"
            )
        if messages is not None:
            self.check_template(messages, episode.row, what)
        return _Script(ids, seed, text, messages)

    def check_template(self, messages: Sequence[Mapping[str, Any]], row: Row, what: str) -> None:
        """Check that the chat template keeps earlier messages, once for each kind of conversation.

        Raises:
            DataError: as `check_template`.
        """
        kind = repr(([message.get("role") for message in messages], [row.get(name) for name in SETTINGS]))
        if kind not in self._proven:
            check_template(self.tokenizer, [dict(message) for message in messages], row, what)
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
        return [(some, settings.model_copy(update={"max_new_tokens": room})) for room, some in groups.items()]

    @staticmethod
    def _sample_outputs(
        episodes: list[Episode], scripts: list[_Script], settings: SamplingConfig, turn: int, sample: Sample
    ) -> None:
        """Sample the next output of some episodes, and append it to their scripts."""
        drawn = sample(
            [episode.row for episode in episodes],
            [script.context for script in scripts],
            settings,
            [turn_seed(script.seed, turn) for script in scripts],
        )
        _append_outputs(scripts, drawn)
        for episode, row in zip(episodes, drawn.rows, strict=True):  # a plugin's sampler may add columns
            episode.row = {**episode.row, **{name: row[name] for name in row if name != "prompt"}}

    def _answer(self, episode: Episode, script: _Script, turn: Turn, eos: Sequence[int]) -> None:
        """Record the reward of an output, and append the observation if the episode goes on."""
        script.rewards[-1] = turn.reward
        script.said[-1] |= {"reward": turn.reward, "observation": "" if turn.done else turn.observation}
        script.terminated = turn.done and not episode.failed
        script.done = turn.done or episode.turns >= self.max_turns
        if script.done:
            return
        ids = self._observed(episode, script, turn.observation, eos)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise episode.fault(
                f"its observation has {len(ids)} tokens, and an episode may have {self.max_tokens}; shorten it, or "
                "raise rollout.max_episode_tokens or train.seq_length"
            )
        if self.max_tokens is not None and len(script.context) + len(ids) >= self.max_tokens:
            script.done = True  # no room for another output: truncated
            return
        script.ids += ids
        script.sampled += [False] * len(ids)
        script.rewards += [0.0] * len(ids)

    def _observed(self, episode: Episode, script: _Script, observation: Prompt, eos: Sequence[int]) -> list[int]:
        """Return the token ids of an observation, with the template's own text around it if there is one."""
        what = f"the observation of {episode.name}, row {episode.index}, turn {episode.turns}"
        if script.messages is None:
            if not isinstance(observation, str):
                raise episode.fault(
                    "its observation is messages, and its prompt is text; return text in both or neither"
                )
            return self._encoded(episode, observation, what)
        new = [{"role": "user", "content": observation}] if isinstance(observation, str) else [*map(dict, observation)]
        chat = self._chat(episode, what)
        before = chat.prompt(script.messages) + PROBE
        script.messages = [*_answered(script.messages, PROBE), *new]
        whole = chat.prompt(script.messages)
        if not whole.startswith(before):
            raise _rewritten(what, before, whole)
        text, last = whole[len(before) :], script.ids[-1]
        if last in eos:  # sampled, and so not written again
            text = text.removeprefix(decode(self.tokenizer, [[last]], skip_special_tokens=False)[0])
        return self._encoded(episode, text, what)

    def _encoded(self, episode: Episode, text: str, what: str) -> list[int]:
        ids = encode_text(self.tokenizer, text, what)
        if not ids:
            raise episode.fault(f"its observation {describe(text)} has no tokens; give text that the tokenizer keeps")
        return ids

    def _timed(self, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - started

    # -------------------------------------------------------------------------------------------------- the result

    def _rollouts(self, episodes: list[Episode], scripts: list[_Script]) -> Rollouts:
        rows = [{**episode.row, "prompt": script.text} for episode, script in zip(episodes, scripts, strict=True)]
        numbers = {name: _joined(scripts, name) for name in NUMBERS}
        known = numbers["logprobs"]
        made = assemble(
            self.tokenizer,
            [{name: value for name, value in row.items() if name != "episode_seed"} for row in rows],
            [script.prompt for script in scripts],
            [script.ids for script in scripts],
            sampled=[script.sampled for script in scripts],
            terminated=torch.tensor(
                [script.terminated for script in scripts], device=None if known is None else known.device
            ),
            **numbers,
            stops=[],
            skip_special_tokens=self.skip,
        )
        after = made.sequences.attention_mask & ~made.sequences.prompt_mask  # every prompt is followed by an output
        return replace(
            made,
            rewards=placed_at(after, torch.tensor([reward for script in scripts for reward in script.rewards])),
            turns=[script.said for script in scripts],
            failed=torch.tensor([episode.failed for episode in episodes], device=made.terminated.device),
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
        for name in NUMBERS:
            values = getattr(drawn, name)
            if values is not None:
                script.numbers.setdefault(name, []).append(values[row][mask[row]])


def _answered(messages: Sequence[dict[str, Any]], output: str) -> list[dict[str, Any]]:
    """Return a conversation with an output: a message of the assistant, or the rest of its last one."""
    if messages and messages[-1]["role"] == "assistant":
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1].get('content') or ''}{output}"}]
    return [*messages, {"role": "assistant", "content": output}]


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
            before = chat.prompt(answered) + probe
            answered = [*_answered(answered, probe), {"role": "user", "content": PROBE}]
            whole = chat.prompt(answered)
            if not whole.startswith(before):
                raise _rewritten(
                    f"{what}, message {len(told) + 2 * number} (the assistant's {describe(probe)})", before, whole
                )
