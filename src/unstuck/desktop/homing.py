"""Have objects of Qt deleted in the thread that they live in, whichever thread finds that nobody needs them.

Python drops an object in the thread that lets go of it last, and garbage in whichever thread happens to collect. Qt
ends a process whose windows and timers go in a foreign one. So each object of ours asks Qt to delete it at home.
"""

from PySide6.QtCore import QObject, Qt
from shiboken6 import isValid, ownedByPython

_kept: dict[int, QObject] = {}


def keep(thing: QObject) -> None:
    """Hold it until Qt has deleted it, in its own thread; what is then left of it can be dropped in any."""
    key = id(thing)

    def let_go() -> None:
        _kept.pop(key, None)

    _kept[key] = thing
    thing.destroyed.connect(let_go, Qt.ConnectionType.DirectConnection)


def delete_at_home(thing: QObject) -> None:
    """For `__del__`: nobody in Python needs it any more. What has a parent goes with that one."""
    if not (isValid(thing) and ownedByPython(thing)):
        return
    try:
        keep(thing)
        thing.deleteLater()
    except RuntimeError:
        # Somebody else had asked Qt to delete it, and that has just been done.
        _kept.pop(id(thing), None)
