"""Episodes in which a model calls tools, as TRL has them: texts, token ids, and a mask of what the model wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from trainkit.errors import DataError, describe
from trainkit_migrate import refusing
from trainkit_trl.overriding import Advised


class StringStoppingCriteria(StoppingCriteria):
    """Stops a batch when every response has one of some strings.

    Args:
        stop_strings: the strings.
        tokenizer: the tokenizer.
    """

    def __init__(self, stop_strings: list[str], tokenizer: Any) -> None:
        self.stop_strings, self.tokenizer = stop_strings, tokenizer
        self.first_call, self.start_length = True, 1
        self.generated_tokens: list[int] = []
        """How many tokens each response has until its string, which is in the last one."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        """Return whether all responses have a string. The first call is for the first token after the prompts."""
        if self.first_call:
            self.generated_tokens = [1] * len(input_ids)
            self.start_length, self.first_call = input_ids.shape[-1] - 1, False
        done = []
        for index, text in enumerate(self.tokenizer.batch_decode(input_ids[:, self.start_length :])):
            done.append(any(stop in text for stop in self.stop_strings))
            self.generated_tokens[index] += not done[-1]
        return all(done)


class TextHistory(Advised):
    """The texts of an episode and their token ids, one segment after another.

    Args:
        text: the first segment, the query.
        tokens: its token ids.
        system: whether it is not of the model.
    """

    def __init__(self, text: str, tokens: Tensor, system: bool = True) -> None:
        self.text, self.tokens = "", torch.tensor([], dtype=torch.long, device=tokens.device)
        self.token_masks = self.tokens.clone()
        """1 for token ids of the model, 0 for others."""
        self.system_spans: list[bool] = []
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.completed = self.truncated = False
        self.reward: Any = 0.0
        self.append_segment(text, tokens, system=system)

    def append_segment(self, text: str, tokens: Tensor, system: bool = True) -> None:
        """Append a text with its token ids.

        Raises:
            ValueError: one of them is empty.
        """
        if not len(text) or not len(tokens):
            raise ValueError("Can't append empty text or token list to history.")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens.to(self.tokens)])
        self.token_masks = torch.cat([self.token_masks, torch.full_like(tokens, int(not system)).to(self.tokens)])

    def complete(self, truncated: bool = False) -> None:
        """End the episode, perhaps because it is too long."""
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        """The text of the last segment."""
        start, end = self.text_spans[-1]
        return self.text[start:end]

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the token ids of the query, those after it, and the mask of the latter: 1 for those of the model."""
        end = self.token_spans[0][1]
        return self.tokens[:end], self.tokens[end:], self.token_masks[end:]

    def show_text(self, show_legend: bool = False) -> None:
        """Print the text, each segment after ``[system]`` or ``[model]``; with a legend, the reward too."""
        for (start, end), system in zip(self.text_spans, self.system_spans, strict=True):
            print(f"[{'system' if system else 'model'}] {self.text[start:end]}")
        if show_legend:
            print(f"[reward] {self.reward}")


class TextEnvironment(Advised):
    """Episodes in which a model calls tools and submits an answer.

    The model writes ``<request><Tool>query<call>``, and the result follows, with ``<response>`` at its end. It ends
    with ``<submit>``, or by writing neither.

    Args:
        model: the model, whose ``generate`` is called.
        tokenizer: the tokenizer.
        tools: functions of a text by their names, or a list of objects that are called by the names of their classes.
        reward_fn: called with the last texts of the episodes; returns their rewards.
        prompt: stands before each query.
        max_turns: how often the model writes at most.
        max_tool_reponse: the characters after which a result is cut.
        max_length: the token ids after which an episode ends.
        generation_kwargs: arguments of ``generate``.

    Raises:
        DataError: the tools or the reward function are no functions.
    """

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        tools: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        prompt: str | None = None,
        max_turns: int = 4,
        max_tool_reponse: int = 100,
        max_length: int | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt or ""
        given = tools or {}
        if not isinstance(given, Mapping | list | tuple):
            raise DataError(f"tools should be functions by name, or a list of objects; given {describe(tools)}")
        self.tools = dict(given) if isinstance(given, Mapping) else {type(tool).__name__: tool for tool in given}
        for name, tool in {**self.tools, "reward_fn": reward_fn}.items():
            if not callable(tool):
                raise DataError(f"{name} should be a function; given {describe(tool)}")
        self.reward_fn: Any = reward_fn
        self.max_turns, self.max_tool_response, self.max_length = max_turns, max_tool_reponse, max_length
        self.request_token, self.call_token = "<request>", "<call>"
        self.response_token, self.submit_token = "<response>", "<submit>"
        self.generation_kwargs = dict(generation_kwargs or {})

    @property
    def current_device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def run(
        self, queries: list[str], **rewards_kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Any], list[TextHistory]]:
        """Play an episode for each query, and return queries, responses, masks, rewards and histories.

        Queries, responses and masks are token ids [P], [R] and [R] for `PPOTrainer.step`, whose ``response_masks`` the
        masks are: 1 for what the model wrote, 0 for results of tools.

        Args:
            queries: the texts after the prompt.
            **rewards_kwargs: passed to the reward function.
        """
        histories = [TextHistory(text, self._encode(text)) for text in (self.prompt + query for query in queries)]
        for _ in range(self.max_turns):
            if all(history.completed for history in histories):
                break
            histories = self.tasks_end_check(self.generate(histories))
            histories = [self.step(history) for history in histories]
            histories = self.tasks_end_check(histories, model_turn=False)
        self.compute_reward(histories, **rewards_kwargs)
        split = [history.split_query_response_tokens() for history in histories]
        asked, answers, masks = (list(column) for column in zip(*split, strict=True))
        return asked, answers, masks, [history.reward for history in histories], histories

    def step(self, history: TextHistory) -> TextHistory:
        """Run the tool that an episode calls, and append its result."""
        if history.completed:
            return history
        tool, query = self.parse_tool_call(history.last_text_segment)
        if tool is None or query is None:
            response = f"Unknown tool call: {history.last_text_segment}"
        elif tool not in self.tools:
            response = f"Unknown tool {tool}."
        else:
            try:
                response = str(self.tools[tool](query))
            except Exception as error:  # a tool's error is its result, as in TRL
                response = f"Tool error: {error}"
        if len(response) > self.max_tool_response:
            response = response[: self.max_tool_response - 3] + "..."
        text = response + self.response_token
        history.append_segment(text, self._encode(text), system=True)
        return history

    def parse_tool_call(self, text: str) -> tuple[str | None, str | None]:
        """Return the name of the tool and the query in ``<request><Tool>query<call>``; two None without a call."""
        found = re.search(f"{self.request_token}(.*?){self.call_token}", text, re.DOTALL)
        named = re.search(r"<(.*?)>", found[1]) if found else None
        return (named[1], found[1].partition(">")[2]) if found and named else (None, None)

    def compute_reward(self, histories: list[TextHistory], **reward_kwargs: Any) -> list[TextHistory]:
        """Set the rewards of episodes by the reward function of their last texts.

        Raises:
            DataError: it returns another number of rewards.
        """
        rewards = list(self.reward_fn([history.last_text_segment for history in histories], **reward_kwargs))
        if len(rewards) != len(histories):
            raise DataError(f"reward_fn returned {len(rewards)} rewards for {len(histories)} episodes")
        for history, reward in zip(histories, rewards, strict=True):
            history.reward = reward
        return histories

    def generate(self, histories: list[TextHistory]) -> list[TextHistory]:
        """Let the model write in the episodes that have not ended."""
        active = [history for history in histories if not history.completed]
        for history, response in zip(active, self._generate_batched([each.tokens for each in active]), strict=True):
            history.append_segment(self.tokenizer.decode(response), response, system=False)
        return histories

    def tasks_end_check(self, histories: list[TextHistory], model_turn: bool = True) -> list[TextHistory]:
        """End the episodes that are to end."""
        for history in histories:
            truncated, ended = self.task_end_check(history, model_turn=model_turn)
            if ended:
                history.complete(truncated=truncated)
        return histories

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """Return whether an episode is too long, and whether it ends; after a turn of the model also without a call."""
        if history.completed:
            return False, False
        if self.max_length is not None and len(history.tokens) > self.max_length:
            return True, True
        last = history.last_text_segment
        calls = self.request_token in last and self.call_token in last
        ends = self.submit_token in last or (model_turn and not calls)
        return False, ends or bool((history.tokens[history.token_spans[0][1] :] == self.tokenizer.eos_token_id).any())

    def _encode(self, text: str) -> Tensor:
        ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids[0]
        return ids.to(self.current_device)

    @torch.no_grad()
    def _generate_batched(self, queries: list[Tensor], batch_size: int = 16) -> list[Tensor]:
        """Return what the model writes after each query, up to and with a call, an answer or EOS."""
        found = []
        pad = self.tokenizer.eos_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        for start in range(0, len(queries), batch_size):
            batch = queries[start : start + batch_size]
            width = max(map(len, batch))
            ids = torch.stack([torch.cat([query.new_full((width - len(query),), pad), query]) for query in batch])
            mask = torch.stack([torch.arange(width) >= width - len(query) for query in batch]).long().to(ids.device)
            stops = StringStoppingCriteria([self.call_token, self.submit_token], self.tokenizer)
            written = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                stopping_criteria=[stops],
                **{"pad_token_id": pad, "eos_token_id": self.tokenizer.eos_token_id, **self.generation_kwargs},
            )
            for row, length in zip(written[:, width:], stops.generated_tokens, strict=True):
                ended = (row[:length] == self.tokenizer.eos_token_id).nonzero()
                found.append(row[: int(ended[0]) + 1] if len(ended) else row[:length])
        return found


__getattr__ = refusing(__name__)
