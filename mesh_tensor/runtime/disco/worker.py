"""A worker process of Disco: `python -m mesh_tensor.runtime.disco.worker <id> <workers> <groups> <read> <write>`."""

from __future__ import annotations

import sys

import tvm_ffi

from . import actions  # noqa: F401  (it registers what the session calls)


def main() -> None:
    """Do what the controller asks until it is gone."""
    tvm_ffi.get_global_func("runtime.disco.WorkerProcess")(*map(int, sys.argv[1:6]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
