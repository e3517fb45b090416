"""Send one message to one target, in a thread of its own and within a bound."""

import queue
import threading

from unstuck.config import Alerts
from unstuck.notify.alerts import apprise_target
from unstuck.notify.alerts.message import Message
from unstuck.notify.alerts.outcomes import Lost, Outcome
from unstuck.notify.alerts.targets import Target


class Send:
    """A try that is under way. Nobody waits for it longer than for its bound, whatever the target does."""

    def __init__(self, target: Target, message: Message, delivery: str, rules: Alerts) -> None:
        self.target = target
        self.delivery = delivery
        self._message = message
        self._rules = rules
        self._answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unstuck-alert-send", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Its thread has ended; while it has not, nothing else may be sent to this target from here."""
        return not self._thread.is_alive()

    def wait(self, patience_s: float) -> Outcome | None:
        """Give what became of it; None if that is not known yet."""
        try:
            return self._answers.get(timeout=patience_s) if patience_s > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None

    def _run(self) -> None:
        self._answers.put(deliver(self.target, self._message, self.delivery, self._rules))


def deliver(target: Target, message: Message, delivery: str, rules: Alerts) -> Outcome:
    try:
        if target.is_webhook:
            # With the first message: it brings HTTP and TLS, and most processes that could send never do.
            from unstuck.notify.alerts import webhook

            return webhook.post(
                target,
                message.facts,
                delivery,
                timeout_s=rules.send_timeout_s,
                allow_private=rules.allow_private,
            )
        return apprise_target.send(target, message)
    except Exception as error:  # noqa: BLE001 - one target's surprise must not keep the others from being told
        return Lost(f"sending failed with {type(error).__name__}", maybe_arrived=True)
