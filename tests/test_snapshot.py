import math
import os

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from av_triton import AcceptanceEstimator, AdaptiveVerifier, Settings
from av_triton.ops.accumulate import GATES, SETTLED
from av_triton.ops.select import Q30
from av_triton.snapshot import HeadSnapshot, Snapshot, SnapshotError
from tests.state import copies, differences
from tests.traffic import settle

STRATA = ["sampled", "greedy"]


def make(**change):
    fields = {
        "num_draft_positions": 3,
        "strata": STRATA,
        "slopes": [0.5, 0.9],
        "intercepts": [[-0.2, -0.4, -0.6], [0.1, 0.0, -0.1]],
        "refits": 7,
    }
    return Snapshot(**(fields | change))


def head(**change):
    two = [[0.5, -1.5, 2.0]] * 2
    fields = {"weights": two, "curvature": [[0.5] * 3] * 2, "mean": two, "variance": [[1.0] * 3] * 2, "behind": [5, 0]}
    return HeadSnapshot(**{"hidden_size": 2} | fields | change)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.data())
def test_what_is_written_is_read_to_the_bit(tmp_path_factory, data):
    positions = data.draw(st.integers(1, 16))
    strata = data.draw(st.lists(st.text(max_size=5), min_size=1, max_size=3, unique=True))
    snapshot = Snapshot(
        num_draft_positions=positions,
        strata=strata,
        slopes=[data.draw(finite.map(abs)) for _ in strata],
        intercepts=[data.draw(st.lists(finite, min_size=positions, max_size=positions)) for _ in strata],
        refits=data.draw(st.integers(0, 2**40)),
    )
    path = tmp_path_factory.getbasetemp() / "snapshot.json"
    snapshot.write(path)
    assert Snapshot.read(path, positions, tuple(strata)) == snapshot


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version is 3, this av_triton reads versions 1 to 2"),
        ({"num_draft_positions": 0}, "num_draft_positions is 0"),
        ({"strata": []}, "at least one stratum"),
        ({"strata": ["a", "a"]}, "none twice"),
        ({"strata": ["a"]}, "1 strata have 2 slopes"),
        ({"slopes": [0.5]}, "1 slopes"),
        ({"slopes": [0.5, -0.1]}, r"slope of stratum 'greedy' is -0\.1"),
        ({"slopes": [math.nan, 0.1]}, "slope of stratum 'sampled' is nan"),
        ({"intercepts": [[0.0] * 3, [0.0] * 2]}, "'greedy' has 2 intercepts for 3 positions"),
        ({"intercepts": [[0.0] * 3, [0.0, 0.0, math.inf]]}, "must be finite"),
        ({"refits": -1}, "refits is -1"),
        ({"labels": [[1, 2, 3]]}, "2 lists of 3 numbers"),
        ({"labels": [[1, 2, 3], [1, 2, -3]]}, "2 lists of 3 numbers"),
        ({"labels": [[1, 2, 3], [1, 2, 1 << 63]]}, r"2 lists of 3 numbers, 0 to 2\^62"),
        ({"gates": [[0], [0]]}, "2 lists of 2 numbers"),
        ({"gates": [[0, 0], [0, -(1 << 64)]]}, r"2 lists of 2 numbers, -2\^62 to 2\^62"),
        ({"head": head(behind=[1, 1 << 64])}, "behind of the head"),
        ({"head": head(weights=[[0.0] * 3])}, "weights of the head has another shape"),
        ({"head": head(variance=[[1.0, 0.0, 1.0]] * 2)}, "variance of the head holds 0.0"),
        ({"head": head(mean=[[math.nan] * 3] * 2)}, "mean of the head holds nan"),
        ({"head": head(weights=[[0.0, 1e38, 0.0]] * 2)}, r"weights of the head holds 1e\+38"),
        ({"head": head(mean=[[-1e38] * 3] * 2)}, r"mean of the head holds -1e\+38"),
        ({"head": head(variance=[[1e38] * 3] * 2)}, r"variance of the head holds 1e\+38"),
        ({"head": head(behind=[1])}, "behind of the head"),
        ({"head": head(weights=[[0.0, 65.0, 0.0]] * 2)}, "weights of the head holds 65.0"),
    ],
)
def test_invalid_coefficients_are_refused_before_they_reach_a_file(change, message):
    with pytest.raises(SnapshotError, match=message):
        make(**change)


def test_read_refuses_other_positions_and_strata(tmp_path):
    path = tmp_path / "fit.json"
    make().write(path)
    with pytest.raises(SnapshotError, match=r"fit\.json: fitted for 3 draft positions, this estimator has 5; load"):
        Snapshot.read(path, 5, STRATA)
    with pytest.raises(SnapshotError, match=r"strata \['sampled', 'greedy'\], this estimator has \['all'\]; give"):
        Snapshot.read(path, 3, ["all"])
    with pytest.raises(SnapshotError, match="same order"):
        Snapshot.read(path, 3, STRATA[::-1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"\x80\x02pickle", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a file of fitted coefficients"),
        (b"null", "not a file of fitted coefficients"),
        (b"{}", "version is None"),
        (b'{"version": 3, "layers": []}', "version is 3"),
        (b'{"version": "1"}', "version is '1'"),
        (b'{"version": 1}', ".*missing required field"),
    ],
)
def test_read_refuses_foreign_and_damaged_files(tmp_path, content, message):
    path = tmp_path / "fit.json"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=rf"fit\.json: {message}.*start without it"):
        Snapshot.read(path, 3, STRATA)


@pytest.mark.parametrize(
    "change",
    [
        {"slopes": [0.5, None]},
        {"slopes": [0.5, "0.9"]},
        {"slopes": [0.5, -1.0]},
        {"intercepts": [[0.0] * 3]},
        {"intercepts": [[0.0] * 3, [0.0] * 4]},
        {"num_draft_positions": 3.5},
        {"extra": 1},
    ],
)
def test_read_refuses_altered_fields(tmp_path, change):
    path = tmp_path / "fit.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(make()) | change))
    with pytest.raises(SnapshotError, match=r"fit\.json: .*start without it"):
        Snapshot.read(path, 3, STRATA)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "fit.json"
    make().write(path)
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(SnapshotError):
            Snapshot.read(path, 3, STRATA)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Snapshot.read(tmp_path / "none", 3, STRATA)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, step):
    path = tmp_path / "fit.json"
    make(refits=1).write(path)

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "replace": (type(path), "replace")}[step], fail)
    with pytest.raises(OSError, match="no space left"):
        make(refits=2).write(path)
    monkeypatch.undo()
    assert Snapshot.read(path, 3, STRATA).refits == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_replaced_only_when_its_content_is_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "fit.json"
    order = []
    for owner, name in ((os, "fsync"), (type(path), "replace")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, real=real: (order.append(name), real(*a))[1])
    make().write(path)
    assert order[:2] == ["fsync", "replace"]


def test_the_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    make().write(tmp_path / "fit.json")
    assert (tmp_path / "fit.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def learned(hidden_size=4, rows=6, steps=40):
    """An estimator whose head has taken some steps and whose gates have moved."""
    torch.manual_seed(3)
    estimator = AcceptanceEstimator(rows, 3, settings=Settings(offset_prior=16.0), hidden_size=hidden_size)
    settle(estimator)
    slots = torch.arange(rows)
    for _ in range(steps):
        hidden = torch.randn(rows, 3, hidden_size or 1)
        estimator.score(torch.randn(rows, 3, 20), slots, hidden=hidden)
        verified = torch.full((rows,), 3)
        estimator.observe(slots, verified, verified, acceptance=(hidden[..., 0] > 0).float())
    return estimator


def test_an_estimator_goes_on_where_it_was_saved(tmp_path):
    before = learned()
    assert before.state.head.weights.abs().max() > 0.1
    assert before.state.gates[1, 0] > 0
    before.save(tmp_path / "fit.json")
    after = AcceptanceEstimator(6, 3, settings=Settings(offset_prior=16.0), hidden_size=4)
    after.load(tmp_path / "fit.json")
    for name in ("slopes", "intercepts", "labels", "gates"):
        assert torch.equal(getattr(before.state, name), getattr(after.state, name)), name
    for name in ("weights", "curvature", "mean", "variance"):
        assert torch.equal(getattr(before.state.head, name), getattr(after.state.head, name)), name
    assert torch.equal(before.state.head.counts[..., 2], after.state.head.counts[..., 2])


def test_a_file_of_version_1_is_loaded_without_a_head(tmp_path):
    path = tmp_path / "fit.json"
    path.write_text(
        '{"version": 1, "num_draft_positions": 3, "strata": ["sampled", "greedy"], "slopes": [0.7, 1.0], '
        '"intercepts": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], "refits": 9}'
    )
    estimator = learned()
    estimator.load(path)
    assert estimator.state.slopes.tolist() == pytest.approx([0.7, 1.0])
    assert estimator.state.head.weights.abs().max() == 0
    assert (estimator.state.head.variance == 1).all()
    assert (estimator.state.gates < 0).all()


def test_a_head_of_another_drafter_is_refused_and_changes_nothing(tmp_path):
    learned(hidden_size=5).save(tmp_path / "fit.json")
    estimator = learned()
    slopes, weights = estimator.state.slopes.clone(), estimator.state.head.weights.clone()
    with pytest.raises(SnapshotError, match="hidden_size 5, this estimator 4; load a file of the same drafter"):
        estimator.load(tmp_path / "fit.json")
    assert torch.equal(estimator.state.slopes, slopes)
    assert torch.equal(estimator.state.head.weights, weights)


def test_without_a_head_the_rest_of_a_file_is_loaded(tmp_path):
    before = learned()
    before.save(tmp_path / "fit.json")
    after = AcceptanceEstimator(6, 3)
    after.load(tmp_path / "fit.json")
    assert torch.equal(before.state.slopes, after.state.slopes)
    assert after.state.head is None


def test_gates_of_a_file_count_in_strata_with_labels_enough_alone(tmp_path):
    before = learned()
    before.state.gates.fill_(Q30)
    before.state.labels[:] = torch.tensor([[SETTLED - 1, 0, 0, 0], [SETTLED - 2, 1, 1, 0]]) * Q30
    before.save(tmp_path / "fit.json")
    after = learned(steps=0)
    after.load(tmp_path / "fit.json")
    assert torch.equal(after.state.gates, torch.tensor([[-GATES[0], Q30], [-GATES[1], Q30]]))


@pytest.mark.parametrize("kept", ["head", "offset", "neither"])
def test_the_gate_of_what_an_estimator_does_not_have_is_closed(tmp_path, kept):
    before = learned()
    before.state.gates.fill_(Q30)
    before.save(tmp_path / "fit.json")
    settings = Settings(offset_prior=16.0 if kept == "offset" else None)
    after = AdaptiveVerifier(6, 3, settings=settings, hidden_size=4 if kept == "head" else None)
    after.load(tmp_path / "fit.json")
    served = after.status().additions
    assert served == tuple(f"{kept}, {stratum}" for stratum in STRATA if kept != "neither")


@pytest.mark.parametrize("slope", [3e38, 1e31])
def test_a_slope_that_no_feature_can_be_multiplied_with_is_refused(tmp_path, slope):
    make(slopes=[0.5, slope]).write(tmp_path / "fit.json")
    estimator = learned()
    before = copies(estimator.state)
    with pytest.raises(SnapshotError, match=r"larger than 2e\+30; start without the file"):
        estimator.load(tmp_path / "fit.json")
    assert not differences(before, copies(estimator.state))
