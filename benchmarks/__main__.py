"""All comparisons with a peer, and whether each is as good as it must be. Ends with status 1 if one is not.

python -m benchmarks [NAME ...]    for example: python -m benchmarks ranks gpu
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from ._timing import header, verdicts


def modules(names: list[str]) -> list[ModuleType]:
    """The benchmarks of these names, or all; of them, those that compare: they have a function `rows`."""
    found = {path.stem: path for path in sorted(Path(__file__).parent.glob("bench_*.py"))}
    asked = [f"bench_{name}" for name in names] or list(found)
    if unknown := sorted(set(asked) - set(found)):
        raise SystemExit(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(found)}")
    loaded = [import_module(f"benchmarks.{name}") for name in asked]
    return [module for module in loaded if hasattr(module, "rows")]


def main() -> int:
    """Run, print, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="without the bench_; all, if none is given")
    torch.set_num_threads(1)
    print(header("Beside its peers"))
    rows = []
    for module in modules(parser.parse_args().names):
        print(f"{module.__name__} ...", file=sys.stderr, flush=True)
        rows += module.rows()
    print(verdicts(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
