"""`python -m headroom` is the same as the command `headroom`."""

from headroom.cli.main import main

if __name__ == "__main__":
    main()
