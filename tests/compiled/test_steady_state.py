"""The steady state of score, plan and observe: launches and views, nothing else.

Under a stand-in driver kernels are compiled for sm_90 and dropped, so what the host does is all that is left to see.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from av_triton import AdaptiveVerifier, CostTable, Plan, Settings
from tests.compiled.standin import GPU, gpu, torch_log

SLOTS, ROWS, K, VOCAB, STEPS = 96, 64, 5, 1024, 300
COST = CostTable(draft=[(1, 1.0), (ROWS, 2.0)], verify=[(1, 1.0), (400, 9.0)], captured=[1, 8, 64, 128])
BLOCK, AUTOREGRESSIVE = Settings(refit_interval=4), Settings(refit_interval=4, autoregressive=True)
ADDITIONS = Settings(refit_interval=4, offset_prior=4.0)  # and exact labels
KEEPING = Settings(refit_interval=4, entropy=True, history=True)
SETTINGS = {
    "block": (BLOCK, None),
    "autoregressive": (AUTOREGRESSIVE, None),
    "offset and exact labels": (ADDITIONS, None),
    "entropy and history": (KEEPING, None),
    "head": (ADDITIONS, 576),
    "head, autoregressive": (AUTOREGRESSIVE, 576),
}
every_setting = pytest.mark.parametrize("settings, hidden_size", SETTINGS.values(), ids=SETTINGS)
PER_STEP = {"budget_kernel": 1, "select_kernel": 1, "observe_kernel": 1}


def per_step(settings: Settings, hidden_size: int | None) -> dict[str, int]:
    """Launches: a score for each pass of the drafter, and with a head its correction and, once a step, its learning."""
    scores = K if settings.autoregressive else 1
    head = {} if hidden_size is None else {"correct_kernel": scores, "learn_kernel": 1}
    return {**PER_STEP, "logit_max_kernel": scores, **head}


class Runtime:
    """Tensors as an engine holds them, allocated once, and one decode step of `rows` requests from row `first` on."""

    def __init__(self, settings: Settings, hidden_size: int | None = None) -> None:
        self.verifier = AdaptiveVerifier(SLOTS, K, cost=COST, settings=settings, max_rows=ROWS, hidden_size=hidden_size)
        self.autoregressive = settings.autoregressive
        self.logits = torch.zeros(ROWS, K, VOCAB, dtype=torch.bfloat16)
        self.slots = torch.arange(ROWS, dtype=torch.int32)
        self.accepted = torch.zeros(ROWS, dtype=torch.int32)
        self.acceptance = torch.ones(ROWS, K) if settings.offset_prior is not None else None
        self.temperature = torch.ones(ROWS)
        drawn = settings.history or hidden_size is not None
        self.tokens = torch.zeros(ROWS, K, dtype=torch.int64) if drawn else None
        self.hidden = None if hidden_size is None else torch.zeros(ROWS, K, hidden_size, dtype=torch.bfloat16)
        self.host_budget: int | None = None
        self.verifier.reset(self.slots)

    def step(self, rows: int = ROWS, first: int = 0) -> tuple[torch.Tensor, Plan]:
        batch = slice(first, first + rows)
        slots = self.slots[batch]
        tokens = None if self.tokens is None else self.tokens[batch]
        hidden = None if self.hidden is None else self.hidden[batch]
        if self.autoregressive:
            for k in range(K):
                drawn, state = (None if each is None else each[:, k] for each in (tokens, hidden))
                scores = self.verifier.score(self.logits[batch, k], slots, k, 1.0, drawn, state)
        else:
            scores = self.verifier.score(self.logits[batch], slots, None, self.temperature[batch], tokens, hidden)
        plan = self.verifier.plan(slots, budget=self.host_budget)
        acceptance = None if self.acceptance is None else self.acceptance[batch]
        self.verifier.observe(slots, self.accepted[batch], acceptance=acceptance)
        return scores, plan


@pytest.fixture
def device() -> Iterator[GPU]:
    with gpu() as counts:
        yield counts


@every_setting
@pytest.mark.parametrize("host_budget", [None, 7], ids=["device budget", "host budget"])
def test_launches_per_step(device: GPU, settings: Settings, hidden_size: int | None, host_budget: int | None) -> None:
    runtime = Runtime(settings, hidden_size)
    runtime.host_budget = host_budget
    runtime.step()
    device.clear()
    for _ in range(STEPS):
        runtime.step()
    assert device.launches == {name: count * STEPS for name, count in per_step(settings, hidden_size).items()}
    assert not device.compilations


@every_setting
@pytest.mark.parametrize("host_budget", [None, 7], ids=["device budget", "host budget"])
def test_no_allocation_and_no_read_by_the_host(
    device: GPU, settings: Settings, hidden_size: int | None, host_budget: int | None
) -> None:
    runtime = Runtime(settings, hidden_size)
    runtime.host_budget = host_budget
    runtime.step()
    with torch_log() as log:
        for _ in range(STEPS):
            runtime.step()
    assert log == Counter()


@pytest.mark.parametrize("settings", [BLOCK, KEEPING], ids=["block", "entropy and history"])
@pytest.mark.parametrize("drawn", [False, True], ids=["argmax", "drawn"])
@pytest.mark.parametrize("position", [None, 2], ids=["block", "one position"])
def test_sampling_is_one_launch_that_allocates_nothing(
    device: GPU, settings: Settings, drawn: bool, position: int | None
) -> None:
    runtime = Runtime(settings)
    logits = runtime.logits if position is None else runtime.logits[:, position]
    seeds = torch.zeros(ROWS, K, dtype=torch.int64)
    seeds = seeds if position is None else seeds[:, position]
    kernel = "sample_kernel" if drawn else "logit_max_kernel"

    def sample(rows: int, first: int) -> None:
        batch = slice(first, first + rows)
        runtime.verifier.sample(
            logits[batch], runtime.slots[batch], seeds[batch] if drawn else None, position, runtime.temperature[batch]
        )

    sample(ROWS, 0)
    device.clear()
    with torch_log() as log:
        for rows in range(1, 51):
            sample(rows, rows % 7)
    assert device.launches == {kernel: 50}
    assert not device.compilations
    assert log == Counter()


@every_setting
def test_no_recompilation_over_50_batch_sizes(device: GPU, settings: Settings, hidden_size: int | None) -> None:
    runtime = Runtime(settings, hidden_size)
    runtime.step()
    compiled = Counter(device.compilations)
    assert compiled == dict.fromkeys([*per_step(settings, hidden_size), "reset_kernel"], 1)
    with torch_log() as log:
        for rows in range(1, 51):
            runtime.step(rows, first=rows % 7)  # rows that start at any address
    assert device.compilations == compiled
    assert log == Counter()


@every_setting
def test_outputs_stay_at_their_addresses(device: GPU, settings: Settings, hidden_size: int | None) -> None:
    runtime = Runtime(settings, hidden_size)

    def addresses(rows: int) -> list[int]:
        scores, plan = runtime.step(rows)
        assert plan.admitted.shape == (rows,)
        assert plan.cu_verify.shape == (rows + 1,)
        return [tensor.data_ptr() for tensor in (scores, *plan)]

    first = addresses(ROWS)
    assert all(addresses(1 + step % ROWS) == first for step in range(STEPS))


PLANTED: dict[str, Callable[[Plan], object]] = {
    "item": lambda plan: plan.budget[0].item(),
    "int": lambda plan: int(plan.budget[0]),
    "if": lambda plan: "all" if plan.budget[0] > 0 else "none",
    "tolist": lambda plan: plan.budget.tolist(),
    "numpy": lambda plan: plan.budget.numpy(),
    "copy to the host": lambda plan: plan.budget.cpu(),
    "new tensor": lambda plan: torch.empty(3),
    "tensor of a number": lambda plan: torch.tensor(3),
    "arithmetic": lambda plan: plan.admitted + 1,
    "copy": lambda plan: plan.admitted.clone(),
    "conversion": lambda plan: plan.admitted.long(),
    "in place": lambda plan: plan.admitted.zero_(),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_the_log_sees_what_is_planted(device: GPU, planted: Callable[[Plan], object]) -> None:
    runtime = Runtime(BLOCK)
    plan = runtime.step()[1]
    with torch_log() as log:
        planted(plan)
    assert log


def test_the_counters_see_an_extra_launch_and_a_recompilation(device: GPU) -> None:
    runtime = Runtime(BLOCK)
    runtime.step()
    device.clear()
    runtime.verifier.score(runtime.logits, runtime.slots)
    assert device.launches == {"logit_max_kernel": 1}
    device.clear()
    runtime.verifier.score(runtime.logits[..., :1000].contiguous().float(), runtime.slots)
    assert device.compilations == {"logit_max_kernel": 1}
