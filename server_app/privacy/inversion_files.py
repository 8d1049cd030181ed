"""Table, picture and numbers of ``fcil privacy``."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from server_app.privacy.inversion import Inversion
from server_app.report.write import required_packages
from task.utils.atomic import write_atomically

NOTE = (
    "SSIM of the reconstruction and the client's own image that is most like it (1 = the same), and of it and the most "
    "similar image of the class that other clients have; real: of the client's real images and theirs. P = 1 - SSIM. "
    "If own is higher than others, the statistics reveal this client's images; if both are alike, only the class."
)


def format_table(inversions: Sequence[Inversion]) -> list[str]:
    """Lines of a table with one class in each, and a note on what its numbers mean."""
    rows: list[tuple[str, ...]] = [("class", "images", "distance", "SSIM own", "others", "real", "P")]
    for inversion in inversions:
        numbers = (inversion.distance, inversion.ssim, inversion.ssim_others, inversion.ssim_real, 1 - inversion.ssim)
        rows.append((inversion.name, str(inversion.images), *("-" if x is None else f"{x:.3f}" for x in numbers)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows] + [NOTE]


def write_inversions(folder: Path, inversions: Sequence[Inversion], client: int, target: str) -> list[Path]:
    """Write privacy.json and privacy.png; returns their paths.

    Raises:
        PicturesUnavailable: matplotlib is missing; nothing is written.
        OSError: the folder cannot be written.
    """
    mean = float(np.mean([inversion.ssim for inversion in inversions]))
    picture = _picture(inversions, f"client {client} · target: class {target} · mean SSIM {mean:.2f}")
    content = {"client": client, "target": target, "ssim": mean, "p": 1 - mean, "note": NOTE}
    content |= {"classes": [inversion.numbers() for inversion in inversions]}
    write_atomically(folder / "privacy.json", (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(folder / "privacy.png", picture)
    return [folder / "privacy.json", folder / "privacy.png"]


def _picture(inversions: Sequence[Inversion], subtitle: str) -> bytes:
    """One column for each class: its most similar real image, its reconstruction, and their SSIM."""
    with required_packages():
        from server_app.report.figures import INK, make_figure, png
    figure = make_figure(max(5.5, 1.5 * len(inversions) + 1), 4.6, "What class statistics give away", subtitle)
    panels = figure.subplots(2, len(inversions), squeeze=False)
    for (above, below), inversion in zip(panels.T, inversions, strict=True):
        for axes, image in ((above, inversion.real), (below, inversion.reconstruction)):
            axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        above.set_title(f"{inversion.name}, n = {inversion.images}", fontsize=10, color=INK)
        below.set_xlabel(f"SSIM {inversion.ssim:.2f}", fontsize=10, color=INK)
    panels[0, 0].set_ylabel("most similar real image", color=INK)
    panels[1, 0].set_ylabel("reconstruction", color=INK)
    return png(figure)
