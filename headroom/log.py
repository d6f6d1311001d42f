"""start_logging(): the one log format, time, level and message; messages begin with a topic."""

import logging
import sys


class StandardError(logging.Handler):
    """Writes to what standard error is now: a progress bar stands in for it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as logging's own handlers do: a log line must not end the program
            self.handleError(record)


def start_logging(level: str = "info") -> None:
    """Send the package's log lines of `level` and above to standard error."""
    handler = StandardError()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("headroom")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
