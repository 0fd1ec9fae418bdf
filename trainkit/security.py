"""What a configuration must not reveal or decide: secrets, paths out of a directory, and whether others' code runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MASK = "**********"
"""What is shown and saved in place of a secret."""
_SECRET = re.compile(r"token|(hf|hub|(\w*_)?(auth|access))_token|(\w*_)?(password|secret)|\w*api_?key")
HUB_TOKENS = ("token", "hf_token", "use_auth_token")
"""The names that transformers has had for the token of the hub."""


def is_secret(key: object) -> bool:
    """Return whether the value of a setting called ``key`` is secret: ``token``, ``api_key``, not ``pad_token``."""
    return _SECRET.fullmatch(str(key).lower().replace("-", "_")) is not None


def names_secret(variable: str) -> bool:
    """Return whether an environment variable of this name holds a secret: ``HF_TOKEN``, ``AWS_SECRET_ACCESS_KEY``."""
    return re.search(r"token|secret|passw|credential|(api|access|private)_?key", variable.lower()) is not None


class Secret(str):
    """Text whose ``repr`` is a mask, so that neither a mapping that holds it nor an error message shows it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MASK)


def hidden(value: Any) -> Any:
    """Return plain data with a mask in place of each secret."""
    return _changed(value, lambda _: MASK)


def guarded(value: Any) -> Any:
    """Return plain data in which each secret is a `Secret`."""
    return _changed(value, lambda secret: Secret(secret))


def _changed(value: Any, change: Callable[[Any], Any], secret: bool = False) -> Any:
    """Return plain data with ``change(value)`` in place of each secret; ``token: true`` and empty text are none."""
    if isinstance(value, Mapping):
        return {key: _changed(item, change, secret or is_secret(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_changed(item, change, secret) for item in value]
        return items if isinstance(value, list) else tuple(items)
    holds = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return change(value) if secret and holds else value


def filled(plain: Any, environment: Mapping[str, str]) -> tuple[Any, list[str]]:
    """Return plain data with the secrets that its masks stand for, and a line for each that is not known.

    They are taken from the ``environment``: ``HF_TOKEN`` for the token of the hub, and ``NAME_KEY`` for the setting
    ``key`` of the plugin ``name``.
    """
    missing = []

    def fill(value: Any, path: tuple[str, ...], owner: str) -> Any:
        if isinstance(value, Mapping):
            owner = str(value.get("name", owner))
            return {key: fill(item, (*path, str(key)), owner) for key, item in value.items()}
        if isinstance(value, list):  # of texts that are no secrets, such as stop sequences, any text is itself
            secret = any(map(is_secret, path))
            return [fill(item, path, owner) if secret or not isinstance(item, str) else item for item in value]
        if value != MASK:
            return value
        variable = _variable(path, owner)
        if known := environment.get(variable):
            return Secret(known)
        where = f"{'.'.join(path)}{f' ({owner})' * bool(owner)}"
        missing.append(f"{where}: {f'set {variable} in the environment, or ' * bool(variable)}give it again")
        return value

    return fill(plain, (), ""), missing


def _variable(path: tuple[str, ...], owner: str) -> str:
    """Return the environment variable that has the secret at ``path``; empty if there is none."""
    if path[0] in ("model", "tokenizer"):
        return "HF_TOKEN" if path[-1] in HUB_TOKENS else ""
    return re.sub(r"\W", "_", f"{owner}_{path[-1]}").upper() if owner else ""


def file_name(text: str) -> str:
    """Return ``text`` as the name of a file or directory, which cannot lead out of the directory that it is in."""
    return re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII)[:100].lstrip(".") or "_"


# ---------------------------------------------------------------------------------------------------- remote code

TRUST = "trust_remote_code"
_RUNS_CODE: dict[str, Callable[[Any], bool]] = {
    "weights_only": lambda value: value is not None and not value,  # unpickles weights
    "use_kernels": bool,  # kernels are code, from the hub
    "allow_all_kernels": bool,
    "kernel_config": bool,
    "attn_implementation": lambda value: "/" in str(value),  # a kernel's repository
    "experts_implementation": lambda value: "/" in str(value),
    "custom_pipeline": bool,  # of diffusers
    "megatron_config": bool,  # peft then imports the module that megatron_core names
}
"""Settings of the libraries that load models by which code of others runs, and the values that do it."""


def code_settings(plain: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of the settings by which code that is not installed would run."""
    if isinstance(plain, list | tuple):
        for item in plain:
            yield from code_settings(item, path)
    if not isinstance(plain, Mapping):
        return
    for key, value in plain.items():
        here, name = f"{path}{key}", str(key).lower().replace("-", "_")
        # an option of a command line may be abbreviated, such as vLLM's
        runs_code = bool if len(name) > 4 and TRUST.startswith(name) else _RUNS_CODE.get(name.lstrip("_"))
        if runs_code is not None and runs_code(value):
            yield here
        else:
            yield from code_settings(value, f"{here}.")
