"""Send a trial message to every target at once, and say of each whether it arrived."""

import secrets
import time

import msgspec

from unstuck.config import Alerts
from unstuck.notify.alerts.checking import usable_targets
from unstuck.notify.alerts.message import trial
from unstuck.notify.alerts.outcomes import Arrived, Lost
from unstuck.notify.alerts.sending import Send

MARGIN_S = 1.0


class Trial(msgspec.Struct, frozen=True):
    target: str
    arrived: bool
    why: str = ""


def try_targets(rules: Alerts) -> list[Trial]:
    sends = [Send(target, trial(), secrets.token_hex(16), rules) for target in usable_targets(rules)]
    deadline_s = time.monotonic() + rules.send_timeout_s + MARGIN_S
    trials = []
    for send in sends:
        outcome = send.wait(max(0.001, deadline_s - time.monotonic()))
        match outcome:
            case Arrived():
                trials.append(Trial(send.target.shown, True))
            case Lost(reason):
                trials.append(Trial(send.target.shown, False, reason))
            case None:
                trials.append(Trial(send.target.shown, False, f"no answer within {rules.send_timeout_s:g}s"))
    return trials
