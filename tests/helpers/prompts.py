"""Run keys of prompts of any shape, without a run."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from task.config.parsing import parse
from task.config.schema import Config


def prompt_config(blocks: Iterable[int] = (0,), length: int = 1, pool: int = 1, **others: Any) -> Config:
    """``blocks`` are counted from 0; ``others`` are further fields of the configuration."""
    written = ",".join(str(block + 1) for block in blocks)
    return replace(parse({}), prompt_blocks=written, prompt_length=length, prompt_pool=pool, **others)
