"""Import the user's app, describe its tasks, and decide whether the process may be forked."""

import importlib
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from unstuck.domain.text import did_you_mean
from unstuck.errors import ConfigError, UnstuckError
from unstuck.runner.call import user_place, user_traceback
from unstuck.runner.tasks import AppDefinition, DefinesApp, Manifest, TaskEntry


def manifest_of(app: AppDefinition, why_spawn: str) -> Manifest:
    """Return what the fork server reports to the worker of an app."""
    tasks = tuple(
        TaskEntry(definition.name, definition.queue, definition.is_async, definition.policy)
        for definition in app.tasks.values()
    )
    return Manifest(
        tasks,
        app.settings,
        not why_spawn,
        why_spawn,
        tuple(sorted(app.queues)),
        dict(app.limits),
        schedules=app.schedules,
        note=app.note,
    )


_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")
_MAX_NAMED = 3


def descriptors() -> dict[int, str]:
    """Give the open descriptors of this process and what they are."""
    found = {}
    try:
        for entry in os.listdir("/proc/self/fd"):
            try:
                found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
            except OSError:
                continue
    except OSError:
        pass
    return found


def why_not_fork(before: dict[int, str]) -> str:
    """Say what the import left behind that would not survive a fork; empty when nothing did."""
    reasons = [*_threads()]
    for fd, target in descriptors().items():
        if before.get(fd) == target:
            continue
        if target.startswith("socket:"):
            reasons.append(f"an open socket (descriptor {fd})")
        elif target.startswith(_GPU_DEVICES):
            reasons.append(f"a GPU context ({target})")
    if not reasons:
        return ""
    more = f" and {len(reasons) - _MAX_NAMED} more" if len(reasons) > _MAX_NAMED else ""
    return f"importing the app left {', '.join(reasons[:_MAX_NAMED])}{more}, which cannot be forked"


def _threads() -> list[str]:
    named = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    reasons = [f"the thread {thread.name!r}" for thread in named]
    try:
        count = len(os.listdir("/proc/self/task"))
    except OSError:
        return reasons
    known = {thread.native_id for thread in named} | {threading.main_thread().native_id}
    native = [entry for entry in os.listdir("/proc/self/task") if int(entry) not in known] if count > 1 else []
    for entry in native:
        try:
            name = Path(f"/proc/self/task/{entry}/comm").read_text().strip()
        except OSError:
            continue
        reasons.append(f"a thread of native code ({name})")
    return reasons


DEFAULT_ATTRIBUTE = "app"
_CURE = "Name it as module:attribute, for example app:app."


def load_app(target: str, url: str | None = None) -> AppDefinition:
    """Import the module from the working directory or the path, and define the app in it, on the ledger of `url`."""
    module_name, attribute = _parse(target)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(module_name, target)
    app = _checked(_walk(module, module_name, attribute), module_name, attribute)
    if url is not None:
        app.use_ledger(url)
    return app.definition()


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
            apps = [known for known, value in vars(module).items() if _is_app(value)]
            hint = did_you_mean(name, [*apps, *vars(module)])
            if apps and not hint:
                hint = f" Did you mean {apps[0]!r}?"
            if not apps and not hint:
                hint = f" Write `{DEFAULT_ATTRIBUTE} = App()` in it."
            raise ConfigError(f"The module {module_name!r} has no {attribute!r}.{hint} {_CURE}") from None
    return found


def _checked(found: Any, module_name: str, attribute: str) -> DefinesApp:
    if not _is_app(found):
        what = "the class" if isinstance(found, type) else "of type"
        name = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ConfigError(
            f"{module_name}:{attribute} is not an app: it is {what} {name}. Point to the App object that your tasks "
            "are registered with."
        )
    return cast(DefinesApp, found)


def _is_app(value: Any) -> bool:
    # Asked of the class: an object with a __getattr__ of its own may seem to have every method, or may raise.
    return all(callable(getattr(type(value), name, None)) for name in ("definition", "use_ledger"))
