"""Discovery, validation, registration and templates of plugins. Each name is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.plugins.discovery import (
        BUILT_IN,
        PluginInfo,
        disabled,
        discover,
        find_plugin,
        load_plugin,
    )
    from trainkit.plugins.files import load_file, load_function
    from trainkit.plugins.hooks import HookManager, hook_manager
    from trainkit.plugins.hookspecs import hookimpl
    from trainkit.plugins.lazy import lazy_names
    from trainkit.plugins.registry import (
        available_trainers,
        get_engine,
        get_hooks,
        get_method_class,
        get_sharding,
        get_trainer,
        is_registered,
        register_engine,
        register_hooks,
        register_sharding,
        register_tracker,
        register_trainer,
    )

_HOMES = {
    "BUILT_IN": "discovery",
    "HookManager": "hooks",
    "PluginInfo": "discovery",
    "available_trainers": "registry",
    "disabled": "discovery",
    "discover": "discovery",
    "find_plugin": "discovery",
    "get_engine": "registry",
    "get_hooks": "registry",
    "get_method_class": "registry",
    "get_sharding": "registry",
    "get_trainer": "registry",
    "hook_manager": "hooks",
    "hookimpl": "hookspecs",
    "is_registered": "registry",
    "lazy_names": "lazy",
    "load_file": "files",
    "load_function": "files",
    "load_plugin": "discovery",
    "register_engine": "registry",
    "register_hooks": "registry",
    "register_sharding": "registry",
    "register_tracker": "registry",
    "register_trainer": "registry",
}

__all__ = [
    "BUILT_IN",
    "HookManager",
    "PluginInfo",
    "available_trainers",
    "disabled",
    "discover",
    "find_plugin",
    "get_engine",
    "get_hooks",
    "get_method_class",
    "get_sharding",
    "get_trainer",
    "hook_manager",
    "hookimpl",
    "is_registered",
    "lazy_names",
    "load_file",
    "load_function",
    "load_plugin",
    "register_engine",
    "register_hooks",
    "register_sharding",
    "register_tracker",
    "register_trainer",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"trainkit.plugins.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'trainkit.plugins' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
