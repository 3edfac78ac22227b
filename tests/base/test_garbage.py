"""Work during which cycles are not collected."""

import gc

import pytest

from mesh_tensor.base.recent import uncollected


def test_collection_is_off_for_the_work_only():
    inner = uncollected(gc.isenabled)
    assert gc.isenabled()
    assert not inner()
    assert uncollected(lambda: (inner(), gc.isenabled()))() == (False, False)
    assert gc.isenabled()


def test_collection_is_on_again_after_an_error_and_off_where_it_was():
    with pytest.raises(ZeroDivisionError):
        uncollected(lambda: 1 / 0)()
    assert gc.isenabled()
    gc.disable()
    try:
        assert not uncollected(gc.isenabled)()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_interrupt_right_after_collection_ended(monkeypatch):
    """Python looks for signals as a call returns, so also as `gc.disable` does."""
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uncollected(gc.isenabled)()
    assert gc.isenabled()
