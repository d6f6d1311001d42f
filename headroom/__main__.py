"""Runs the command `headroom` for `python -m headroom`."""

from headroom.cli.main import main

if __name__ == "__main__":
    main()
