"""The picture of ``fcil privacy``: real images above, what an attacker makes of the statistics below."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from server_app.privacy.inversion import Inversion
from server_app.report.figures import INK, titled


def inversions_figure(found: Sequence[Inversion], title: str, subtitle: str) -> Figure:
    """One column for each class: its most similar real image, its reconstruction, and how alike they are."""
    figure = titled(max(5.5, 1.5 * len(found) + 1), 4.6, title, subtitle)
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, one in enumerate(found):
        _show(axes[0, column], one.real)
        _show(axes[1, column], one.reconstruction)
        axes[0, column].set_title(f"{one.name}, n = {one.images}", fontsize=10, color=INK)
        axes[1, column].set_xlabel(f"SSIM {one.ssim:.2f}", fontsize=10, color=INK)
    axes[0, 0].set_ylabel("most similar real image", color=INK)
    axes[1, 0].set_ylabel("reconstruction", color=INK)
    return figure


def _show(axes: Axes, image: np.ndarray) -> None:
    axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
