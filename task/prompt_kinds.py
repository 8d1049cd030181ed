"""The table of prompts: where each one's class is, and the defaults that go with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptKind:
    """One row of the table.

    Attributes:
        path: module:class.
        length: default of the run key prompt-length, L_p.
        pool: default of prompt-pool, the number of prompts in the pool.
        learning_rate: default of learning-rate, the local step size; a method's row may have another one.
        fewest_blocks: how many blocks must be prompted at least.
        shared_out: whether each task takes its own part of the pool.
    """

    path: str
    length: int = 1
    pool: int = 1
    learning_rate: float = 1e-3
    fewest_blocks: int = 1
    shared_out: bool = False


PROMPTS: dict[str, PromptKind] = {
    "none": PromptKind("task.prompts.base:Prompt"),
    "shared": PromptKind("task.prompts.shared:SharedPrompt", length=8),
    "decomposed": PromptKind("task.prompts.decomposed:DecomposedPrompt", length=10, pool=100),
    "coda": PromptKind("task.prompts.coda:CodaPrompt", length=4, pool=100, shared_out=True),
    "l2p": PromptKind("task.prompts.l2p:L2P", length=5, pool=10, learning_rate=0.02),
    "dualprompt": PromptKind("task.prompts.dualprompt:DualPrompt", length=5, learning_rate=0.02, fewest_blocks=3),
    "fused": PromptKind("task.prompts.fused:FusedPrompt", length=20),
    "lora": PromptKind("task.prompts.lora:LoRA", length=4, learning_rate=5e-3),
}
