from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from splittune.hardware import is_out_of_memory
from splittune.hardware.virtual.catalog import find_gpu
from splittune.hardware.virtual.ledger import Ledger
from splittune.units import GIB, KIB, MIB

RTX3090 = find_gpu("RTX3090")
KIB_OF_FLOATS = 256  # so many float32 elements are 1 KiB


def ledger_of(*capacities_bytes: int) -> Ledger:
    capacities = capacities_bytes or (GIB, GIB)
    return Ledger([RTX3090] * len(capacities), capacities)


def kib(ledger: Ledger) -> list[float]:  # allocated on each device
    ledger.free_dead()
    return [allocator.allocated_bytes / KIB for allocator in ledger.allocators]


def ones(num_kib: int, **options) -> torch.Tensor:
    return torch.ones(num_kib * KIB_OF_FLOATS, **options)


def test_what_is_made_out_of_nothing_belongs_to_where_the_code_runs():
    """A factory's result is on the current device, and on the host outside any."""
    ledger = ledger_of()
    with ledger:
        host = ones(1)
        with ledger.on(1):
            there = ones(2)
            with ledger.on(0):
                here = ones(4)
            with ledger.on(None):
                also_host = ones(1)
            there_again = torch.arange(KIB_OF_FLOATS)
        assert [ledger.owner_of(t) for t in (host, there, here, also_host, there_again)] == [None, 1, 0, None, 1]
    assert kib(ledger) == [4, 4]


def test_an_operation_belongs_to_the_device_of_its_inputs():
    """Wherever the code runs, results are where the inputs are; several results too."""
    ledger = ledger_of()
    with ledger, ledger.on(1):
        x = torch.rand(16, 64)
        with ledger.on(0):
            results = [x + 1, *x.max(0), *torch.unbind(x * 2), *torch._foreach_mul([x, x], 2.0), torch.empty_like(x)]
    assert {ledger.owner_of(result) for result in results} == {1}
    assert kib(ledger)[0] == 0


def test_views_and_changes_in_place_cost_nothing():
    """Only a new storage takes memory."""
    ledger = ledger_of()
    with ledger, ledger.on(0):
        x = ones(4).view(4, -1)
        views = [x[1], x.t(), x.split(2), x.detach(), x.unsqueeze(0).expand(5, -1, -1), x.data]
        x.add_(1).mul_(x)
        x[:, 0] = 7.0
        x[2].zero_()
        torch._foreach_add_([x, x], 1.0)
        assert kib(ledger) == [4, 0]
        assert all(ledger.owner_of(view) == 0 for view in (views[0], views[1], views[2][1], views[3], views[4]))


def test_memory_is_freed_with_the_last_that_uses_it():
    """A storage goes when its last view does, not with the tensor that it was made for."""
    ledger = ledger_of()
    with ledger, ledger.on(0):
        x = ones(4)
        x = x[:10]
        assert kib(ledger) == [4, 0]
        del x
        assert kib(ledger) == [0, 0]


@given(st.lists(st.tuples(st.sampled_from(["new", "view", "drop", "host"]), st.integers(1, 3000)), max_size=30))
def test_allocated_bytes_are_those_of_the_live_storages(events):
    """However tensors come and go, and ids with them, each live storage counts once, rounded to 512 bytes."""
    ledger, live, hosts = ledger_of(), [], []
    with ledger:
        for event, number in events:
            if event == "new":
                with ledger.on(0):
                    live.append(torch.empty(number, dtype=torch.uint8))
            elif event == "view" and live:
                live.append(live[number % len(live)][: number // 2])
            elif event == "drop" and live:
                del live[number % len(live)]
            elif event == "host":  # takes over the ids of what died, and must not be taken for it
                hosts.append(torch.empty(number, dtype=torch.uint8))
                assert ledger.owner_of(hosts[-1]) is None
                hosts = hosts[-3:]
            storages = {id(s): s.nbytes() for s in map(torch.Tensor.untyped_storage, live)}
            assert kib(ledger)[0] * KIB == sum(-(-size // 512) * 512 for size in storages.values())


def test_an_id_that_is_used_again_is_not_taken_for_its_first_owner():
    """A new storage at the address of a dead one that was not yet freed is a stranger."""
    ledger = ledger_of()
    ledger.own(old := ones(1), 0)
    stale = ledger._owned.pop(id(old.untyped_storage()))
    fresh = ones(1)
    ledger._owned[id(fresh.untyped_storage())] = stale
    assert ledger.owner_of(fresh) is None
    assert kib(ledger) == [0, 0]
    del old
    assert kib(ledger) == [0, 0]  # and it is not freed twice


def test_what_died_is_freed_in_order_whoever_gets_its_address(monkeypatch):
    """Which of two dead storages a new one takes the place of is chance, and the older is freed first all the same."""
    ledger, freed = ledger_of(), []
    monkeypatch.setattr(ledger, "free", lambda _device, block: freed.append(block.size / KIB))
    ledger.own(older := ones(1), 0)
    ledger.own(younger := ones(2), 0)
    stale = ledger._owned.pop(id(younger.untyped_storage()))
    del younger, older
    fresh = ones(1)
    ledger._owned[id(fresh.untyped_storage())] = stale
    assert ledger.owner_of(fresh) is None
    assert freed == [1, 2]


def test_running_out_of_memory_is_raised_by_the_very_operation():
    """What fits goes on; the error is torch's own, and says which card, how much was asked and how much there is."""
    ledger = ledger_of(GIB, 30 * MIB)
    with ledger, ledger.on(1):
        x = ones(15 * KIB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            x + 1
        x.add_(1)
    assert is_out_of_memory(caught.value)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 15.0 MiB. Virtual GPU 1 (RTX3090) allows this process 30.0 MiB, of "
        "which 14.0 MiB is free; 16.0 MiB is allocated and 0.0 MiB reserved but unallocated."
    )


def test_running_out_of_memory_in_backward_keeps_its_type():
    """Through autograd too the error arrives as it was raised, and the memory of the failed step is freed."""
    ledger = ledger_of(23 * MIB)
    with ledger:
        with ledger.on(0):
            x = ones(9 * KIB).requires_grad_()
        loss = x.exp().sum()
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 9\.0 MiB\. Virtual GPU 0"):
            loss.backward()  # beside x and its exponentials a third tensor of 9 MiB
        del loss
        assert kib(ledger) == [9 * KIB]


def test_devices_are_not_mixed():
    """Inputs on two devices raise as on CUDA, 0-dim ones on another card included; copies are the way."""
    ledger = ledger_of()
    with ledger:
        with ledger.on(0):
            a = ones(1)
        with ledger.on(1):
            b, scalar = ones(1), torch.ones(())
        for mixed in (lambda: a + b, lambda: torch.cat([a, b]), lambda: a * scalar, lambda: torch.addcmul(a, b, a)):
            with pytest.raises(RuntimeError, match=r"same device, but aten::\w+ got tensors on virtual GPUs [01] and"):
                mixed()
        a.copy_(b)


def test_whole_tensors_from_the_host_are_taken_along_once_by_each_device():
    """A mask or table used on both devices is charged to both, once, until it dies; it still lives on the host."""
    ledger, table = ledger_of(), ones(2)
    with ledger:
        for _ in range(3):
            for device in (0, 1):
                with ledger.on(device):
                    x = ones(2)
                assert ledger.owner_of(x + table) == device
        del x
        assert kib(ledger) == [2, 2]
        assert ledger.owner_of(table) is None
        del table
        assert kib(ledger) == [0, 0]


def test_scalars_and_parts_of_something_larger_stay_on_the_host():
    """0-dim tensors may be anywhere, as on CUDA, and a batch cut from a data set does not bring the data set."""
    ledger, scalar, data = ledger_of(), torch.tensor(2.0), ones(100)
    with ledger:
        with ledger.on(1):
            x = ones(1)
        assert (x * scalar + data[:KIB_OF_FLOATS]).sum() == 3 * KIB_OF_FLOATS
        del x
        assert kib(ledger) == [0, 0]


def test_what_a_replica_makes_out_of_nothing_may_be_used_by_another():
    """A table that the model keeps from one call is charged to each device that uses it; a card would have its own."""
    ledger = ledger_of()
    with ledger:
        with ledger.on(0):
            x = ones(1)
        with ledger.on(1):
            y = ones(1)
        with ledger.on(0, makes_guests=True):
            table = torch.arange(KIB_OF_FLOATS).float().cos()
            kept = x * table
        assert ledger.owner_of(table) == 0
        with ledger.on(1, makes_guests=True):
            assert ledger.owner_of(y * table) == 1
            with pytest.raises(RuntimeError, match="register_buffer"):
                y * kept  # made from what was sent to device 0: a mistake on any card
        assert kib(ledger) == [3, 2]


def test_a_storage_that_changes_its_size_is_followed():
    """Growing by resize_, as an out= argument or by set_ takes memory, and emptying a storage frees it."""
    ledger, host = ledger_of(30 * MIB), ones(8)
    with ledger, ledger.on(0):
        x = torch.empty(0)
        x.resize_(KIB_OF_FLOATS)
        assert kib(ledger) == [1]
        torch.add(y := ones(4), 1, out=x.resize_(0))
        assert kib(ledger) == [8]
        x.set_(host.untyped_storage())
        assert kib(ledger) == [12]
        y.untyped_storage().resize_(0)
        assert ledger.owner_of(y) == 0
        assert kib(ledger) == [8]
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 40\.0 MiB"):
            y.resize_(10 * MIB)


def test_what_has_no_memory_takes_none():
    """Tensors on the meta device and of no elements are free; a layout that shows no storage is left out."""
    ledger = ledger_of()
    with ledger, ledger.on(0):
        nn.Linear(100, 100, device="meta")
        x = ones(1).to("meta")
        with torch.device("meta"):
            y = ones(1)
        empty, dnn = torch.empty(0, 5), ones(1).to_mkldnn().relu()
        assert kib(ledger) == [0, 0]
        assert [ledger.owner_of(tensor) for tensor in (x, y, empty, dnn)] == [None, None, 0, None]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("convert", "num_bytes"),
    [
        (torch.Tensor.to_sparse, 2 * 8 * 1024 + 4 * 1024),
        # torch makes these from coo, and keeps one row of its indices in the storage of both
        (torch.Tensor.to_sparse_csr, 8 * 1025 + 2 * 8 * 1024 + 4 * 1024),
        (torch.Tensor.to_sparse_csc, 8 * 1025 + 2 * 8 * 1024 + 4 * 1024),
        (lambda x: x.to_sparse_bsr((1, 1)), 8 * 1025 + 2 * 8 * 1024 + 4 * 1024),
        (lambda x: torch.nested.nested_tensor([x[0]], layout=torch.jagged), 4 * 1024 + 2 * 8),
    ],
    ids=["coo", "csr", "csc", "bsr", "jagged"],
)
def test_a_tensor_of_several_parts_costs_its_parts(convert, num_bytes):
    """Sparse layouts and subclasses that wrap tensors are charged for what they hold, and belong where that is."""
    ledger = ledger_of()
    with ledger, ledger.on(1):
        x = convert(torch.eye(1024))
        assert ledger.owner_of(x) == 1
        assert 0 <= kib(ledger)[1] * KIB - num_bytes < 3 * 512


def test_copies_go_over_the_link():
    """Between devices, and between host and device, the bytes are counted at either end; on one device none are."""
    ledger, host = ledger_of(), ones(4)
    with ledger:
        with ledger.on(0):
            a = torch.empty(4, KIB_OF_FLOATS).resize_(4 * KIB_OF_FLOATS)
        with ledger.on(1):
            b = torch.empty(4 * KIB_OF_FLOATS)
        assert ledger.timeline.launched_s == [0, 0]  # empty memory computes nothing
        b.copy_(a)
        a.copy_(host)
        host.copy_(b)
        assert ledger.timeline.link_bytes == [8 * KIB, 8 * KIB]
        a.copy_(a.flip(0))
        assert ledger.timeline.link_bytes == [8 * KIB, 8 * KIB]
    assert ledger.timeline.busy_s[0] > 0


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (torch.Tensor.item, True),
        (torch.Tensor.nonzero, True),
        (lambda x: x[x > 0], True),
        (torch.unique, True),
        (lambda x: torch.equal(x, x), True),
        (lambda x: x[torch.zeros(1, dtype=torch.int64)], False),
        (torch.sum, False),
    ],
    ids=["item", "nonzero", "mask", "unique", "equal", "index", "sum"],
)
def test_reading_a_result_on_the_host_waits_for_the_device(read, waits):
    """What the host must know before it goes on, a value or a size, stops its launches until then."""
    ledger = ledger_of()
    with ledger, ledger.on(0):
        x = torch.ones(1)
        ledger.timeline.launch(0, 1.0)
        read(x)
    assert (ledger.timeline.launched_s[0] > 1.0) == waits


def test_inference_mode_is_metered_like_any_other():
    """There torch shows whole layers instead of their operations; time and memory are the same as under no_grad."""
    figures = []
    for mode in (torch.no_grad, torch.inference_mode):
        ledger = ledger_of()
        with ledger, ledger.on(0), mode():
            layer, x = nn.Linear(512, 512), torch.ones(512, 512)
            kept = layer(x.reshape(512, 512)).softmax(-1)
            figures.append((kib(ledger), ledger.timeline.busy_s, ledger.allocators[0].peak_allocated_bytes))
            del kept
    assert figures[0] == figures[1]


def test_torch_still_works_the_way_the_ledger_needs():
    """What the ledger builds on is torch's, partly private: should it change, this says which of it
    and where to look."""
    say = f"torch {torch.__version__} has changed under splittune/hardware/virtual/ledger.py: "

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert all(kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ for kind in types), say + "types"
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    weight = nn.Parameter(torch.ones(2, 2))
    with Names():
        (weight @ weight).sum().backward()
    assert names.count("aten::mm") == 3, say + "a dispatch mode does not see forward and backward"

    add_ = torch.ops.aten.add_.Tensor
    assert (add_._schema.name, add_._schema.is_mutable) == ("aten::add_", True), say + "OpOverload._schema"
    assert torch.Tag.inplace_view in torch.ops.aten.resize_.default.tags, say + "Tag.inplace_view"
    for tag, read in (("dynamic_output_shape", "nonzero"), ("data_dependent_output", "_local_scalar_dense")):
        assert getattr(torch.Tag, tag) in getattr(torch.ops.aten, read).default.tags, f"{say}Tag.{tag}"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = [name for name in ("aten::linear", "aten::mm") if has_kernel(name, "CompositeImplicitAutograd")]
    assert composite == ["aten::linear"], say + "composite operators"

    deaths: list[object] = []
    x = torch.ones(3)
    key, ref = id(x.untyped_storage()), weakref.ref(x.untyped_storage(), deaths.append)
    view = x.view(3, 1)
    assert ref() is not None, say + "a storage's Python object dies before the storage"
    assert id(view.untyped_storage()) == key, say + "a storage's Python object is not the same each time"
    del x, view
    assert ref() is None, say + "a storage's death is not seen by weak references"
    assert deaths == [ref], say + "a weak reference to a storage calls back more or less than once"
