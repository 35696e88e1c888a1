"""Laws of the swarm: no member starves, slots hold, the origin gives once, the same calls give the same answers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ProtocolError
from forebay.network.peer import Provider
from forebay.swarm.members import format_ranges, parse_ranges
from forebay.swarm.steering import Swarm

ORIGIN, OTHER = Provider("origin", "o:1", True), Provider("other", "o:2", True)


def peer(name: str, address: str = "p:1") -> Provider:
    return Provider(name, address, False)


def none(num: int) -> np.ndarray:
    return np.zeros(num, np.bool_)


class Crowd:
    """Members that fetch what they are told, a whole slice a round, and may fall."""

    def __init__(self, num_slices: int, num_members: int, slots: int, origin_slots: int):
        self.swarm = Swarm(num_slices, slots=slots, origin_slots=origin_slots)
        self.have = {f"m{i}": none(num_slices) for i in range(num_members)}
        self.now = 0.0
        self.from_origin = 0
        self.slots = {ORIGIN.peer_id: origin_slots, **dict.fromkeys(self.have, slots)}
        self.swarm.join(ORIGIN, None, self.now)
        for name, have in self.have.items():
            self.swarm.join(peer(name), have, self.now)

    def round(self, at_once: int) -> int:
        self.now += 1.0
        self.swarm.join(ORIGIN, None, self.now)
        reported = []
        for name, have in self.have.items():
            self.swarm.join(peer(name), None, self.now)
            reported += [(name, *each) for each in self.swarm.assign(name, np.flatnonzero(~have), at_once, self.now)]
        for who in self.slots:
            assert sum(holder.peer_id == who for _, _, holder in reported) <= self.slots[who]
        for _, index, holder in reported:
            assert holder.is_origin or self.have[holder.peer_id][index]
            self.from_origin += holder.is_origin
        for name, index, _ in reported:
            self.have[name][index] = True
            self.swarm.finished(name, index, self.now + 0.5)
        return len(reported)


@settings(max_examples=12, deadline=None)
@given(
    num_slices=st.integers(1, 24), num_members=st.integers(1, 6), slots=st.integers(1, 3),
    origin_slots=st.integers(1, 3), at_once=st.integers(1, 4), falls=st.lists(st.integers(0, 5), max_size=2),
)  # fmt: skip
def test_all_get_all_within_bounded_rounds_and_the_origin_gives_once_and_for_losses(
    num_slices, num_members, slots, origin_slots, at_once, falls
):
    crowd = Crowd(num_slices, num_members, slots, origin_slots)
    losses = 0
    for number in range(4 * num_slices * num_members + 8):
        if falls and number == 3 and len(crowd.have) > 1:
            gone = sorted(crowd.have)[falls.pop() % len(crowd.have)]
            others = sum(have for who, have in crowd.have.items() if who != gone)
            losses += int(np.count_nonzero(crowd.have.pop(gone) & (others == 0)))
            crowd.swarm.leave(gone)
        crowd.round(at_once)
        if all(have.all() for have in crowd.have.values()):
            break
    assert all(have.all() for have in crowd.have.values())
    assert crowd.from_origin == num_slices + losses
    assert (crowd.swarm.copies() == len(crowd.have)).all()
    assert crowd.swarm.status(0.0)["under_way"] == 0


def swarm_of(num_slices: int, have: dict[str, str], origins: Sequence[Provider] = (), **settings: Any) -> Swarm:
    """A swarm at time 0 of members with ranges of slices, after its origins."""
    swarm = Swarm(num_slices, **settings)
    for origin in origins:
        swarm.join(origin, None, 0.0)
    for name, ranges in have.items():
        flags = none(num_slices)
        flags[parse_ranges(ranges, num_slices)] = True
        swarm.join(peer(name), flags, 0.0)
    return swarm


def holders(swarm: Swarm, member: str, *missing: int, now: float = 0.0) -> dict[int, Provider]:
    """Assign slices that a member lacks; return from whom, in order."""
    return dict(swarm.assign(member, np.array(missing, np.int64), 4, now))


def test_a_slice_under_way_is_waited_for_and_named_again_to_who_asks_again():
    swarm = swarm_of(2, {"a": "", "b": ""}, [ORIGIN])
    assert holders(swarm, "a", 0) == {0: ORIGIN} == holders(swarm, "a", 0, now=1.0)
    assert holders(swarm, "b", 0, now=1.0) == {}
    swarm.finished("a", 0, 2.0)
    assert holders(swarm, "b", 0, now=2.0) == {0: peer("a")}
    assert holders(swarm, "b") == {}


def test_the_rarest_goes_first():
    assert list(holders(swarm_of(3, {"a": "0-2", "b": "0-1", "c": "0", "d": ""}), "d", 0, 1, 2)) == [2, 1, 0]


def test_an_unreachable_member_gets_and_is_never_named():
    swarm = swarm_of(1, {}, [ORIGIN])
    swarm.join(peer("leech", ""), none(1), 0.0)
    assert {0: ORIGIN} in [holders(swarm, "leech", 0, now=float(i)) for i in range(4)]
    swarm.finished("leech", 0, 4.0)
    swarm.join(peer("b"), none(1), 4.0)
    assert swarm.copies().tolist() == [0] and holders(swarm, "b", 0, now=5.0) == {0: ORIGIN}


def test_who_sent_wrong_bytes_is_banned_for_the_node_that_got_them_for_an_hour():
    """And for no other, whatever others say."""
    swarm = swarm_of(1, {"liar": "0", "a": "", "a#2": "", "b": "", "c": ""})
    for name in ("a", "b"):
        swarm.failed(name, 0, "liar", 1.0, wrong=True)
        assert swarm.providers(0, name, 2.0) == [] and swarm.providers(0, "c", 2.0) == [peer("liar")]
    assert swarm.providers(0, "a#2", 2.0) == []
    assert swarm.status(2.0)["reported"] == {"liar": 2}
    assert swarm.providers(0, "a", 3602.0) == [peer("liar")] and swarm.status(3602.0)["reported"] == {}


def test_an_origin_with_one_damaged_file_is_no_liar():
    swarm = swarm_of(3, {"a": "", "b": ""}, [ORIGIN])
    for name in ("a", "b"):
        swarm.failed(name, 0, ORIGIN.peer_id, 0.0, wrong=True)
        assert swarm.providers(1, name, 1.0) == [ORIGIN]
    assert swarm.status(1.0)["reported"] == {}
    swarm.failed("a", 2, ORIGIN.peer_id, 2.0, wrong=True)
    assert swarm.providers(1, "a", 3.0) == [ORIGIN]  # the last origin is never barred
    swarm.join(OTHER, None, 3.0)
    assert swarm.status(3.0)["reported"] == {ORIGIN.peer_id: 1}
    assert swarm.providers(1, "a", 3.0) == [OTHER] and ORIGIN in swarm.providers(1, "b", 3.0)


def test_who_refuses_is_avoided_for_a_while_and_the_origin_steps_in():
    swarm = swarm_of(1, {"full": "0", "a": ""}, [ORIGIN])
    assert holders(swarm, "a", 0) == {0: peer("full")}
    swarm.failed("a", 0, "full", 0.1)
    assert holders(swarm, "a", 0, now=0.2) == {0: ORIGIN}
    swarm.end("a", 0)
    assert holders(swarm, "a", 0, now=5.0) == {0: peer("full")}


def test_the_silent_go_and_what_only_they_had_comes_from_the_origin_again():
    swarm = swarm_of(1, {"a": "0"}, [ORIGIN], ttl_s=10.0)
    swarm.join(peer("b"), none(1), 8.0)
    swarm.join(ORIGIN, None, 8.0)
    assert swarm.expire(12.0) == ["a"] and swarm.copies().tolist() == [0]
    assert holders(swarm, "b", 0, now=12.0) == {0: ORIGIN}


def test_a_download_that_never_ends_is_given_up_and_its_slot_is_free_again():
    swarm = swarm_of(1, {"hoarder": "", "b": ""}, [ORIGIN], origin_slots=1, ttl_s=1000.0)
    assert holders(swarm, "hoarder", 0)
    assert holders(swarm, "b", 0, now=30.0) == {}
    assert holders(swarm, "b", 0, now=61.0) == {0: ORIGIN}


def test_load_is_spread_over_holders():
    swarm = swarm_of(6, {"a": "0-5", "b": "0-5", "c": "0-5", "d": ""}, slots=2)
    assert sorted(swarm.providers(index, "d", 0.0)[0].peer_id for index in range(6)) == list("aabbcc")


@given(st.lists(st.booleans(), max_size=40))
def test_ranges_of_any_set_are_read_back(flags):
    have = np.flatnonzero(flags)
    assert np.array_equal(parse_ranges(format_ranges(have), len(flags)), have)


@pytest.mark.parametrize("text", ["x", "1-", "5-4", "9", "0,,1", "-1", "٣"])
def test_ranges_that_are_none_are_refused(text):
    with pytest.raises(ProtocolError):
        parse_ranges(text, 9)
