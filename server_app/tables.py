"""Tables as text, for logs and the command line."""

from collections.abc import Collection, Iterable, Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], text: Collection[int]) -> str:
    """A table in Markdown; the columns whose indices are in ``text`` stand at the left, numbers at the right."""
    rule = ["---" if column in text else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
