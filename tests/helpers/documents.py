"""The documentation as tests read it: its pages, their commands and their links."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/LEDGER.md", "docker/README.md")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*(ROOT / name for name in OTHERS), *sorted((ROOT / "docs").rglob("*.md")))
    if path.name != "keys.md"  # the site has a made page in its place
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, kind: str) -> list[str]:
    """The contents of the page's code blocks of one kind."""
    return [text for language, text in FENCED.findall(PAGES[page]) if language == kind]


def prose(page: str) -> str:
    """The page without its code blocks."""
    return FENCED.sub("", PAGES[page])


def commands(page: str) -> list[list[str]]:
    """The words of every command of the page, without the variables that are set before it."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    split = (shlex.split(line, comments=True) for line in lines)
    stripped = [words[next((i for i, w in enumerate(words) if not re.match(r"[A-Z_]+=", w)), 0) :] for words in split]
    return [words for words in stripped if words]


def section(page: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    return PAGES[page].split(f"\n## {heading}\n")[1].split("\n## ")[0]
