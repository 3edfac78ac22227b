"""What all tests share: seeds, and how hypothesis looks for examples."""

import gc
import os
import random
import signal

# Before torch is loaded. Sums of one device have the bits that they have on several, and workers share the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all tests are collected: a quarter of what the imports take

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

import mesh_tensor  # noqa: E402, F401  (brings TileLang's TVM before a test imports tvm)
from tests import overridden_once, parsed_once  # noqa: E402

parsed_once.install()
overridden_once.install()

# `make test` sees the same examples every time; `make fuzz` looks for new ones until it is stopped.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=300,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz", deadline=None, max_examples=10**9, print_blob=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of many random cases, which take longest, start first: no worker waits for another one's in the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/test_random"))


def pytest_collection_finish() -> None:
    """What is there before the first test stays: no collection of garbage looks at it again; and seldom at what tests
    keep, which was a fifth of their time, nor at what a compilation is still at, of which much is no garbage soon."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(400_000, 10, 20)


@pytest.fixture(autouse=True)
def seeds():
    """Every test draws the same random numbers whichever tests ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # before, torch keeps the whole stack at each call, for the time when it is
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def verified(monkeypatch):
    """Every lowering and every Program checks itself, in every test."""
    monkeypatch.setenv("MESH_TENSOR_VERIFY", "1")


@pytest.fixture
def interruptible():
    """As at a terminal; what a shell runs in the background ignores interruptions."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
