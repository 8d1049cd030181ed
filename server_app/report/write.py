"""Writes reports: pictures and page of one run, or of several; runs that differ in the seed only are averaged."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from server_app.errors import PicturesUnavailable, ReportError
from server_app.report.compare import Group, comparison_markdown, group_runs
from server_app.report.recommend import doubt_copies, doubt_repeats
from server_app.report.runs import SavedRun, load_run, malformed
from task.utils.atomic import write_atomically

log = logging.getLogger(__name__)


def write_report(
    run_dirs: Sequence[Path], output: Path | None = None, on_error: Callable[[ReportError], object] | None = None
) -> list[Path]:
    """Write the tables and pictures of one run, or the comparison of several, and return their paths.

    A folder named twice counts once. ``output`` is made if needed; a single run's own folder is the default. A
    comparison leaves out a run that cannot be read: the log names it, ``on_error`` is told, and the title says how many
    runs are shown.

    Raises:
        ReportError: no folder given, no run's files can be read, or no folder to write the comparison to.
        PicturesUnavailable: a package is missing; nothing is written.
    """
    folders = {Path(folder).resolve(): Path(folder) for folder in run_dirs}
    if not folders:
        raise ReportError("no run directory was given")
    if len(folders) == 1:
        run = load_run(*folders.values())
        try:
            files = _draw_run(run)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise malformed(run.folder, error) from error
        return _write(output or run.folder, files)
    if output is None:
        raise ReportError(f"{len(folders)} runs are compared in a folder of their own: name one with --output DIR")
    if output.resolve() in folders:
        raise ReportError(f"{output} is a run's own folder: the comparison would overwrite that run's report")
    runs = list[SavedRun]()
    for folder in folders.values():
        try:
            runs.append(load_run(folder))
        except ReportError as error:
            log.warning("left out: %s", error)
            if on_error:
                on_error(error)
    if not runs:
        raise ReportError("no run can be read")
    number = f"{len(runs)} runs" if len(runs) == len(folders) else f"{len(runs)} of {len(folders)} runs"
    groups = group_runs(runs)
    doubts = [*doubt_copies(groups), *doubt_repeats(groups)]
    return write_comparison(groups, output, f"Comparison of {number}", {"Doubts": doubts} if doubts else {})


def write_comparison(
    groups: Sequence[Group], folder: Path, title: str, notes: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Write the table and pictures of groups of runs, in their order, and return their paths.

    ``notes`` are lines of text by their heading.

    Raises:
        PicturesUnavailable: a package is missing; nothing is written.
    """
    with required_packages():
        from server_app.report import figures, pages, tradeoffs
    begun = [group for group in groups if group.runs]
    drawings = {"accuracy.png": figures.comparison_figure(begun)} if begun else {}
    if any(group.finished for group in begun):
        drawings["matrices.png"] = figures.matrices_figure(begun)
    costs = {"communication.png": tradeoffs.communication_figure, "core_minutes.png": tradeoffs.core_minutes_figure}
    drawings |= {name: figure for name, draw in costs.items() if (figure := draw(begun))}
    pictures = {name: figures.small_png(figure) for name, figure in drawings.items()}
    page = pages.comparison_page(groups, pictures, title, notes)
    table = comparison_markdown(groups, notes)
    return _write(folder, pictures | {"table.md": table.encode(), "report.html": page.encode()})


def _draw_run(run: SavedRun) -> dict[str, bytes]:
    with required_packages():
        from server_app.report import figures, heatmaps, pages
    drawings = {"accuracy.png": figures.accuracy_figure(run), "forgetting.png": figures.matrix_figure(run)}
    drawings |= heatmaps.recorded_figures(run)
    pictures = {name: figures.small_png(figure) for name, figure in drawings.items()}
    return pictures | {"report.html": pages.single_page(run, pictures).encode()}


@contextlib.contextmanager
def required_packages() -> Iterator[None]:
    """Turn an ImportError into :class:`PicturesUnavailable`."""
    try:
        yield
    except ImportError as error:
        packages = "'matplotlib>=3.9' 'jinja2>=3.1'"
        raise PicturesUnavailable(f"pictures and pages need matplotlib and jinja2: pip install {packages}") from error


def _write(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)  # the report of a running run may be open in a browser
    return [folder / name for name in files]
