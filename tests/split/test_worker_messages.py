"""What an engine says to a worker arrives as it was meant."""

import json
from dataclasses import replace

import pytest
import torch

from headroom.experts.placement import ExpertPlacement
from headroom.layers.batch import Batch, Span
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.settings import FeatureRequest
from headroom.split.wire import WireError
from headroom.split.worker_messages import (
    ColdReport,
    LoadOrder,
    LoadReport,
    ToldLayer,
    expect,
    read_batch,
    step_message,
)

ORDER = LoadOrder(
    worker=1,
    model="/models/a.gguf",
    identity="abc",
    options=Options(context=512, dtype="f32", api_key="secret", port=99),
    devices=(
        DeviceSpec(name="cpu#1", kind="cpu", total_bytes=5, available_bytes=4, worker=True),
        DeviceSpec(name="cuda:0#2", kind="cuda", total_bytes=9, available_bytes=8, sm=90),
    ),
    plan_digest="d",
    placement=ExpertPlacement(((), (1, 2)), "statistics", (0.0, 0.5), ((), (2,))),
    features=FeatureRequest((3, 1), "q8_0"),
    meeting=("127.0.0.1", 7),
    group="g",
)


def test_an_order_arrives_without_the_settings_of_the_server() -> None:
    found = LoadOrder.read(json.loads(json.dumps(ORDER.message())))
    assert found.options == Options(context=512, dtype="f32")
    assert "secret" not in str(ORDER.message())
    assert found.devices == ORDER.devices
    assert found.features == ORDER.features
    assert (found.worker, found.meeting) == (1, ("127.0.0.1", 7))
    assert found.placement == ORDER.placement
    assert found.placement is not None
    assert (found.placement.promised, found.placement.pinned) == ((0.0, 0.5), ((), (2,)))


def test_a_step_arrives_with_its_pages_and_trees() -> None:
    tree = torch.eye(2, dtype=torch.bool)
    batch = Batch(
        tokens=torch.tensor([5, 6, 7]),
        positions=torch.tensor([0, 9, 10]),
        kv_slots=torch.tensor([1, 2, 3]),
        spans=(
            Span(0, 1, 0, torch.tensor([4]), state_slot=2),
            Span(1, 2, 9, torch.tensor([8, 9]), tree=tree),
        ),
        output_rows=torch.tensor([0, 2]),
    )
    header, tensors = step_message(3, batch, [1], keep=True)
    assert (header["step"], header["logits"], header["keep"]) == (3, [1], True)
    found = read_batch(header, tensors)
    for name in ("tokens", "positions", "kv_slots", "output_rows"):
        assert torch.equal(getattr(found, name), getattr(batch, name))
    for a, b in zip(found.spans, batch.spans, strict=True):
        assert (a.first_row, a.rows, a.start, a.state_slot) == (
            b.first_row, b.rows, b.start, b.state_slot,
        )  # fmt: skip
        assert torch.equal(a.pages, b.pages)
    assert found.spans[0].tree is None
    assert found.spans[1].tree is not None
    assert torch.equal(found.spans[1].tree, tree)


def test_a_report_arrives() -> None:
    report = LoadReport({"kv": 3}, {"kv": 2}, 10, 0.5, 0.0, 64, 7)
    layers = (None, ToldLayer(expert_bytes=7, link_copies=3, path="cpu"))
    cold = ColdReport(
        layers, cold_bytes=90, pinned=True, is_cached=False, same_bits=True, exchanges=True
    )
    for sent in (report, replace(report, cold=cold)):
        assert LoadReport.read(json.loads(json.dumps(sent.message()))) == sent


def test_another_message_than_expected_is_refused() -> None:
    with pytest.raises(WireError, match="'step' came instead of 'load'"):
        expect({"type": "step"}, "load")
