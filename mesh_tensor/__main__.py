"""`python -m mesh_tensor`: see `--help`."""

import sys

from .api.cli import main

sys.exit(main())
