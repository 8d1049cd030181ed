"""What ends a run, in words for people."""


class RunError(RuntimeError):
    """The run cannot go on; what was saved so far stays."""


class LaunchError(RuntimeError):
    """The run cannot be started."""


class ExportError(RuntimeError):
    """A model cannot be written in the form that was asked for."""
