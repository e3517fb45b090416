"""A plain Majordomo worker of the benchmark: echoes, or sleeps with what it got."""

import argparse
import time

import zmq

BEAT_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.majordomo_worker", description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("service")
    parser.add_argument("--sleep", type=float, default=0.0)
    given = parser.parse_args()
    socket = zmq.Context().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(given.endpoint)
    socket.send_multipart([b"", b"MDPW01", b"\x01", given.service.encode()])
    print("ready", flush=True)
    while True:
        if not socket.poll(int(1000 * BEAT_S)):
            socket.send_multipart([b"", b"MDPW01", b"\x04"])
            continue
        frames = socket.recv_multipart()
        if frames[2] == b"\x02":
            if given.sleep:
                print("busy", flush=True)
                time.sleep(given.sleep)
            socket.send_multipart([b"", b"MDPW01", b"\x03", frames[3], b"", *frames[5:]])


if __name__ == "__main__":
    main()
