"""Random sequences of calls on ranks, and what goes wrong on some: a result is right, or the rank has raised."""

import pytest
from hypothesis import given

from .sequences import Sequence, run, sequences

HARMLESS = {"slow", "slow inside", "raise late"}


def verdicts(found):
    """Every call's, by rank and thread."""
    return {who: [outcome and outcome.verdict for outcome in outcomes] for who, outcomes in found.items()}


@given(sequences())
def test_right_or_raised(sequence):
    found = run(sequence)
    said = [outcome for outcomes in found.values() for outcome in outcomes if outcome]
    wrong = [outcome.words for outcome in said if outcome.verdict == "wrong"]
    assert not wrong, f"{sequence}: {wrong}"
    if set(sequence.faults.values()) <= HARMLESS:
        assert all(outcome.verdict in ("right", "injected") for outcome in said), f"{sequence}: {verdicts(found)}"
    for outcome in said:
        assert outcome.verdict != "refused" or "rank" in outcome.words, f"{sequence}: {outcome.words}"
    check_after_resume(sequence, found)


def check_after_resume(sequence, found):
    """Once all ranks have resumed, calls are right again until something else goes wrong."""
    if len(sequence.calls) > 1 or {"die", "die inside", "swap"} & set(sequence.faults.values()):
        return
    (calls,) = sequence.calls
    last = max((step for (_, step), fault in sequence.faults.items() if fault not in HARMLESS), default=0)
    resumed = next((step for step in range(last + 1, len(calls)) if calls[step] == "resume"), len(calls))
    for (rank, _), outcomes in found.items():
        for step in range(resumed, len(calls)):
            assert outcomes[step].verdict == "right", f"{sequence}: step {step} of rank {rank}: {outcomes[step]}"


@pytest.mark.parametrize("count", [2, 3])
def test_refused_alike(count):
    """What all ranks refuse needs no resume: the next call is right."""
    faults = {(rank, step): "refuse" for rank in range(count) for step in (0, 1, 3)}
    for outcomes in verdicts(run(Sequence(count, (("total",) * 5,), faults))).values():
        assert outcomes == ["refused", "refused", "right", "refused", "right"]


@pytest.mark.parametrize(("fault", "words"), [("refuse", "torch.float64"), ("raise", "OnPurpose")])
def test_woken_with_the_whole_text(fault, words):
    """Who waits for a rank that raised is woken with its words; later calls name it until all resume."""
    sequence = Sequence(2, (("total", "total", "total", "resume", "total"),), {(1, 1): fault})
    found = run(sequence)
    assert verdicts(found)[0, 0] == ["right", "refused", "refused", "right", "right"]
    assert verdicts(found)[1, 0] == [
        "right",
        "refused" if fault == "refuse" else "injected",
        "refused",
        "right",
        "right",
    ]
    for who, step in ((0, 1), (0, 2), (1, 2)):
        text = found[who, 0][step].words
        assert "rank 1 raised" in text
        assert words in text
        assert "call mt.resume(mesh) on all ranks" in text
    if fault == "refuse":
        assert "fix: pass this rank's part of every tensor" in found[0, 0][1].words


def test_another_kernel_on_one_rank():
    """Of the same sizes: both wait in vain, and say where."""
    found = run(Sequence(2, (("total", "gathered", "largest", "gathered"),), {(1, 2): "other"}))
    for rank in (0, 1):
        assert [outcome.verdict for outcome in found[rank, 0][:3]] == ["right", "right", "refused"]
        assert f"rank {1 - rank} waited in vain somewhere else" in found[rank, 0][2].words


def test_two_threads():
    """Each thread's calls find those of the thread of its name."""
    found = run(
        Sequence(2, (("total", "gathered") * 8, ("gathered", "total") * 8), {(1, 3): "slow", (0, 5): "slow inside"})
    )
    assert all(set(outcomes) == {"right"} for outcomes in verdicts(found).values())
