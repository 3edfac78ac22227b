"""`python -m mesh_tensor`: see `--help`."""

import sys

from .api.cli import main

if __name__ == "__main__":
    sys.exit(main())
