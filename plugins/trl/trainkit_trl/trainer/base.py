"""The base class of the trainers with loops of their own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from trainkit.errors import ConfigError, describe
from trainkit_migrate import refusing
from trainkit_trl.overriding import Overridable

log = logging.getLogger(__name__)


class BaseTrainer(Overridable):
    """A trainer with a configuration: `step`, `loss` and `compute_rewards` are a subclass's."""

    card: ClassVar[dict[str, str]] = {"library_name": "", "tag": "", "text": ""}
    """What the model card says."""
    trainer: Any
    """The trainer of trainkit that computes."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def step(self, *args: Any) -> Any:
        """Train on a batch."""
        raise NotImplementedError(f"{type(self).__name__} should implement step")

    def loss(self, *args: Any) -> Any:
        """Return the loss of a batch."""
        raise NotImplementedError(f"{type(self).__name__} should implement loss")

    def compute_rewards(self, *args: Any) -> Any:
        """Return the rewards of a batch."""
        raise NotImplementedError(f"{type(self).__name__} should implement compute_rewards")

    def create_model_card(self, path: str | Path, model_name: str | None = "TRL Model") -> None:
        """Write a model card, README.md, to a directory."""
        text = (
            f"---\nlibrary_name: {self.card['library_name']}\ntags:\n- trainkit\n- {self.card['tag']}\n---\n\n"
            f"# {model_name}\n\n{self.card['text']}\n"
        )
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "README.md").write_text(text, encoding="utf-8")

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the model with what it needs and a model card; an adapter of a diffusion model is merged into it."""
        self._save_pretrained(save_directory)

    def _save_pretrained(self, save_directory: Any) -> None:
        if "trainer" not in vars(self):
            raise NotImplementedError(f"{type(self).__name__} should implement _save_pretrained")
        self.trainer.save_pretrained(save_directory)
        if self.overrides("create_model_card") and self.trainer.accelerator.is_main_process:
            self.create_model_card(save_directory)

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a trainer is made of a configuration and a model.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{cls.__name__} is not loaded from a directory; load the model from it, such as by "
            f"AutoModelForCausalLMWithValueHead.from_pretrained, and give it to {cls.__name__}"
        )

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Publish what `save_pretrained` writes.

        Args:
            repo_id: the repository; without an owner it is that of the token.
            **kwargs: ``private``, ``revision`` and ``token``.

        Raises:
            ConfigError: the name is none, or whose the token is is not known.
        """
        if not isinstance(repo_id, str):
            raise ConfigError(f"repo_id should be the name of a repository, as owner/name; given {describe(repo_id)}")
        if "/" not in repo_id:
            repo_id = f"{_owner(repo_id, kwargs.get('token'))}/{repo_id}"
        return self.trainer.push_to_hub(repo_id, **kwargs)


def _owner(repo: str, token: str | None) -> str:
    """Return whose the token is.

    Raises:
        ConfigError: the hub does not tell.
    """
    from huggingface_hub import whoami

    try:
        return str(whoami(token=token)["name"])
    except Exception as error:  # by the network, or for want of a token
        raise ConfigError(f"the owner of {repo!r} is not known ({error}); write owner/{repo}") from error


__getattr__ = refusing(__name__)
