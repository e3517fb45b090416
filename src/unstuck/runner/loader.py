"""Find the app that "module:attribute" names, or say exactly why there is none."""

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from unstuck.domain.errors import ConfigError, UnstuckError
from unstuck.domain.names import did_you_mean
from unstuck.runner.tasks import Registry
from unstuck.runner.tracebacks import user_place, user_traceback

DEFAULT_ATTRIBUTE = "app"
_CURE = "Name it as module:attribute, for example app:app."


def load_registry(target: str, url: str | None = None) -> Registry:
    """Import the module from the working directory or the path, and return the app in it, on the ledger of `url`."""
    module_name, attribute = _parse(target)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(module_name, target)
    registry = _checked(_walk(module, module_name, attribute), module_name, attribute)
    if url is not None:
        registry.use_ledger(url)
    return registry


def _parse(target: str) -> tuple[str, str]:
    module_name, colon, attribute = target.partition(":")
    attribute = attribute or DEFAULT_ATTRIBUTE
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigError(f"{target!r} names a file, not a module. Use {dotted}:{attribute}.")
    names = [*module_name.split("."), *attribute.split(".")]
    if not module_name or not all(name.isidentifier() for name in names) or (colon and target.endswith(":")):
        raise ConfigError(f"{target!r} does not name an app. {_CURE}")
    return module_name, attribute


def _import(module_name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == module_name or module_name.startswith(f"{missing}."):
            raise ConfigError(
                f"There is no module {missing!r} in {os.getcwd()} or on the Python path."
                f"{did_you_mean(module_name, _modules_here())} Start in the directory that holds it. {_CURE}"
            ) from None
        raise ConfigError(_broken(module_name, error)) from error
    except UnstuckError as error:
        # What we refused ourselves is a sentence with its cure: only the place in the user's code is missing.
        raise ConfigError(f"{user_place(error)}{error}") from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise ConfigError(_broken(module_name, error)) from error


def _broken(module_name: str, error: BaseException) -> str:
    return f"The module {module_name!r} could not be imported; mend this first:\n\n{user_traceback(error)}"


def _modules_here() -> list[str]:
    try:
        return [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    except OSError:
        return []


def _walk(module: ModuleType, module_name: str, attribute: str) -> Any:
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            apps = [known for known, value in vars(module).items() if _is_registry(value)]
            hint = did_you_mean(name, [*apps, *vars(module)])
            if apps and not hint:
                hint = f" Did you mean {apps[0]!r}?"
            if not apps and not hint:
                hint = f" Write `{DEFAULT_ATTRIBUTE} = App()` in it."
            raise ConfigError(f"The module {module_name!r} has no {attribute!r}.{hint} {_CURE}") from None
    return found


def _checked(found: Any, module_name: str, attribute: str) -> Registry:
    if not _is_registry(found):
        what = "the class" if isinstance(found, type) else "of type"
        name = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigError(
            f"{module_name}:{attribute} is not an app: it is {what} {name}. Point to the App object that your tasks "
            "are registered with."
        )
    return cast(Registry, found)


def _is_registry(value: Any) -> bool:
    if isinstance(value, type):
        return False
    try:
        return all(hasattr(value, name) for name in ("queues", "manifest_settings")) and isinstance(
            value.definitions, Mapping
        )
    except Exception:  # noqa: BLE001 - objects with a broken __getattr__ are no apps
        return False
