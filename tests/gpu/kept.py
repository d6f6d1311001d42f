"""Machine code of kernels, kept where an engine keeps it: HEADROOM_HOME, or the user's cache."""

from headroom.layers.gpu import keep_code as keep_below
from headroom.options import load_options


def keep_code() -> None:
    """Let this process find what others compiled, and keep what it compiles."""
    keep_below(load_options({}).home_path)
