"""Every refusal says what was wrong, the value and the remedy, and leaves all state as it was."""

import warnings

import pytest
import torch

import av_triton
from av_triton import AcceptanceEstimator, AdaptiveVerifier, CostTable, Settings, VerifyPlanner
from av_triton.backend import use_triton
from av_triton.ops.head import MINIBATCH, PENDING
from av_triton.ops.select import Q30
from tests.state import copies, differences, tensors

K, V = 3, 20
COST = CostTable(draft=[(1, 1.0)], verify=[(1, 1.0), (100, 20.0)])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def floats(*shape):
    return torch.zeros(*shape)


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture
def verifier():
    verifier = AdaptiveVerifier(8, K, cost=COST, max_rows=4)
    verifier.reset(ints(0, 1))
    verifier.score(torch.linspace(0, 1, 2 * K * V).view(2, K, V), ints(0, 1))
    verifier.plan(ints(0, 1))
    return verifier


def state_of(verifier):
    owned = (*verifier.estimator.state, *verifier.planner.state, *verifier.planner._out, *verifier.planner._costs)
    return [t.clone() for t in owned if t is not None]


# (method, arguments, what the message says)
CALLS = [
    ("score", (floats(2, K, V), [0, 1]), "slots has type list: give a tensor"),
    ("score", (floats(2, K, V), ints(0, 1)[None]), r"slots has shape \(1, 2\): give a tensor with one slot per row"),
    ("score", (floats(2, K, V), floats(2)), "slots has dtype torch.float32: give torch.int32 or torch.int64"),
    ("score", (floats(2, K, V), meta(2)), "slots is on meta: move it to cpu"),
    ("score", (floats(2, K, V), ints(0, 9, 1, 9)[::2]), "slots has stride 2: make it contiguous"),
    ("score", (floats(2, K, V), ints(0, 8)), r"slots holds 8: slots are 0 to 7 \(max_slots - 1\), -1 for padding"),
    ("score", (floats(2, K, V), ints(-2, 1)), "slots holds -2: slots are 0 to 7"),
    ("score", (floats(5, K, V), torch.arange(5)), "slots has 5 rows: at most max_rows = 4; split the batch"),
    ("score", (floats(2, K + 1, V), ints(0, 1)), r"logits have shape \(2, 4, 20\): give \[2, 1 to 3, V\] for 2 slots"),
    ("score", (floats(2, 0, V), ints(0, 1)), r"logits have shape \(2, 0, 20\): give \[2, 1 to 3, V\] for 2 slots"),
    ("score", (floats(1, K, V), ints(0, 1)), r"logits have shape \(1, 3, 20\): give \[2, 1 to 3, V\] for 2 slots"),
    ("score", (floats(2, V), ints(0, 1)), r"logits have shape \(2, 20\): give \[2, 1 to 3, V\]"),
    ("score", (floats(2, K, V), ints(0, 1), 1), r"have shape \(2, 3, 20\): give \[2, V\] at position 1 for 2 slots"),
    ("score", (floats(2, V), ints(0, 1), K), "position = 3: draft positions are 0 to 2"),
    ("score", (floats(2, V), ints(0, 1), -1), "position = -1: draft positions are 0 to 2"),
    ("score", (floats(2, V), ints(0, 1), 1.0), "position = 1.0: draft positions are 0 to 2"),
    ("score", (floats(2, V), ints(0, 1), "1"), "position = '1': draft positions are 0 to 2"),
    ("score", (floats(2, V), ints(0, 1), True), "position = True: draft positions are 0 to 2"),
    ("sample", (floats(2, V), ints(0, 1), None, 1.0), "position = 1.0: draft positions are 0 to 2"),
    ("score", ([[1.0]], ints(0, 1)), "logits are list: give a tensor, float32, bfloat16 or float16"),
    ("sample", (None, ints(0, 1)), "logits are NoneType: give a tensor"),
    ("score", (floats(2, K, V).int(), ints(0, 1)), "logits have dtype torch.int32: give float32, bfloat16 or float16"),
    ("score", (floats(2, K, V).double(), ints(0, 1)), "logits have dtype torch.float64: give float32"),
    ("score", (meta(2, K, V, dtype=torch.float32), ints(0, 1)), "logits are on meta: move them to cpu"),
    ("score", (floats(2, K, 0), ints(0, 1)), r"logits have shape \(2, 3, 0\): the last dimension must be 1 to 262144"),
    ("score", (floats(1).expand(2, K, 262_145), ints(0, 1)), "must be 1 to 262144 tokens"),
    ("score", (floats(2, K, 2 * V)[..., ::2], ints(0, 1)), "logits have stride 2 along the vocabulary: make that"),
    ("score", (floats(2, K, V), ints(0, 1), None, -1.0), r"temperature = -1.0: give a finite number, 0 \(greedy\)"),
    ("score", (floats(2, K, V), ints(0, 1), None, float("nan")), "temperature = nan: give a finite number"),
    ("score", (floats(2, K, V), ints(0, 1), None, "hot"), "temperature is 'hot': give None, a number, or float32"),
    ("score", (floats(2, K, V), ints(0, 1), None, floats(3)), r"temperature has shape \(3,\): give one value"),
    ("score", (floats(2, K, V), ints(0, 1), None, floats(2).double()), "temperature is torch.float64 .* give float32"),
    ("score", (floats(2, K, V), ints(0, 1), None, meta(())), "one number on meta, and reading it would wait for the"),
    ("score", (floats(2, K, V), ints(0, 1), None, None, ints(1)), "tokens are torch.int32 on cpu: give int64 on cpu"),
    (
        "score",
        (floats(2, K, V), ints(0, 1), None, None, [1]),
        r"tokens are \[1\]: give int64 on cpu, one per draft, or None",
    ),
    ("score", (floats(2, V), ints(0, 1), 0, None, floats(2, K).long()), r"tokens have shape \(2, 3\): .*, \(2,\)"),
    ("plan", (ints(0, 1), ints(1, 2, 3)), r"drafts has shape \(3,\): give \(2,\)"),
    ("plan", (ints(0, 1), floats(2)), "drafts has dtype torch.float32"),
    ("plan", (ints(0, 1), [1, 2]), r"drafts is list: give a tensor of shape \(2,\) on cpu"),
    ("plan", (ints(0, 8),), "slots holds 8"),
    ("plan", (ints(0, 1), None, -1), "non_draft_tokens = -1: give a whole number, 0 or more"),
    ("plan", (ints(0, 1), None, ints(1, 2)), r"non_draft_tokens has shape \(2,\): give \(1,\)"),
    ("plan", (ints(0, 1), None, None, -5), "budget = -5: give a whole number, 0 or more"),
    ("plan", (ints(0, 1), None, None, 2.5), "budget = 2.5: give a whole number, 0 or more"),
    ("plan", (ints(0, 1), None, None, ints(1).long()), "budget has dtype torch.int64: give torch.int32"),
    ("plan", (ints(0, 1), None, None, meta(1)), "budget is on meta: move it to cpu"),
    ("plan", (ints(0, 1), None, None, None, ints(0)), r"segments has shape \(1,\): give \(2,\)"),
    ("plan", (ints(0, 1), None, None, None, [0, 2]), "segments is list: give a tensor"),
    ("plan", (ints(0, 1), None, None, None, ints(0, 1, 2).long()), "segments has dtype torch.int64: give torch.int32"),
    ("plan", (ints(0, 1), None, None, None, ints(*[0] * 6)), "5 segments: at most max_rows = 4"),
    ("observe", (ints(0, 1), ints(1)), r"accepted has shape \(1,\): give \(2,\)"),
    ("observe", (ints(0, 1), floats(2)), "accepted has dtype torch.float32"),
    ("observe", (ints(0, 1), meta(2)), "accepted is on meta"),
    ("observe", (ints(0, 9), ints(1, 1)), "slots holds 9"),
    ("observe", (ints(0, 1), ints(1, 1), ints(1)), r"admitted has shape \(1,\): give \(2,\)"),
    ("observe", (ints(0, 1), ints(1, 1), None, ints(1, 1)), "teach has dtype torch.int32: give torch.bool"),
    ("observe", (ints(0, 1), ints(1, 1), None, None, floats(2)), r"acceptance has shape \(2,\): give one row per slot"),
    (
        "observe",
        (ints(0, 1), ints(1, 1), None, None, floats(1, K)),
        r"acceptance has shape \(1, 3\): .* \(2, at most 3\)",
    ),
    ("observe", (ints(0, 1), ints(1, 1), None, None, floats(2, K + 1)), r"has shape \(2, 4\): .* \(2, at most 3\)"),
    (
        "observe",
        (ints(0, 1), ints(1, 1), None, None, floats(2, K).double()),
        "acceptance is torch.float64 on cpu: give",
    ),
    ("observe", (ints(0, 1), ints(1, 1), None, None, meta(2, K, dtype=torch.float32)), "torch.float32 on meta: give"),
    ("observe", (ints(0, 1), ints(1, 1), None, None, [0.5]), r"acceptance is \[0.5\]: give float32 on cpu, one probab"),
    ("reset", (ints(0, 8),), "slots holds 8"),
    ("reset", (ints(0, 1), ints(0)), r"strata has shape \(1,\): give \(2,\)"),
    ("reset", (ints(0, 1), ints(0, 1).long()), "strata has dtype torch.int64: give torch.int32"),
    ("reset", (ints(0, 1), ints(0, 2)), r"strata holds \[0, 2\]: give 0 to 1, for \('sampled', 'greedy'\)"),
    ("set_cost", ({"verify": []},), "cost is dict: give a CostTable, or None to verify all"),
]


D = 5
HIDDEN = [
    ([1.0], r"hidden is \[1.0\]: give float32, bfloat16 or float16 on cpu, or None"),
    (floats(2, K, D).double(), "hidden is torch.float64 on cpu: give float32, bfloat16 or float16 on cpu, or None"),
    (floats(2, K, D).int(), "hidden is torch.int32 on cpu: give float32"),
    (meta(2, K, D, dtype=torch.float32), "hidden is torch.float32 on meta: give .* on cpu"),
    (floats(2, K, D + 1), r"shape \(2, 3, 6\): give \[2, 5\] or \[2, 3, 5\], for 2 slots and hidden_size = 5"),
    (floats(2, K - 1, D), r"hidden has shape \(2, 2, 5\): give \[2, 5\] or \[2, 3, 5\]"),
    (floats(3, D), r"hidden has shape \(3, 5\): give \[2, 5\]"),
    (floats(D), r"hidden has shape \(5,\): give"),
    (floats(2, K, D, 1), r"hidden has shape \(2, 3, 5, 1\): give"),
    (floats(2, D, K).transpose(1, 2), "hidden has stride 3 in its last dimension: give contiguous vectors"),
    (floats(2, 2 * D)[:, ::2], "hidden has stride 2 in its last dimension"),
]


@pytest.mark.parametrize("method", ["score", "sample"])
@pytest.mark.parametrize("hidden,message", HIDDEN)
def test_refused_hidden_states_change_nothing(method, hidden, message):
    verifier = AdaptiveVerifier(8, K, cost=COST, max_rows=4, hidden_size=D)
    before = copies(verifier.estimator.state)
    with pytest.raises(ValueError, match=message):
        getattr(verifier, method)(floats(2, K, V), ints(0, 1), hidden=hidden)
    assert not differences(before, copies(verifier.estimator.state))


@pytest.mark.parametrize("options", [{}, {"settings": Settings(head=False), "hidden_size": D}])
def test_hidden_states_are_ignored_where_there_is_no_head(options):
    verifier = AdaptiveVerifier(8, K, cost=COST, **options)
    assert verifier.estimator.state.head is None
    plain = verifier.score(floats(2, K, V), ints(0, 1)).clone()
    assert torch.equal(verifier.score(floats(2, K, V), ints(0, 1), hidden=floats(2, K, D)), plain)


@pytest.mark.parametrize("method,arguments,message", CALLS)
def test_a_refused_call_says_why_and_changes_nothing(verifier, method, arguments, message):
    before = state_of(verifier)
    with pytest.raises(ValueError, match=message):
        getattr(verifier, method)(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(before, state_of(verifier), strict=True))


def test_gradients_are_left_behind():
    """Else the state would hold the graph of every step there ever was."""
    settings = Settings(offset_prior=1.0, entropy=True, history=True, refit_interval=1)
    estimator = AcceptanceEstimator(8, K, settings=settings, hidden_size=D)
    logits, hidden, acceptance = (floats(2, K, n).squeeze(-1).requires_grad_() for n in (V, D, 1))
    for _ in range(2):
        estimator.score(logits, ints(0, 1), tokens=floats(2, K).long(), hidden=hidden)
        assert not estimator.sample(logits, ints(0, 1), hidden=hidden).scores.requires_grad
        estimator.observe(ints(0, 1), ints(1, 1), ints(2, 2), acceptance=acceptance)
    assert not [name for name, tensor in tensors(estimator.state).items() if tensor.requires_grad]


def test_what_is_built_in_inference_mode_works_outside():
    with torch.inference_mode():
        verifier = AdaptiveVerifier(8, K, cost=COST, settings=Settings(refit_interval=1, lag=1), hidden_size=D)
    for mode in (False, True, False):
        with torch.inference_mode(mode):
            verifier.reset(ints(0, 1))
            verifier.score(floats(2, K, V), ints(0, 1), hidden=floats(2, K, D))
            verifier.plan(ints(0, 1))
            verifier.observe(ints(0, 1), ints(1, 1), acceptance=floats(2, K))
            verifier.set_cost(COST)
    assert verifier.counters()["refits"] == 3


def some_steps(path):
    verifier = AdaptiveVerifier(2, K, cost=COST, settings=Settings(refit_interval=1, offset_prior=1.0), hidden_size=D)
    verifier.estimator.state.gates.fill_(1 << 30)
    verifier.estimator.state.head.counts[..., PENDING] = (MINIBATCH - 1) * Q30
    options = {"generator": torch.Generator().manual_seed(4), "dtype": torch.float32, "device": "cpu"}
    slots, verdicts = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([0, 1], [1, 2]))
    for step in range(3):
        logits, hidden = (torch.rand(2, K, n, **options) for n in (V, D))
        if step == 1:
            verifier.sample(logits, slots, hidden=hidden)
        else:
            verifier.score(logits, slots, hidden=hidden)
        verifier.plan(slots)
        verifier.observe(slots, verdicts, acceptance=torch.rand(2, K, **options))
        verifier.save(path)
        verifier.load(path)
    return copies(verifier.estimator.state) | copies(verifier.planner.state)


@pytest.mark.parametrize("dtype,device", [(torch.bfloat16, None), (torch.float64, None), (torch.float32, "meta")])
def test_defaults_of_torch_do_not_matter(backend, dtype, device, tmp_path):
    """Engines change them while they load a model."""
    plain = some_steps(tmp_path / "fit.json")
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        changed = some_steps(tmp_path / "fit.json")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert not differences(plain, changed)
    assert bool((plain["head.weights"] != 0).any())


def test_slots_on_the_device_that_are_out_of_range_count_as_padding(use):
    """Kernels cannot raise. (The torch references refuse such host tensors: see the calls above.)"""
    use("triton")
    verifier = AdaptiveVerifier(8, K, cost=COST, max_rows=4)
    slots = torch.tensor([3, 8, -7, 1 << 40])
    before = state_of(verifier)
    p = verifier.score(torch.randn(4, K, V), slots)
    assert p[1:].tolist() == [[0.0] * K] * 3
    plan = verifier.plan(slots)
    assert plan.cu_verify.tolist() == [0, 4, 4, 4, 4]
    verifier.observe(slots, ints(1, 1, 1, 1))
    verifier.reset(slots)
    assert verifier.counters()["drafted"].tolist() == [1] * K
    for old, new in zip(before[:3], state_of(verifier)[:3], strict=True):
        rows = [0, 1, 2, 4, 5, 6, 7]
        assert torch.equal(old[rows], new[rows])


@pytest.mark.parametrize("drafts,accepted,admitted", [((99, -5), (77, 2), (2**31 - 1, -3)), ((0, 3), (3, -9), (3, 99))])
def test_counts_on_the_device_that_are_out_of_range_are_kept_within(backend, drafts, accepted, admitted):
    verifier = AdaptiveVerifier(8, K, cost=COST, settings=Settings(refit_interval=1))
    for _ in range(2):
        verifier.score(torch.randn(2, K, V), ints(0, 1))
        plan = verifier.plan(ints(0, 1), drafts=ints(*drafts))
        assert bool(((plan.admitted >= 0) & (plan.admitted <= K)).all())
        verifier.observe(ints(0, 1), ints(*accepted), admitted=ints(*admitted))
    c = verifier.coefficients()
    assert bool(torch.tensor(c.slopes).isfinite().all() & torch.tensor(c.intercepts).isfinite().all())
    assert all(bool((v >= 0).all()) for n, v in verifier.counters().items() if n != "trimmed")


CONSTRUCTION = [
    ((0, K), {}, "max_slots = 0: give the size of the engine's request pool, 1 to 1048576"),
    ((8.0, K), {}, "max_slots = 8.0: give a whole number"),
    ((1 << 21, K), {}, "max_slots = 2097152"),
    ((8, 0), {}, "num_draft_positions = 0: give K, 1 to 16"),
    ((8, 17), {}, "num_draft_positions = 17: give K, 1 to 16"),
    ((8, K), {"max_rows": 0}, "max_rows = 0: give the largest batch, 1 to 1024 rows"),
    ((8, K), {"max_rows": 1025}, "max_rows = 1025"),
    ((8, K), {"max_rows": "4"}, "max_rows = '4': give a whole number"),
    ((True, K), {}, "max_slots = True: give a whole number"),
    ((8, K), {"settings": {}}, "settings is dict: give a Settings, or None for the defaults"),
    ((8, K), {"settings": {"head": False}}, "settings is dict: give a Settings"),
]


@pytest.mark.parametrize("cls", [AdaptiveVerifier, AcceptanceEstimator])
@pytest.mark.parametrize("size", [0, -1, 8193, 1.5, "64", True])
def test_hidden_sizes_out_of_bounds(cls, size):
    with pytest.raises(ValueError, match=f"hidden_size = {size!r}: give the width .* 1 to 8192, or None"):
        cls(8, K, hidden_size=size)


@pytest.mark.parametrize("cls", [AdaptiveVerifier, AcceptanceEstimator, VerifyPlanner])
@pytest.mark.parametrize("sizes,options,message", CONSTRUCTION)
def test_sizes_out_of_bounds(cls, sizes, options, message):
    with pytest.raises(ValueError, match=message):
        cls(*sizes, **options)


def test_a_cost_of_another_type():
    with pytest.raises(ValueError, match="cost is list: give a CostTable"):
        AdaptiveVerifier(8, K, cost=[(1, 1.0)])


SETTINGS = [
    ("refit_interval", 0, "at least 1"), ("refit_interval", 1.5, "whole number"), ("refit_interval", "8", "whole"),
    ("ridge", 0.0, "positive"), ("ridge", float("nan"), "positive"), ("ridge", "x", "number"),
    ("memory", 0.5, "1 or more"), ("offset_prior", 0.0, "at least 0.01"), ("offset_prior", "2", "number or None"),
    ("offset_prior", float("nan"), "at least 0.01"), ("offset_prior", float("inf"), "finite"),
    ("damping", -1.0, "0 or more"), ("max_slope_step", 0.0, "positive"), ("max_intercept_step", float("inf"), "most"),
    ("strata", (), "1 to 8"), ("strata", ("a", "a"), "name of its own"), ("initial_slopes", (0.5,), "for each of 2"),
    ("initial_slopes", (0.5, -1.0), "0 or more"), ("initial_slopes", (0.5, 3e38), "at most 1e\\+30"),
    ("initial_slopes", 0.5, "for each of 2"), ("initial_slopes", (0.5, "a"), "for each of 2"),
    ("initial_intercept", float("nan"), "at most 1e"), ("initial_intercept", 3e38, "at most 1e"),
    ("max_slope_step", 1e300, "at most 1e"), ("max_intercept_step", 1e300, "at most 1e"),
    ("strata", "ab", "1 to 8"), ("strata", ("a", 3), "1 to 8"), ("strata", None, "1 to 8"),
    ("head", 0, "True or False"), ("head", "no", "True or False"), ("entropy", "off", "True or False"),
    ("history", None, "True or False"), ("autoregressive", "no", "True or False"),
    ("refit_interval", True, "whole number"), ("ridge", True, "number"), ("offset_prior", True, "number or None"),
    ("replicas", 0, "at least 1"),
    ("policy", "current", "earlier, fixed or lookahead"), ("policy", "fixed", "only then"),
    ("fixed_budget", 3, "only then"), ("fixed_budget", "3", "whole number or None"),
    ("exploration", 1.5, "0 to 1"), ("exploration", -0.1, "0 to 1"), ("exploration", float("nan"), "0 to 1"),
    ("lag", -1, "0 to 16"), ("lag", 1.5, "whole number"), ("minimum_gain", 0.0, "at least 0.01"),
    ("max_verify_tokens", 0, "at least 1"), ("max_verify_tokens", 7.5, "whole number"),
]  # fmt: skip


@pytest.mark.parametrize("name,value,remedy", SETTINGS)
def test_settings_name_the_field_the_value_and_the_remedy(name, value, remedy):
    with pytest.raises(ValueError, match=rf"Settings\.\w+ = .*{remedy}") as caught:
        Settings(**{name: value})
    assert name in str(caught.value) or name == "policy"
    assert repr(value) in str(caught.value) or name == "policy"


def test_an_unknown_setting():
    with pytest.raises(TypeError, match="temperature"):
        Settings(temperature=1.0)


def test_a_fixed_budget_below_zero():
    with pytest.raises(ValueError, match=r"Settings.fixed_budget = -1: give a whole number, 0 or more"):
        Settings(policy="fixed", fixed_budget=-1)


def test_a_backend_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("AV_TRITON_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"AV_TRITON_BACKEND='cuda' is not a backend: set it to one of auto, torch"):
        use_triton(torch.device("cpu"))


def test_triton_on_cpu_tensors_without_the_interpreter(monkeypatch):
    monkeypatch.setenv("AV_TRITON_BACKEND", "triton")
    monkeypatch.setattr("av_triton.backend.triton.knobs.runtime.interpret", False)
    monkeypatch.setattr("av_triton.backend._has_driver", lambda: False)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        use_triton(torch.device("cpu"))


def test_an_estimator_alone_needs_the_verified_lengths():
    with pytest.raises(ValueError, match=r"admitted is None: .* needs the verified lengths"):
        AcceptanceEstimator(8, K).observe(ints(0), ints(1), None)


def test_a_planner_alone_needs_scores_by_slot():
    planner = VerifyPlanner(8, K, cost=COST)
    for scores in (floats(8, K), floats(2, 4), floats(8, 4).double()):
        with pytest.raises(ValueError, match=r"give float32 \(8, 4\), one row per slot"):
            planner.plan(scores, ints(0, 1))


W, B = torch.ones(1), floats(1, K)
OPS = [
    ("logit_max", (floats(2, V).int(),), "logits have dtype torch.int32"),
    ("logit_max", (floats(2, V).double(),), "logits have dtype torch.float64: give float32"),
    ("logit_max", (floats(()),), r"logits have shape \(\)"),
    ("logit_max", (floats(V, 2).t(),), "logits have stride 2 along the vocabulary"),
    ("logit_max", (floats(2, V), floats(3)), r"temperature has shape \(3,\): give one value"),
    ("logit_max_partial", (floats(2, 0),), "the last dimension must be 1 to 262144 tokens"),
    ("logit_max_partial", (floats(2, V), -0.5), "temperature = -0.5"),
    ("merge_logit_max", (floats(2, 3), floats(3, 2)), r"\(2, 3\) and complement \(3, 2\) must have one shape"),
    ("merge_logit_max", (floats(0, 3), floats(0, 3)), "at least one shard along dim 0: stack the outputs"),
    ("logit_max_and_entropy", (floats(2, V).int(),), "logits have dtype torch.int32"),
    ("logit_max_and_entropy", (floats(2, V), floats(3)), r"temperature has shape \(3,\): give one value"),
    ("entropy_partial", (floats(2, 0),), "the last dimension must be 1 to 262144 tokens"),
    ("merge_entropy", (floats(2, 3), floats(2, 3), floats(3)), r"\(2, 3\) and moment \(3,\) must have one shape"),
    ("merge_entropy", (floats(0, 3),) * 3, "at least one shard along dim 0: stack the outputs of entropy_partial"),
    ("acceptance_score", (floats(2, K).double(), W, B[0]), r"features are torch.float64 \(2, 3\): give float32"),
    ("acceptance_score", (floats(2, K), W, floats(2)), r"slope \(1,\) and intercepts \(2,\): give one slope and one"),
    ("acceptance_score", (floats(2, K), floats(2), B[0]), "give one slope and one intercept for each of 3"),
    ("acceptance_score", (floats(2, K), W.double(), B[0]), "slope is torch.float64 .* give float32 on cpu"),
    ("score_logits", (floats(V), W, B[0]), r"logits have shape \(20,\): give \[..., K, V\]"),
    ("score_logits", (floats(2, K, V), W, B[0], floats(3)), r"temperature has shape \(3,\): give one value"),
    ("score_logits", (floats(2, K, V).int(), W, B[0]), "logits have dtype torch.int32"),
    ("score_logits", (floats(2, K, V), W, floats(2)), "give one slope and one intercept for each of 3"),
    ("survival", (floats(2, K).double(),), r"scores are torch.float64 \(2, 3\): give float32 \[rows, K\]"),
    ("survival", (floats(K),), r"scores are torch.float32 \(3,\)"),
    ("survival", (floats(K, 2).t(),), "scores have stride 2 along the positions"),
    ("survival", (floats(2, K), ints(1)), r"drafts has shape \(1,\): give \(2,\)"),
    ("segmented_topk", (floats(2, K).double(), ints(1, 1), ints(1)), "survival is torch.float64"),
    ("segmented_topk", (floats(1025, K), ints(1), ints(1)), r"survival has shape \(1025, 3\): at most 1024 rows x 16"),
    ("segmented_topk", (floats(2, 17), ints(1, 1), ints(1)), "at most 1024 rows x 16 positions; call once per group"),
    ("segmented_topk", (floats(2, K), ints(1), ints(1)), r"drafts has shape \(1,\): give \(2,\)"),
    ("segmented_topk", (floats(2, K), ints(1, 1), ints(1, 2)), r"budgets has shape \(2,\): give \(1,\)"),
    ("segmented_topk", (floats(2, K), ints(1, 1), ints(1).long()), "budgets has dtype torch.int64: give torch.int32"),
    ("choose_budget", (floats(2, K).double(), ints(1, 1), floats(5).double()), "survival is torch.float64"),
    ("choose_budget", (floats(2, 17), ints(1, 1), floats(5).double()), "at most 1024 rows x 16 positions"),
    ("choose_budget", (floats(2, K), ints(1), floats(5).double()), r"drafts has shape \(1,\): give \(2,\)"),
    ("choose_budget", (floats(2, K), ints(1, 1), floats(5)), r"cost is torch.float32 \(5,\) on cpu: give float64"),
    ("choose_budget", (floats(2, K), ints(1, 1), floats(0).double()), "give float64"),
    ("choose_budget", (floats(2, K), ints(1, 1), floats(2, 5).double()), "cost has 2 rows: give one for each of 1"),
    ("choose_budget", (floats(2, K), ints(1, 1), floats(5).double(), ints(1, 2)), "sampling_requests has shape"),
    ("choose_budget", (floats(2, K), ints(1, 1), floats(5).double(), None, None, -1), "limit = -1: give 0 or more"),
    ("choose_budget", (floats(2, K), ints(1, 1), floats(5).double(), *[None] * 3, "best"), "policy = 'best'"),
    ("accumulate", (floats(2, K).double(), ints(1, 1), ints(1, 1), W, B), "features are torch.float64"),
    ("accumulate", (floats(2, 17), ints(1, 1), ints(1, 1), W, floats(1, 17)), "K <= 16"),
    ("accumulate", (floats(2, K), ints(1), ints(1, 1), W, B), r"accepted has shape \(1,\): give \(2,\)"),
    ("accumulate", (floats(2, K), ints(1, 1), ints(1), W, B), r"admitted has shape \(1,\): give \(2,\)"),
    ("accumulate", (floats(2, K), ints(1, 1), ints(1, 1), W, floats(2, K)), r"give \[strata\] and \[strata, 3\]"),
    ("accumulate", (floats(2, K), ints(1, 1), ints(1, 1), W.double(), B), "slope is torch.float64 .* give float32"),
    ("accumulate", (floats(2, K), ints(1, 1), ints(1, 1), W, B, ints(0, 0).long()), "strata has dtype torch.int64"),
    ("accumulate", (floats(2, K), ints(1, 1), ints(1, 1), W, B, None, ints(1, 1)), "teach has dtype torch.int32"),
    ("accumulate", (floats(2, K), ints(1, 1), ints(1, 1), W, B, None, None, floats(2, 2)), r"\(2, 2\): give \(2, 3\)"),
    ("accumulate", (floats(2, K), ints(1, 1), ints(1, 1), W, B, None, None, W), "acceptance has shape"),
    ("refit", (floats(1, 6, K), W, B), r"sums are torch.float32 \(1, 6, 3\): give int64 \[strata, 6, K\]"),
    ("refit", (floats(1, 5, K).long(), W, B), "sums are torch.int64"),
    ("refit", (floats(1, 6, K).long(), W, floats(1, 2)), r"do not fit sums \(1, 6, 3\): give \(1,\) and \(1, 3\)"),
    ("refit", (floats(1, 6, K).long(), W.double(), B), "must be float32 on cpu"),
]  # fmt: skip


@pytest.mark.parametrize("name,arguments,message", OPS)
def test_ops_refuse_what_they_cannot_take(backend, name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(av_triton, name)(*arguments)


def test_warnings_are_raised_once_and_by_the_constructor():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verifier = AdaptiveVerifier(8, K)
        for _ in range(3):
            verifier.plan(ints(0, 1))
            verifier.observe(ints(0, 1), ints(0, 0))
    assert [str(w.message) for w in caught] == [
        "no cost table: every draft is verified; measure one with CostTable.measure()"
    ]
