"""start_logging(): the one log format, time, level and message; messages begin with a topic."""

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def start_logging(level: str = "info") -> None:
    """Send the package's log lines of `level` and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("headroom")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
