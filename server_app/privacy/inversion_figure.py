"""The picture of ``fcil privacy``: real images above, their reconstructions below."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from server_app.privacy.inversion import Inversion
from server_app.report.figures import INK, make_figure


def inversions_figure(inversions: Sequence[Inversion], title: str, subtitle: str) -> Figure:
    """One column for each class: its most similar real image, its reconstruction, and their SSIM."""
    figure = make_figure(max(5.5, 1.5 * len(inversions) + 1), 4.6, title, subtitle)
    axes = figure.subplots(2, len(inversions), squeeze=False)
    for column, inversion in enumerate(inversions):
        _show(axes[0, column], inversion.real)
        _show(axes[1, column], inversion.reconstruction)
        axes[0, column].set_title(f"{inversion.name}, n = {inversion.images}", fontsize=10, color=INK)
        axes[1, column].set_xlabel(f"SSIM {inversion.ssim:.2f}", fontsize=10, color=INK)
    axes[0, 0].set_ylabel("most similar real image", color=INK)
    axes[1, 0].set_ylabel("reconstruction", color=INK)
    return figure


def _show(axes: Axes, image: np.ndarray) -> None:
    axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
