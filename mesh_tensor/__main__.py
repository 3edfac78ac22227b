"""`python -m mesh_tensor`, and the command `mesh-tensor`: see `--help`."""

import sys

from .api.cli import main


def run() -> None:
    """The command."""
    sys.exit(main())


if __name__ == "__main__":
    run()
