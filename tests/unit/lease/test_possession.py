"""Proofs that a worker had a slice."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.lease.messages import RANGE_BYTES, is_checked, proof_of, range_of

NAMES = st.text("abcdef0123456789", min_size=1, max_size=40)


@given(NAMES, NAMES, st.integers(1, 10 * RANGE_BYTES))
def test_a_range_lies_in_its_slice(lease_id, peer_id, num_bytes):
    start, stop = range_of(lease_id, peer_id, num_bytes)
    assert 0 <= start < stop <= num_bytes and stop - start == min(RANGE_BYTES, num_bytes)
    assert range_of(lease_id, peer_id, num_bytes) == (start, stop)


@given(NAMES, NAMES, st.binary(min_size=1, max_size=2000), st.integers(0, 10**6))
def test_a_proof_is_of_bytes_a_lease_and_a_worker(lease_id, peer_id, data, offset):
    proof = proof_of(lease_id, peer_id, data)
    other = bytearray(data)
    other[offset % len(data)] ^= 1
    assert len(proof) == 12 and proof_of(lease_id, peer_id, data) == proof
    assert proof not in {
        proof_of(lease_id, peer_id, bytes(other)),
        proof_of(lease_id + "x", peer_id, data),
        proof_of(lease_id, peer_id + "x", data),
    }


def test_the_first_leases_are_checked_and_later_one_in_sixteen():
    assert all(is_checked(b"s", str(i), 7) for i in range(100))
    assert 0.04 < sum(is_checked(b"s", str(i), 8) for i in range(4096)) / 4096 < 0.09
    assert [is_checked(b"s", str(i), 8) for i in range(64)] != [is_checked(b"t", str(i), 8) for i in range(64)]
