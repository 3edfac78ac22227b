"""`python -m tests.models [--layouts 4] [--dtype bfloat16] [name ...]`: the table of architectures, one line each.
With `--save FILE` what was found is added to a file, too, of which `python -m tests.models.table FILE` makes a page.

Each runs in a process of its own, so that one that takes too long, or too much memory, or dies, is a line too."""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import signal
import sys
import time

import torch

from .catalogue import architectures
from .check import Outcome, check
from .table import save

_SECONDS, _BYTES = 240, 12 << 30


def main() -> int:
    """Print the table; 1 if a layout gave something else than torch."""
    parser = argparse.ArgumentParser(prog="python -m tests.models")
    parser.add_argument("names", nargs="*", help="libraries (timm/), models (timm/dla34), parts of names; none: all")
    parser.add_argument("--layouts", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--collectives", action="store_true", help="count them, beside the hand's")
    parser.add_argument("--save", help="a file of outcomes, one a line, to add to")
    options = parser.parse_args()
    chosen = [one for one in architectures() if not options.names or any(_means(n, one.title) for n in options.names)]
    outcomes = []
    for architecture in chosen:
        started = time.monotonic()
        dtype = getattr(torch, options.dtype)
        outcome = _alone(
            lambda one=architecture, to=dtype: check(one, options.layouts, to, options.collectives), architecture.title
        )
        outcomes.append(outcome)
        if options.save:
            save(outcome, options.save)
        print(_row(outcome), f"{time.monotonic() - started:.1f} s", flush=True)
    known = [outcome for outcome in outcomes if outcome.imported]
    print(
        f"{len(outcomes)} architectures, {len(known)} imported as written; {sum(o.layouts for o in known)} layouts:"
        f" {sum(o.right for o in known)} right, {sum(len(o.refused) for o in known)} refused,"
        f" {sum(len(o.wrong) for o in known)} wrong"
    )
    return int(any(outcome.wrong for outcome in outcomes))


def _means(name: str, title: str) -> bool:
    """Whether a title is called so: "timm/" is a library, "timm/dla34" one of its models, "vit" is part of names."""
    return title == name or (title.startswith(name) if name.endswith("/") else "/" not in name and name in title)


def _alone(run: object, title: str) -> Outcome:
    """The outcome of a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
        try:
            outcome = run()  # type: ignore[operator]
        except BaseException as error:
            outcome = Outcome(title, f"the table's own: {type(error).__name__}: {error}"[:300])
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if said:
        return pickle.loads(said)
    return Outcome(title, f"the process died of signal {os.WTERMSIG(status)}")


def _row(outcome: Outcome) -> str:
    if not outcome.imported:
        return f"{outcome.title}: NOT IMPORTED {outcome.stopped}"
    told = [*(f"\n    refused {what}" for what in outcome.refused), *(f"\n    WRONG {what}" for what in outcome.wrong)]
    found = outcome.counted
    if found.data is not None:
        told.append(f"\n    data parallel {found.data}")
    if found.tensor is not None:
        told.append(f"\n    Megatron {found.tensor}; by hand {found.hand}")
    return f"{outcome.title}: {outcome.operators} operators, {outcome.right} of {outcome.layouts} right{''.join(told)}"


if __name__ == "__main__":
    sys.exit(main())
