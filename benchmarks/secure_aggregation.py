"""Bytes and processor seconds of a secure sum of 3, 10 and 100 clients, without training or Flower.

python -m benchmarks.secure_aggregation                           20,000 numbers, and 1,000,000
python -m benchmarks.secure_aggregation --clients 3 --numbers 7   any other

Every client is asked in this process, one after another; its seconds are its own work in all four messages. A tenth of
the clients, at least one, is lost after it has shared its keys, which is the dearer case for the server.
"""

import argparse
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from client_app.client import handle
from client_app.node import Node
from client_app.secure_aggregation import hide_in_sum
from server_app.clients.client_info import ClientInfo
from server_app.run_files.results import RoundReport
from server_app.secure_aggregation.secure_sum import SecureSum
from server_app.transport.base import Reply
from task.config.parsing import parse
from task.message import Kind, Packet, Scalar, payload_bytes

LARGEST = 1e9


@dataclass
class Clients:
    """A transport to clients that add ``values`` each; ``lost`` of them do not answer with their part of the sum."""

    values: np.ndarray
    number: int
    lost: int
    one_process: bool = True
    seconds: float = 0.0
    bytes: Counter[str] = field(default_factory=Counter)  # of all clients, by message and direction

    def __post_init__(self) -> None:
        self._nodes = {i: Node({}) for i in range(self.number)}

    def nodes(self) -> list[int]:
        """All of them."""
        return list(self._nodes)

    def busy(self) -> set[int]:
        """None."""
        return set()

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterator[Reply]:
        """Ask each client in turn, and count."""
        for node, packet in packets.items():
            started = time.process_time()
            answer = self._answer(kind, node, packet)
            self.seconds += time.process_time() - started
            size = payload_bytes(packet), payload_bytes(answer)
            self.bytes += Counter({f"{kind} down": size[0], f"{kind} up": size[1]})
            gone = kind == "train" and node < self.lost
            yield Reply(node, None if gone else answer, "lost" if gone else "", *size)

    def _answer(self, kind: Kind, node: int, packet: Packet) -> Packet:
        if kind == "train":
            return Packet({"hidden": hide_in_sum(self.values, LARGEST, packet, self._nodes[node])})
        return handle(kind, packet, self._nodes[node])


def measure(number: int, length: int) -> str:
    """One line of the table."""
    clients = Clients(np.linspace(-1000, 1000, length), number, max(1, number // 10))
    keys: dict[str, Scalar] = {"method": "fedavg", "secure-aggregation": "pairwise", "num-clients": number}
    threshold = parse(keys).unmask_threshold(number)
    none = np.empty(0)
    infos = [ClientInfo(f"{i}", i, (), none, none, none, 0, (), (), "", "", (), "", 0) for i in range(number)]
    server, started = SecureSum(clients, infos, threshold, 0.0, RoundReport(1, 1, [])), time.process_time()
    total, _ = server.collect("train", Packet(), length, LARGEST)
    seconds = time.process_time() - started
    left = number - clients.lost
    assert np.allclose(total, left * clients.values, rtol=0, atol=1e-3)
    sizes = [clients.bytes[f"{kind} {way}"] // number for kind in ("keys", "shares") for way in ("down", "up")]
    sizes += [
        clients.bytes["train up"] // number,
        clients.bytes["unmask down"] // left,
        clients.bytes["unmask up"] // left,
    ]
    columns = [f"{value:,}" for value in (number, threshold, length, *sizes)]
    columns += [f"{clients.seconds / number:.3f}", f"{seconds - clients.seconds:.2f}"]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 10, 100])
    parser.add_argument("--numbers", type=int, nargs="+", default=[20_000, 1_000_000])
    given = parser.parse_args()
    print(f"bytes of one client by message, without the train message down; Python {platform.python_version()}")
    print("| clients | threshold | numbers | keys down | up | shares down | up | sum up | unmask down | up | ", end="")
    print("seconds of a client | of the server |\n|" + "---|" * 12)
    for length in given.numbers:
        for number in given.clients:
            print(measure(number, length), flush=True)


if __name__ == "__main__":
    main()
