"""The table of clients in the log."""

from collections.abc import Sequence

import numpy as np

from server_app.clients.client_info import ClientInfo


def describe_clients(clients: Sequence[ClientInfo], max_lines: int = 40) -> list[str]:
    """A table of who takes part with what: a line for each of the first ``max_lines`` clients."""
    rows: list[tuple[str, ...]] = [("client", "images", "held out", "classes", "unreadable", "device", "versions")]
    for client in clients[:max_lines]:
        classes = np.count_nonzero(client.own_counts + client.test_counts)
        counts = (client.own_counts.sum(), client.test_counts.sum(), classes, client.unreadable)
        rows.append((client.name, *(str(n) for n in counts), client.device, ", ".join(client.versions)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return lines + ([f"and {len(clients) - max_lines} more"] if len(clients) > max_lines else [])
