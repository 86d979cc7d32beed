from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.virtual.catalog import find_gpu
from splittune.hardware.virtual.timeline import LAUNCH_S, TRANSFER_LATENCY_S, Timeline

RTX3090, V100 = find_gpu("RTX3090"), find_gpu("V100-16GB")  # links of 31.5e9 and 15.75e9 bytes/s


def timeline(num_devices: int = 2) -> Timeline:
    return Timeline([RTX3090] * num_devices)


def test_tiny_kernels_are_bound_by_their_launches():
    """100 kernels of 1 us take 100 launches and the last kernel: the device starves between."""
    one = timeline(1)
    for _ in range(100):
        one.launch(0, 1e-6)
    assert one.end_s() == pytest.approx(100 * LAUNCH_S + 1e-6)
    assert one.busy_s == [pytest.approx(100e-6)]


def test_long_kernels_hide_their_launches():
    """100 kernels of 1 ms take the first launch and the kernels."""
    one = timeline(1)
    for _ in range(100):
        one.launch(0, 1e-3)
    assert one.end_s() == pytest.approx(LAUNCH_S + 0.1)


def test_replicas_overlap_on_their_devices():
    """Two replicas of one long kernel each take as long as one."""
    both = timeline()
    for device in range(2):
        with both.replica(device, 2):
            both.launch(device, 1.0)
    assert both.end_s() == pytest.approx(1.0, abs=3 * LAUNCH_S)
    assert both.busy_s == [1.0, 1.0]


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_replicas_share_one_interpreter(num_replicas):
    """n launch-bound replicas take n times as long as one alone: the forward of DataParallel under the GIL."""
    many = timeline(4)
    for device in range(num_replicas):
        with many.replica(device, num_replicas):
            for _ in range(50):
                many.launch(device, 0.0)
    assert many.end_s() == pytest.approx(num_replicas * 50 * LAUNCH_S)


def test_the_caller_goes_on_after_the_slowest_replica():
    """What comes after the forward pass is launched when every replica's thread is done, on any device."""
    both = timeline()
    for device, num_launches in ((0, 10), (1, 100)):
        with both.replica(device, 2):
            for _ in range(num_launches):
                both.launch(device, 0.0)
    assert both.launched_s == [pytest.approx(200 * LAUNCH_S)] * 2
    both.launch(0, 0.0)
    assert both.launched_s[0] == pytest.approx(201 * LAUNCH_S)


def test_replicas_start_when_the_caller_comes_to_them():
    """What was launched before the forward pass, on whatever device, holds up every replica's thread."""
    both = timeline()
    for _ in range(100):
        both.launch(0, 0.0)
    for device, num_launches in ((0, 1), (1, 10)):
        with both.replica(device, 2):
            for _ in range(num_launches):
                both.launch(device, 0.0)
    assert both.launched_s == [pytest.approx(120 * LAUNCH_S)] * 2


def test_a_backward_pass_shares_nothing():
    """Outside a replica's forward every device has a thread that needs no interpreter."""
    both = timeline()
    for device in range(2):
        for _ in range(50):
            both.launch(device, 0.0)
    assert both.end_s() == pytest.approx(50 * LAUNCH_S)


def test_a_failed_replica_leaves_the_next_forward_whole():
    """After an exception in the first of three replicas the next forward has three that start together."""
    three = timeline(3)
    with pytest.raises(ValueError, match="mine"), three.replica(0, 3):
        raise ValueError("mine")
    for device in range(3):
        with three.replica(device, 3):
            for _ in range(10):
                three.launch(device, 0.0)
    three.launch(0, 0.0)
    assert three.end_s() == pytest.approx(31 * LAUNCH_S)


def test_a_transfer_takes_the_slower_link_and_both_ends():
    """31.5 MB between a link of 31.5e9 and one of 15.75e9 bytes/s is 2 ms, in which neither device
    does anything else."""
    pair = Timeline([RTX3090, V100])
    pair.launch(0, 1.0)
    pair.transfer(0, 1, 31_500_000)
    end = 1.0 + LAUNCH_S + TRANSFER_LATENCY_S + 2e-3
    assert pair.finished_s == [pytest.approx(end, abs=LAUNCH_S)] * 2
    pair.launch(0, 0.5)
    pair.launch(1, 0.5)
    assert pair.end_s() == pytest.approx(end + 0.5, abs=LAUNCH_S)
    assert pair.link_bytes == [31_500_000, 31_500_000]
    assert pair.busy_s == [1.5, 0.5]  # a copy is no kernel
    assert pair.copied_s == [pytest.approx(2e-3 + TRANSFER_LATENCY_S)] * 2  # nor is a kernel of the other card's


@given(
    st.lists(st.tuples(st.sampled_from(["launch", "transfer", "host", "collective"]), st.integers(0, 2)), max_size=30)
)
def test_what_a_card_computes_and_copies_is_never_more_than_its_time(work):
    """Whatever it is given: what is left is waiting."""
    three = timeline(3)
    for kind, device in work:
        if kind == "launch":
            three.launch(device, 1e-3)
        elif kind == "transfer":
            three.transfer(device, (device + 1) % 3, 31_500_000)
        elif kind == "host":
            three.transfer(None, device, 31_500_000)
        else:
            three.collective(range(3), 31_500_000)
    for busy_s, copied_s, finished_s in zip(three.busy_s, three.copied_s, three.finished_s, strict=True):
        assert copied_s >= 0
        assert busy_s + copied_s <= finished_s * (1 + 1e-9)


def test_a_copy_from_the_host_takes_one_link():
    """The host's side is never the slower, and other devices are not held up."""
    both = timeline()
    both.transfer(None, 1, 31_500_000)
    assert both.finished_s == [0.0, pytest.approx(1e-3 + LAUNCH_S + TRANSFER_LATENCY_S)]
    both.transfer(1, None, 63_000_000)
    assert both.link_bytes == [0, 94_500_000]


def test_copies_that_share_a_device_follow_one_another():
    """Broadcasting to three devices takes the first one's link three times."""
    four = timeline(4)
    for device in (1, 2, 3):
        four.transfer(0, device, 31_500_000)
    assert four.end_s() == pytest.approx(3 * (1e-3 + TRANSFER_LATENCY_S) + LAUNCH_S, abs=2 * LAUNCH_S)


def test_what_is_sent_is_launched_after_the_sender():
    """A device that gets its gradient from another cannot have launched its backward before that one came to it."""
    both = timeline()
    for _ in range(100):
        both.launch(0, 0.0)
    both.transfer(0, 1, 0)
    assert both.launched_s[1] == pytest.approx(101 * LAUNCH_S)


def test_reading_a_value_stops_the_launching_thread():
    """After `item()` nothing is launched until the device has finished."""
    one = timeline(1)
    one.launch(0, 1.0)
    one.launch(0, 0.0)
    assert one.launched_s == [pytest.approx(2 * LAUNCH_S)]
    one.wait_for(0)
    one.launch(0, 0.0)
    assert one.end_s() == pytest.approx(1.0 + 2 * LAUNCH_S)


DEVICES = st.integers(0, 2)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), DEVICES, st.floats(0, 1e-3)),
        st.tuples(st.just("transfer"), st.none() | DEVICES, DEVICES, st.integers(0, 10**8)),
        st.tuples(st.just("wait_for"), DEVICES),
    ),
    max_size=40,
)


@given(events=EVENTS)
def test_time_only_goes_forward_and_repeats(events):
    """No event sets any clock back, a device is never busy for longer than has passed, and a rerun gives the same."""

    def run() -> tuple[float, ...]:
        three = Timeline([RTX3090, V100, RTX3090])
        for name, *rest in events:
            before = [*three.launched_s, *three.finished_s]
            getattr(three, name)(*rest)
            assert all(now >= then for now, then in zip([*three.launched_s, *three.finished_s], before, strict=True))
        end = three.end_s()
        assert max(three.busy_s) <= end + 1e-12
        return end, *three.busy_s

    assert run() == run()


def test_a_hop_goes_on_beside_kernels():
    """31.5 MB hop in 1 ms while both ends compute for 1 s; who waits for its end has long got there."""
    both = timeline()
    end_s = both.hop(0, 1, 31_500_000)
    assert end_s == pytest.approx(1e-3 + TRANSFER_LATENCY_S, abs=2 * LAUNCH_S)
    for device in range(2):
        both.launch(device, 1.0)
        both.wait_until(device, end_s)
    assert both.end_s() == pytest.approx(1.0, abs=3 * LAUNCH_S)


def test_a_hop_begins_when_both_ends_have_come_to_it():
    """What was launched before it comes first, on either end."""
    for busy in range(2):
        both = timeline()
        both.launch(busy, 1.0)
        assert both.hop(0, 1, 0) == pytest.approx(1.0 + TRANSFER_LATENCY_S, abs=2 * LAUNCH_S)


def test_a_link_carries_both_ways_at_once_and_each_way_in_turn():
    """Two hops of 1 ms on one way of a link take 2 ms; one there and one back take 1 ms."""
    pair = timeline()
    pair.hop(0, 1, 31_500_000)
    assert pair.hop(0, 1, 31_500_000) == pytest.approx(2e-3, abs=5e-5)
    pair = timeline()
    pair.hop(0, 1, 31_500_000)
    assert pair.hop(1, 0, 31_500_000) == pytest.approx(1e-3, abs=5e-5)


def test_nothing_is_over_before_the_last_hop():
    """A clock that is read waits for what is under way, though no device was told to."""
    both = timeline()
    end_s = both.hop(0, 1, 31_500_000)
    assert both.end_s() == end_s


def test_an_input_comes_while_the_device_is_at_work():
    """Behind a kernel of 1 s a copy of 1 ms from the host does not wait; the next kernel follows the first."""
    one = timeline(1)
    one.launch(0, 1.0)
    one.transfer(None, 0, 31_500_000)
    assert one.received_s[0] == pytest.approx(1e-3, abs=5e-5)
    one.launch(0, 1.0)
    assert one.end_s() == pytest.approx(2.0, abs=1e-4)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_a_collective_takes_one_links_time(num_devices):
    """31.5 MB are 1 ms however many devices there are; all of them wait for the last to come to it."""
    many = timeline(num_devices)
    many.launch(1, 1.0)
    many.collective(range(num_devices), 31_500_000)
    took_s = 1e-3 + (num_devices - 1) * TRANSFER_LATENCY_S
    assert many.finished_s == [pytest.approx(1.0 + took_s, abs=3 * LAUNCH_S)] * num_devices
    assert many.link_bytes[0] == many.link_bytes[-1] == 31_500_000
    assert many.link_bytes[1:-1] == [63_000_000] * (num_devices - 2)
