"""One finding of fcil doctor."""

from dataclasses import dataclass
from typing import Literal

GB = 1e9


@dataclass(frozen=True)
class Finding:
    """One line for people; ``advice`` says what to do about it."""

    level: Literal["ok", "warning", "problem"]
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}" + (f"; {self.advice}" if self.advice else "")
