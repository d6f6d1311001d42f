"""Machine code of kernels, kept where an engine keeps it: HEADROOM_HOME, or the user's cache."""

from headroom.kernels.cuda.compile import CODE
from headroom.options import load_options


def keep_code() -> None:
    """Let this process find what others compiled, and keep what it compiles."""
    CODE.open(load_options({}).home_path)
