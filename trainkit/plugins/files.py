"""Import of the functions and files that a user names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from trainkit.errors import ConfigError, TrainkitError, suggest


def load_function(reference: str) -> Callable[..., Any]:
    """Return the function or class that ``FILE.py:NAME`` or ``module:NAME`` names.

    Raises:
        ConfigError: it is not of that form, there is no such file, module or function, or importing it failed.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise ConfigError(f"given {reference!r}; write FILE.py:NAME or module:NAME")
    module = load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        functions = _own(module)
        raise ConfigError(
            f"{source} has no function or class {name!r}{suggest(name, functions)}; it has: "
            f"{', '.join(functions) or 'none'}"
        )
    return function


def _own(module: ModuleType) -> list[str]:
    """Return the names of the functions and classes that are defined in a module, not imported into it."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def load_file(path: Path) -> ModuleType:
    """Import a file once, and return its module. The file can import modules in its own folder.

    The module has the name of the file, or FOLDER_FILE if that name is taken.

    Raises:
        ConfigError: there is no such file, or importing it failed.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r} (the working directory is {Path.cwd()})")
    path = path.resolve()
    name = path.stem if _is_at(sys.modules.get(path.stem), path) else f"{path.parent.name}_{path.stem}"
    if name in sys.modules and _is_at(sys.modules[name], path):
        return sys.modules[name]
    _search_last(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    try:
        with _explained(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    _search_last(Path.cwd())
    with _explained(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not f"{name}.".startswith(f"{error.name}."):
                raise
            files = [path.name for path in Path.cwd().glob("*.py")]
            raise ConfigError(
                f"there is no module {name!r}{suggest(name, files) or '.'} Write FILE.py:NAME, or module:NAME of a "
                "module that is installed"
            ) from error


def _is_at(module: ModuleType | None, path: Path) -> bool:
    """Return whether ``module`` is the one of ``path``, or None: its name is free."""
    return module is None or getattr(module, "__file__", None) == str(path)


def _search_last(folder: Path) -> None:
    """Append ``folder`` to the import path, after installed modules: a file `datasets.py` in it must not hide any."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@contextmanager
def _explained(source: str) -> Iterator[None]:
    try:
        yield
    except TrainkitError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"{source} needs the module {error.name!r}, which is not found; install it") from error
    except Exception as error:
        raise ConfigError(f"importing {source} failed: {type(error).__name__}: {error}") from error
