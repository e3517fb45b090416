"""See before anything is sent whether the targets can be told at all."""

from unstuck.config import Alerts
from unstuck.notify.alerts.apprise_target import check_apprise
from unstuck.notify.alerts.targets import Target, read_targets


def usable_targets(rules: Alerts) -> list[Target]:
    """Give the targets; ConfigError where one of them can never be told.

    Loads what they need: that takes Apprise seconds, which are no time of any message."""
    targets = read_targets(rules)
    for target in targets:
        if not target.is_webhook:
            check_apprise(target)
    return targets
