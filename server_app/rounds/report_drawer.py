"""The pictures and pages of a run, drawn while it goes on and at its end."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from server_app.errors import PicturesUnavailable
from server_app.report.write import write_report

log = logging.getLogger(__name__)


class ReportDrawer:
    """Draws the report of a run's folder, in a thread of its own while the run goes on.

    ``drawn`` gets the processor time of each drawing, in seconds.
    """

    def __init__(self, directory: Path, drawn: Callable[[float], None]) -> None:
        self._directory, self._drawn = directory, drawn
        self._executor, self._drawing = ThreadPoolExecutor(1, "report"), Future[None]()

    def draw_in_background(self) -> None:
        """Draw what is on the disk now; a drawing that has not begun yet is cancelled."""
        self._drawing.cancel()
        self._drawing = self._executor.submit(self.draw)

    def stop(self) -> None:
        """Wait for a drawing that has begun, and end the thread."""
        self._executor.shutdown(cancel_futures=True)

    def draw(self) -> None:
        """Draw what is on the disk; a failure is logged and ends nothing."""
        started = time.thread_time()
        try:
            write_report([self._directory])
        except (PicturesUnavailable, OSError) as error:
            log.warning("no report, %s; 'fcil report %s' draws it later", error, self._directory)
        except Exception:
            # a picture that cannot be drawn must not turn a finished run into a failed one
            log.exception("no report; 'fcil report %s' draws it later", self._directory)
        finally:
            self._drawn(time.thread_time() - started)
