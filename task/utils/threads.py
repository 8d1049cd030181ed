"""Independent jobs side by side in threads."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from task.utils.cores import cores


def run_in_threads(jobs: Iterable[Callable[[Event], float]], device: torch.device) -> list[float]:
    """Results of independent jobs in threads: one on a GPU, else as many as there are cores beside torch's own threads.

    The number changes no result. Each job is given a stop event, which is set when the run is interrupted.
    """
    number = max(1, cores() // torch.get_num_threads()) if device.type == "cpu" else 1
    stop = Event()
    with ThreadPoolExecutor(number) as threads:
        try:
            return list(threads.map(lambda job: job(stop), jobs))
        finally:
            stop.set()
