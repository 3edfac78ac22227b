"""The wire in shared memory, both ends in one process."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch

from mesh_tensor.runtime.ranks.lane import can_share
from mesh_tensor.runtime.ranks.shared_meeting import SWITCH_VARIABLE, shared_place, shared_wire
from mesh_tensor.runtime.ranks.shared_wire import SharedWire

pytestmark = pytest.mark.skipif(not shared_place(), reason="this machine's ranks can't share memory")
LIMIT = timedelta(seconds=60)


def _wires(count: int = 2, seconds: float = LIMIT.total_seconds()) -> list[SharedWire]:
    """Those of so many ranks, which meet on threads; then who waits does so for so long."""
    name, made = os.urandom(8).hex(), {}

    def meet(rank: int) -> None:
        made[rank] = shared_wire(name, rank, count, LIMIT)
        made[rank]._timeout = seconds

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(count)]


def _received(wire: SharedWire, like: torch.Tensor, source: int, tag: int) -> torch.Tensor:
    made = torch.zeros_like(like)
    wire.receive(made, source, tag).wait()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_messages_go_by_their_tags_and_not_by_their_order(dtype: torch.dtype) -> None:
    wires = _wires(3)
    sent = {
        (source, tag): torch.randint(100, (size,)).to(dtype)
        for source in (0, 2)
        for tag, size in ((5, 0), (6, 1), (7, 2048), (8, 300_001))
    }
    for (source, tag), tensor in sent.items():
        wires[source].send(tensor, 1, tag)
    for (source, tag), tensor in reversed(sent.items()):
        torch.testing.assert_close(_received(wires[1], tensor, source, tag), tensor, rtol=0, atol=0)


def test_what_was_sent_may_be_written_at_once_and_blocks_serve_again() -> None:
    one, other = _wires()
    tensor = torch.empty(100_000)
    for number in range(20):
        one.send(tensor.fill_(number), 1, number)
        one.send(tensor.fill_(number + 0.5), 1, number + 100)
        tensor.fill_(-1)
        for tag, value in ((number, number), (number + 100, number + 0.5)):
            assert bool((_received(other, tensor, 0, tag) == value).all())
    assert one._peers[1].blocks._count == 2


def test_more_messages_than_a_socket_or_the_kept_blocks_have_room_for() -> None:
    one, other = _wires()
    tensors = [torch.full((size,), float(n)) for n, size in enumerate([4] * 3000 + [2**22] * 6)]
    works = [one.send(tensor, 1, tag) for tag, tensor in enumerate(tensors)]

    def take() -> None:
        for tag, tensor in enumerate(tensors):
            assert torch.equal(_received(other, tensor, 0, tag), tensor)

    taker = threading.Thread(target=take)
    taker.start()
    for work in works:
        work.wait()
    taker.join()
    assert one._peers[1].blocks._bytes <= 2**26


def test_a_sender_waits_until_its_message_is_asked_for() -> None:
    one, other = _wires(seconds=0.3)
    small, large = one.send(torch.ones(3), 1, 1), one.send(torch.ones(5000), 1, 2)
    other.receive(torch.zeros(3), 0, 1)  # not waited for
    small.wait()
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        large.wait()


def test_threads_that_wait_at_the_same_time_get_what_is_theirs() -> None:
    one, other = _wires()
    found: dict[int, torch.Tensor] = {}

    def take(tag: int) -> None:
        found[tag] = _received(other, torch.zeros(5000), 0, tag)
        other.send(found[tag], 0, tag)

    threads = [threading.Thread(target=take, args=(tag,)) for tag in range(8)]
    for thread in threads:
        thread.start()
    for tag in (3, 1, 7, 0, 2, 6, 4, 5):  # each is sent once the one before was taken
        one.send(torch.full((5000,), float(tag)), 1, tag)
        assert bool((_received(one, torch.zeros(5000), 1, tag) == tag).all())
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


def test_who_waits_is_woken_when_either_side_is_cut() -> None:
    for ender in (0, 1):
        wires = _wires()
        threading.Timer(0.1, wires[ender].cut).start()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            wires[0].receive(torch.zeros(3), 1, 1).wait()
        assert time.monotonic() - start < 30
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            wires[0].send(torch.zeros(3), 1, 1)


def test_what_a_rank_sent_before_it_ended_arrives_and_nothing_else() -> None:
    one, other = _wires()
    other.send(torch.ones(3), 0, 9)  # which is never read
    one.send(torch.arange(50_000), 1, 1)
    del one
    assert torch.equal(_received(other, torch.arange(50_000), 0, 1), torch.arange(50_000))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        other.receive(torch.zeros(3), 0, 2).wait()


def test_another_size_and_a_wait_in_vain_are_errors() -> None:
    one, other = _wires(seconds=0.2)
    one.send(torch.zeros(5), 1, 1)
    with pytest.raises(RuntimeError, match="rank 0 sent 20 bytes where 24 are expected"):
        other.receive(torch.zeros(6), 0, 1).wait()
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        other.receive(torch.zeros(6), 0, 2).wait()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"Timed out waiting for connections with \[0\]"):
        shared_wire(os.urandom(8).hex(), 1, 2, timedelta(seconds=0.1))


def test_strangers_are_sent_away() -> None:
    name, made = os.urandom(8).hex(), []
    meeting = threading.Thread(target=lambda: made.append(shared_wire(name, 0, 2, LIMIT)))
    meeting.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        while stranger.connect_ex(f"\0mesh_tensor {name} 0".encode()):
            time.sleep(0.01)
        stranger.send(b"who?")
        other = shared_wire(name, 1, 2, LIMIT)
        meeting.join()
    other.send(torch.ones(2), 0, 1)
    assert torch.equal(_received(made[0], torch.ones(2), 1, 1), torch.ones(2))


def test_ranks_share_memory_where_all_of_them_can(monkeypatch: pytest.MonkeyPatch) -> None:
    place = b'["host", [0], "here"]'
    assert can_share([place, place])
    assert not can_share([place, b'["host", [0], "there"]'])
    monkeypatch.setenv(SWITCH_VARIABLE, "0")
    assert shared_place() == ""
    assert not can_share([b'["host", [0], ""]'] * 2)


def test_what_a_full_socket_left_unsaid_is_said_by_the_thread_that_waits() -> None:
    """A rank whose thread waits for one message asks for another while nobody reads its socket: once that is read, the
    question comes."""
    one, other = _wires()
    late, small, large = torch.randn(4), torch.randn(64), torch.randn(100_000)
    thread = threading.Thread(target=lambda: _received(one, late, 1, 1))
    thread.start()
    sent = other.send(large, 0, 2)
    while not (one._looks and one._peers[1]._arrived):
        time.sleep(0.001)
    count = 0
    while not one._peers[1].unsaid:
        one.send(small, 1, 100 + count)
        count += 1
    asked = one.receive(made := torch.zeros_like(large), 1, 2)
    sent.wait()  # reads what came, and then that it is asked for
    asked.wait()
    assert torch.equal(made, large)
    other.send(late, 0, 1)
    thread.join()
