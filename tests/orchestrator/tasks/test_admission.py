from collections import Counter
from types import SimpleNamespace

import pytest

from rl.orchestrator.tasks import admission as admission_module
from rl.orchestrator.tasks.admission import Admission, InFlight, Pace, PlaceCounts
from rl.orchestrator.tasks.task_source import TaskRef

ONE = {"a": 1.0}
TWO = {"a": 0.5, "b": 0.5}


def room(places, shares=ONE, batch_size=8, ahead=1, cap=1000, max_refill=3, trainable=1.0):
    trainable_shares = (
        trainable if isinstance(trainable, dict) else dict.fromkeys(shares, trainable)
    )
    settings = SimpleNamespace(batch_size=batch_size, max_in_flight=cap, max_refill=max_refill)
    config, source = (
        SimpleNamespace(orchestrator=settings),
        SimpleNamespace(shares=shares, retry=[]),
    )
    admission = Admission(config, source)
    admission.trainable_share = lambda: trainable_shares
    return admission.eligible(places, ahead)


@pytest.mark.parametrize(
    ("places", "others", "has_room"),
    [
        ({}, {}, True),
        ({"playing": 8}, {}, False),
        ({"playing": 8}, {"ahead": 2}, True),
        ({"usable": 4, "playing": 4}, {}, False),
        ({"usable": 4, "playing": 4}, {"ahead": 0}, False),
        # dropped groups are replaced until the refills are used up
        ({"usable": 1, "dropped": 7}, {}, True),
        ({"usable": 1, "playing": 7, "dropped": 16}, {}, False),
        ({"usable": 1, "dropped": 23}, {}, False),
        ({"dropped": 74}, {}, True),  # nothing to train on yet
        ({"playing": 7, "dropped": 24}, {"trainable": 0.1}, True),
        ({"playing": 8, "dropped": 24}, {"trainable": 0.1}, False),
        ({"usable": 1, "dropped": 24}, {"trainable": 0.1}, False),
        ({"usable": 1, "dropped": 7}, {"max_refill": 1}, False),
        ({"usable": 1, "dropped": 24}, {"max_refill": 4}, True),
        # regression: with all quick surplus groups solved, 272 were played instead of 192
        ({"playing": 2, "dropped": 22}, {}, False),
        # as many are started as will be needed
        ({"playing": 15}, {"trainable": 0.5}, True),
        ({"playing": 16}, {"trainable": 0.5}, False),
        ({"usable": 6, "playing": 3}, {"trainable": 0.5}, True),
        ({"usable": 6, "playing": 4}, {"trainable": 0.5}, False),
        ({"playing": 23}, {"trainable": 0.01}, True),
        ({"playing": 24}, {"trainable": 0.01}, False),
        ({"playing": 9}, {"trainable": 0.5, "max_refill": 1}, False),
    ],
)
def test_as_much_as_the_batches_ahead_lack(places, others, has_room):
    counts = PlaceCounts(**{kind: Counter(a=number) for kind, number in places.items()})
    assert room(counts, **others) == ["a"] * has_room


def test_each_environment_starts_as_many_as_will_be_needed():
    # of 12, half of each
    assert room(PlaceCounts(playing=Counter(a=5, b=3)), TWO, trainable=0.5) == ["a", "b"]
    assert room(PlaceCounts(playing=Counter(a=6, b=2)), TWO, trainable=0.5) == ["b"]
    # 7 are likely to be trained
    assert room(PlaceCounts(playing=Counter(a=4, b=5)), TWO, trainable={"a": 0.5}) == ["a"]
    assert room(PlaceCounts(playing=Counter(a=4, b=6)), TWO, trainable={"a": 0.5}) == []


@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_share_that_is_kept_is_that_of_the_newest_groups(max_lag):
    admission = Admission(SimpleNamespace(max_lag=max_lag), SimpleNamespace(shares=ONE))
    assert admission.trainable_share() == {}  # all
    admission.outcomes["a"].extend([False, False])
    few = admission.trainable_share()
    assert few == ({} if max_lag else {"a": 0.75})  # the first few do not decide alone
    admission.outcomes["a"].extend([True] * 6 + [False] * 24)
    admission.outcomes["b"].extend([True] * 9)  # those of another environment do not count
    assert admission.trainable_share() == ({} if max_lag else {"a": 0.0, "b": 1.0})


def test_an_environment_without_signal_does_not_take_all_replacements():
    # a has played its share, and all of it was dropped
    solved = PlaceCounts(usable=Counter(b=4), dropped=Counter(a=4))
    assert room(solved, TWO) == ["a", "b"]
    assert room(
        PlaceCounts(usable=Counter(b=4), playing=Counter(a=2), dropped=Counter(a=4)), TWO
    ) == ["b"]


def test_a_slow_environment_plays_as_much_as_it_needs_and_does_not_hold_up_the_other():
    assert room(PlaceCounts(slow=Counter(b=30), usable=Counter(a=3)), TWO) == ["a", "b"]
    # its share of max_in_flight is used up
    assert room(PlaceCounts(slow=Counter(b=50), usable=Counter(a=4)), TWO, cap=100) == ["a"]


def test_the_pace_is_that_of_the_environments_with_half_of_the_weight():
    pace = Pace({"fast": 0.5, "slow": 0.3, "slower": 0.2})
    assert pace.typical_s() == float("inf")
    pace.add("slow", 60.0)
    assert pace.typical_s() == float("inf")
    for seconds in (1.0, 2.0, 30.0):
        pace.add("fast", seconds)
    assert pace.typical_s() == 2.0
    major = Pace({"fast": 0.2, "slow": 0.8})
    major.add("fast", 1.0)
    major.add("slow", 60.0)
    assert major.typical_s() == 60.0


def test_an_outage_frees_no_places(monkeypatch):
    """Regression: while nothing finished, all groups in flight gave up their places, and those
    started instead made lag reach 8."""
    clock = [20.0]
    monkeypatch.setattr(admission_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    settings = SimpleNamespace(batch_size=64, max_in_flight=576, max_refill=3)
    admission = Admission(
        SimpleNamespace(max_lag=1, orchestrator=settings), SimpleNamespace(shares=ONE, retry=[])
    )
    admission.pace.add("a", 20.0)  # started at 0, as all of these
    admission.in_flight = {
        number: InFlight(TaskRef(number, "a", 0), 8, 0, 0.0, None) for number in range(16)
    }
    clock[0] = 100.0
    assert admission.eligible(admission.places([]), 2) == []
    admission.in_flight[16] = InFlight(TaskRef(16, "a", 0), 8, 0, 40.0, None)
    admission.pace.add("a", 70.0)  # started at 30
    places = admission.places([])
    assert (places.slow["a"], places.playing["a"]) == (128, 8) and admission.eligible(
        places, 2
    ) == ["a"]


def test_a_lost_environment_leaves_the_groups_that_are_played_to_their_batch():
    """Issuing one again would train it twice."""
    parked = []
    admission = Admission.__new__(Admission)
    admission.source = SimpleNamespace(lose_env=lambda env, refs: parked.extend(refs))
    refs = [TaskRef(group_id, env, 3) for group_id, env in enumerate("aab")]
    admission.in_flight = {ref.group_id: InFlight(ref, 4, 0, 0.0, None) for ref in refs}
    admission.lose_env("a", {0})
    assert parked == [refs[1]] and list(admission.in_flight) == [0, 2]
