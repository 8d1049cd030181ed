"""Writes reports: pictures and page of one run, or of several, of which those equal but for the seed are averaged."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from server_app.errors import PicturesUnavailable, ReportError
from server_app.report.compare import Group, comparison_markdown, group_runs
from server_app.report.runs import Run, load_run, malformed
from task.utils.atomic import write_atomically


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> list[Path]:
    """Write the tables and pictures of one run, or the comparison of several, and return their paths.

    A folder named twice counts once. ``output`` is made if needed; a single run's own folder is the default.

    Raises:
        ReportError: no folder given, a run's files missing or broken, or no folder to write the comparison to.
        PicturesUnavailable: a package is missing; nothing is written.
    """
    runs = [load_run(Path(folder)) for folder in {Path(f).resolve(): f for f in run_dirs}.values()]
    if not runs:
        raise ReportError("no run directory was given")
    if len(runs) == 1:
        with _readable([runs[0].folder]):
            return _write(output or runs[0].folder, _draw_run(runs[0]))
    if output is None:
        raise ReportError(f"{len(runs)} runs are compared in a folder of their own: name one with --output DIR")
    if output.resolve() in [run.folder.resolve() for run in runs]:
        raise ReportError(f"{output} is a run's own folder: the comparison would overwrite that run's report")
    with _readable([run.folder for run in runs]):
        return write_comparison(group_runs(runs), output, f"Comparison of {len(runs)} runs")


def write_comparison(
    groups: Sequence[Group], folder: Path, title: str, notes: Mapping[str, Sequence[str]] | None = None
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
    pictures = {name: figures.png(figure) for name, figure in drawings.items()}
    page = pages.comparison_page(groups, pictures, title, notes or {})
    table = comparison_markdown(groups, notes or {})
    return _write(folder, pictures | {"table.md": table.encode(), "report.html": page.encode()})


def _draw_run(run: Run) -> dict[str, bytes]:
    with required_packages():
        from server_app.report import figures, heatmaps, pages
    drawings = {"accuracy.png": figures.accuracy_figure(run), "forgetting.png": figures.matrix_figure(run)}
    drawings |= heatmaps.recorded_figures(run)
    pictures = {name: figures.png(figure) for name, figure in drawings.items()}
    return pictures | {"report.html": pages.single_page(run, pictures).encode()}


@contextlib.contextmanager
def _readable(folders: Sequence[Path]) -> Iterator[None]:
    """Turn what a malformed results.json leads to while its report is drawn into one error."""
    try:
        yield
    except ReportError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise malformed(folders, error) from error


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
