"""A worker of ours as a process: it says on stdout what it does.

python -m tests.mdp.python_worker ENDPOINT [--heartbeat SECONDS] [--several] [--plain]
"""

import argparse
import time

from unstuck.logs import setup
from unstuck.mdp import Call, Worker


def work(body: list[bytes], call: Call) -> list[bytes]:
    """Do what the first frame says: `sleep SECONDS`, `raise`, or nothing; and give back what came."""
    verb, _, rest = body[0].decode().partition(" ")
    print(f"working {call.service} {body[0].decode()}", flush=True)
    if verb == "sleep":
        time.sleep(float(rest))
    if verb == "progress":
        call.progress(1, 2, "half")
    if verb == "raise":
        raise ValueError("told to")
    return body


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--heartbeat", type=float, default=2.5)
    parser.add_argument("--several", action="store_true")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    setup()
    names = ["echo", "dotted.name"] if given.several else ["echo"]
    Worker(
        given.endpoint,
        dict.fromkeys(names, work),
        name="w1",
        heartbeat=given.heartbeat,
        metadata={"rack": 7},
        plain=given.plain,
    ).run()
    print("left", flush=True)


if __name__ == "__main__":
    main()
