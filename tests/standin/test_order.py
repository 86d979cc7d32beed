"""The check of order: both kinds of fault are reported with both places, and correct programs are not."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from splittune.cards import module_of
from tests.standin import devices

pytestmark = pytest.mark.standin

CARD = torch.device("standin", 0)
standin = module_of(CARD) if devices.is_registered() else None


def write_here(x: torch.Tensor) -> None:
    x.fill_(3)


def read_here(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_read_that_is_not_ordered_after_its_write_is_reported_with_both_places():
    """Two streams and nothing between them: the operators, devices, streams and lines of both stand in the report."""
    x, side = torch.zeros(1000, device=CARD), standin.Stream(CARD)
    standin.synchronize(CARD)
    with devices.order_checked() as reports:
        write_here(x)
        with standin.stream(side):
            y = read_here(x)
        standin.synchronize(CARD)
        del y
    (report,) = reports
    first, second = report.split("; then ")
    assert "written on standin:0, stream 0, by aten::fill_" in first
    assert "test_order.py" in first
    assert "in write_here" in first
    assert f"read on standin:0, stream {side.stream_id}, by aten::add" in second
    assert "in read_here" in second


@pytest.mark.parametrize("how", ["event", "stream", "host waits for the event", "host waits for the stream", "device"])
def test_a_read_that_waited_is_not_reported(how):
    """Whichever way torch offers to wait."""
    x, side = torch.zeros(1000, device=CARD), standin.Stream(CARD)
    standin.synchronize(CARD)
    with devices.order_checked() as reports:
        write_here(x)
        event = standin.current_stream(CARD).record_event()
        if how == "event":
            side.wait_event(event)
        elif how == "stream":
            side.wait_stream(standin.current_stream(CARD))
        elif how == "host waits for the event":
            event.synchronize()
        elif how == "host waits for the stream":
            standin.current_stream(CARD).synchronize()
        else:
            standin.synchronize(CARD)
        with standin.stream(side):
            y = read_here(x)
        standin.synchronize(CARD)
        del y
    assert reports == []


def test_an_event_orders_only_what_came_before_it():
    """What is written after the event was recorded is not ordered by waiting for it."""
    x, side = torch.zeros(1000, device=CARD), standin.Stream(CARD)
    standin.synchronize(CARD)
    with devices.order_checked() as reports:
        event = standin.current_stream(CARD).record_event()
        write_here(x)
        side.wait_event(event)
        with standin.stream(side):
            y = read_here(x)
        standin.synchronize(CARD)
        del y
    assert len(reports) == 1


def test_a_write_must_wait_for_those_who_read():
    """Writing while another stream may still be reading is a fault, writing another part of the tensor is none."""
    x, side = torch.zeros(1000, device=CARD), standin.Stream(CARD)
    standin.synchronize(CARD)
    with devices.order_checked() as reports:
        with standin.stream(side):
            y = read_here(x[:500])
        write_here(x[500:])
        assert devices.reports_so_far() == []
        write_here(x)
        standin.synchronize(CARD)
        del y
    (report,) = reports
    assert "it was read on" in report


@pytest.mark.parametrize(("cure", "num_reports"), [("nothing", 1), ("record_stream", 0), ("wait", 0)])
def test_memory_freed_while_another_stream_uses_it_is_reported_when_it_can_be_reused(cure, num_reports):
    """Without record_stream, or a wait, the next allocation could be handed what the other stream still reads."""
    side = standin.Stream(CARD)
    with devices.order_checked() as reports:
        x = torch.zeros(1000, device=CARD)
        side.wait_stream(standin.current_stream(CARD))
        with standin.stream(side):
            y = read_here(x)
        if cure == "record_stream":
            x.record_stream(side)
        del x
        if cure == "wait":
            standin.current_stream(CARD).wait_stream(side)
        z = torch.empty(1000, device=CARD)
        standin.synchronize(CARD)
        del y, z
    assert len(reports) == num_reports
    if num_reports:
        assert "in read_here" in reports[0]
        assert "then allocated by an allocation of 4000 bytes" in reports[0]
        assert "test_order.py" in reports[0].rpartition("then allocated")[2]


def test_recorded_memory_is_kept_back_until_the_other_stream_is_done():
    """A block that was recorded on a busy stream is not given out again before that stream has caught up."""
    x, side = torch.zeros(3 * 2**20, device=CARD), standin.Stream(CARD)
    standin.synchronize(CARD)
    address = x.data_ptr()
    with standin.stream(side):
        standin._sleep(10_000_000_000)
        x.add_(1)
    x.record_stream(side)
    del x
    held = [torch.empty(3 * 2**20, device=CARD) for _ in range(3)]
    assert address not in [tensor.data_ptr() for tensor in held]
    devices.forget_delays()


def test_copies_between_devices_are_ordered_by_themselves():
    """As torch's own: on the source's stream, which the target's has waited for, and the other way round."""
    with devices.order_checked() as reports:
        x = torch.ones(1000, device="standin:1")
        for index in (2, 3, 0):
            x = (x.to(f"standin:{index}", non_blocking=True) + 1).to("standin:1", non_blocking=True)
        joined = torch.empty(4, 1000, device="standin:0")
        for row in joined:
            row.copy_(x, non_blocking=True)
        assert joined.sum().item() == 16000
    assert reports == []


def test_a_copy_to_the_host_is_not_there_before_somebody_has_waited():
    """Read too early it is not a number; once the stream is waited for it is what was copied."""
    x = torch.ones(4, device=CARD)
    y = torch.empty(4)
    y.copy_(x, non_blocking=True)
    assert y.isnan().all()
    standin.current_stream(CARD).synchronize()
    assert y.equal(torch.ones(4))
    assert x.cpu().equal(torch.ones(4))


def test_autograds_own_order_is_not_reported():
    """Backward runs on the forward's streams: torch's engine orders them, whoever calls it."""
    side = standin.Stream(CARD)
    with devices.order_checked() as reports:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(CARD)
        x = torch.randn(4, 8, device=CARD)
        side.wait_stream(standin.current_stream(CARD))
        with standin.stream(side):
            loss = model(x).sum() + model(x.to("standin:1").to(CARD)).sum()
        for tensor in (x, *model.parameters()):
            tensor.record_stream(side)
        standin.current_stream(CARD).wait_stream(side)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        standin.synchronize(CARD)
        del loss, x, optimizer, model
    assert reports == []
