"""Table, picture and numbers of ``fcil privacy``."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from server_app.privacy.inversion import Inversion
from server_app.report.write import required_packages
from server_app.tables import align
from task.utils.atomic import write_atomically, write_json

NOTE = (
    "images: of this class, at the client. distance: of the reconstruction's features from those that were sent, by "
    "the norm of these. SSIM (1 = the same image): own = of the reconstruction and the client's image most like it; "
    "others = of the reconstruction and the image most like it at other clients; real = of the client's real images "
    "and those most like them at other clients. If own is higher than others, the statistics reveal this client's "
    "images; if both are alike, only the class. MSE: of the reconstruction and the client's nearest image, pixels in 0 "
    "to 1. P = 1 - 1 / (1 + MSE) (FedProK eq. 2), 0 = the image itself; P 255: the same for pixels in 0 to 255."
)


def format_table(inversions: Sequence[Inversion]) -> list[str]:
    """Lines of a table with one class in each, and a note on what its numbers mean."""
    titles = ("class", "images", "distance", "SSIM own", "others", "real", "MSE", "P", "P 255")
    rows: list[tuple[str, ...]] = [titles]
    for inversion in inversions:
        numbers = inversion.numbers()
        values = [numbers[x] for x in ("distance", "ssim", "ssim_others", "ssim_real", "mse", "p", "p_255")]
        rows.append((inversion.name, str(inversion.images), *("-" if x is None else f"{x:.3f}" for x in values)))
    return [*align(rows), NOTE]


def write_inversions(folder: Path, inversions: Sequence[Inversion], client: int, target: str) -> list[Path]:
    """Write privacy.json and privacy.png; returns their paths.

    Raises:
        PicturesUnavailable: matplotlib is missing; nothing is written.
        OSError: the folder cannot be written.
    """
    classes = [inversion.numbers() for inversion in inversions]
    means = {name: float(np.mean([numbers[name] for numbers in classes])) for name in ("ssim", "mse", "p", "p_255")}
    picture = _picture(inversions, f"client {client} · target: class {target} · mean SSIM {means['ssim']:.2f}")
    content = {"client": client, "target": target, **means, "note": NOTE, "classes": classes}
    write_json(folder / "privacy.json", content)
    write_atomically(folder / "privacy.png", picture)
    return [folder / "privacy.json", folder / "privacy.png"]


def _picture(inversions: Sequence[Inversion], subtitle: str) -> bytes:
    """One column for each class: its most similar real image, its reconstruction, and the SSIM of own and others."""
    with required_packages():
        from server_app.report.figures import INK, make_figure, png
    figure = make_figure(max(5.5, 1.5 * len(inversions) + 1), 4.6, "What class statistics give away", subtitle)
    panels = figure.subplots(2, len(inversions), squeeze=False)
    for (above, below), inversion in zip(panels.T, inversions, strict=True):
        for axes, image in ((above, inversion.real), (below, inversion.reconstruction)):
            axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        above.set_title(f"{inversion.name}, n = {inversion.images}", fontsize=10, color=INK)
        others = "-" if inversion.ssim_others is None else f"{inversion.ssim_others:.2f}"
        below.set_xlabel(f"SSIM own {inversion.ssim:.2f}\nothers {others}", fontsize=10, color=INK)
    panels[0, 0].set_ylabel("most similar real image", color=INK)
    panels[1, 0].set_ylabel("reconstruction", color=INK)
    return png(figure)
