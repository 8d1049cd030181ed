"""A small CODA prompt and the queries of five images."""

import torch

from task.prompts.coda import CodaPrompt
from tests.helpers.prompts import prompt_config

J, M, T, L, D, B = 2, 3, 4, 2, 16, 5  # blocks, components of a task, tasks, vectors, dimension, images
BLOCKS = (0, 3)
QUERY = torch.randn(B, D, generator=torch.Generator().manual_seed(0))


def drawn(penalty: float, seed: int) -> CodaPrompt:
    """Before its first task."""
    keys = {"num_tasks": T, "prompt_orthogonality": penalty, "seed": seed}
    return CodaPrompt(prompt_config(BLOCKS, L, M * T, **keys), D)


def coda(tasks: int, penalty: float = 0.1, seed: int = 0) -> CodaPrompt:
    """In its so many-th task, none of its numbers a special one."""
    prompt = drawn(penalty, seed)
    for task in range(tasks):
        prompt.begin_task(task)
    with torch.no_grad():
        for p in prompt.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return prompt
