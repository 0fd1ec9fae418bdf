"""Discovery, validation, registration and templates of plugins. Each name is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins.lazy import lazy_names

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
    from trainkit.plugins.hooks import HookManager, add_callback, hook_manager
    from trainkit.plugins.hookspecs import hookimpl
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

__all__ = [
    "BUILT_IN",
    "HookManager",
    "PluginInfo",
    "add_callback",
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
__getattr__, __dir__ = lazy_names(__name__, __all__, "discovery", "files", "hookspecs", "registry", "hooks")
