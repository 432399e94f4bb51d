"""The logits that a family's scores are of, and the temperature that its drafts were chosen at."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from av_triton import AdaptiveVerifier, logit_max
from av_triton_sglang import dflash, eagle, step

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed: run make test-sglang"),
]

ROWS, POSITIONS, CANDIDATES, VOCAB = 32, 5, 4, 16


class Recorder:
    """In place of a step context: the arguments of every `score`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[SimpleNamespace] = []
        self.hidden: Tensor | None = None
        monkeypatch.setattr(step, "_current", self)

    def start_drafting(self) -> int:
        return 3

    def score(
        self, logits: Tensor, position: int | None = None, temperature: Tensor | None = None, **places: Any
    ) -> None:
        self.calls.append(
            SimpleNamespace(
                logits=logits,
                position=position,
                temperature=temperature,
                slots=places.get("slots"),
                hidden=places.get("hidden"),
            )
        )


@pytest.mark.parametrize("positions", [3, 4, 7])
@pytest.mark.parametrize("chunk", [1, 256])
def test_dflash_drafts_are_the_argmax_and_scored(monkeypatch: pytest.MonkeyPatch, positions: int, chunk: int) -> None:
    torch.manual_seed(0)
    verifier, rows = AdaptiveVerifier(6, positions, hidden_size=8), 3
    slots = torch.tensor([4, 0, 5])
    context = SimpleNamespace(
        num_draft_positions=positions,
        ranks=SimpleNamespace(alone=True),
        sample=lambda logits, first, hidden: step.StepContext.sample(context, logits, first, hidden),
        _known=lambda hidden, logits: step.StepContext._known(context, hidden, logits),
        verifier=verifier,
        slots=lambda count, first: slots[first : first + count],
    )
    hidden, weight = torch.randn(rows * positions, 8), torch.randn(VOCAB, 8)
    tokens = dflash._argmax_and_score(context, hidden, weight, 0, chunk)
    logits = hidden @ weight.T
    assert torch.equal(tokens, logits.argmax(-1))
    found = verifier.estimator.state.features[slots, :positions]
    torch.testing.assert_close(found, logit_max(logits).view(rows, positions))
    kept = verifier.estimator.state.head.inputs[slots, :positions]
    torch.testing.assert_close(kept, hidden.view(rows, positions, 8).clamp(-4, 4).half())


def test_dflash2_scores_the_rows_that_were_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.models.dflash import CandidateSelector

    torch.manual_seed(0)
    recorder = Recorder(monkeypatch)
    hidden = torch.randn(ROWS, POSITIONS, 8)
    dflash.note(None, hidden_states=hidden, candidate_ids=None, unary_logits=None, anchor_token_ids=None)
    greedy = torch.arange(ROWS) % 4 == 0
    temperatures = torch.rand(ROWS) + 0.5
    scores = torch.randn(ROWS, POSITIONS, CANDIDATES, CANDIDATES) * 2
    scores[:, 0] = scores[:, 0, :1]
    tokens, distributions = dflash.walk(
        CandidateSelector.sample_path,
        SimpleNamespace(top_k=CANDIDATES),
        candidate_ids=torch.rand(ROWS, POSITIONS, VOCAB).topk(CANDIDATES).indices,
        scores=scores,
        uniforms=torch.rand(ROWS, POSITIONS),
        temperatures=temperatures,
        greedy_mask=greedy,
    )
    assert tokens.shape == (ROWS, POSITIONS)
    [call] = recorder.calls
    assert call.temperature.tolist() == torch.where(greedy, 0, temperatures).tolist()
    assert torch.equal(call.hidden, hidden)
    walked = torch.softmax(call.logits / temperatures[:, None, None], -1)
    torch.testing.assert_close(walked[~greedy], distributions[~greedy])
    # Greedy rows: the distribution is one-hot, at the best of the row that was walked.
    assert walked[greedy].argmax(-1).tolist() == distributions[greedy].argmax(-1).tolist()


def runner_of(logits: list[Tensor]) -> Any:
    waiting = iter(logits)

    class Runner:
        def forward(self, *args: Any) -> SimpleNamespace:
            out = next(waiting)
            return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=out, hidden_states=out[:, :2] + 0.5))

    return Runner()


@pytest.mark.parametrize("drawn", [True, False])
def test_eagle_scores_at_the_temperature_of_rejection_sampling(monkeypatch: pytest.MonkeyPatch, drawn: bool) -> None:
    from sglang.srt import runtime_context

    recorder = Recorder(monkeypatch)
    spec = SimpleNamespace(speculative_use_rejection_sampling=drawn)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    sampling = SimpleNamespace(temperatures=torch.tensor([[0.7], [1.3]]))
    width = 3
    extended = torch.arange(2.0 * width)[:, None].expand(-1, VOCAB)
    drafter = SimpleNamespace(
        draft_runner=runner_of([torch.zeros(2, VOCAB), torch.ones(2, VOCAB), torch.ones(2, VOCAB), extended]),
        speculative_num_draft_tokens=width,
        cuda_graph_runner_for_draft_extend=None,
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=sampling,
        req_pool_indices=torch.tensor([4, 2]),
    )

    def forwards(count: int) -> Any:
        def original(drafter: Any, *args: Any, **kwargs: Any) -> None:
            for _ in range(count):
                drafter.draft_runner.forward(None)

        return original

    eagle.extend_prefill(forwards(1), drafter, batch)
    eagle.draft(forwards(2), drafter, batch)
    eagle.extend_decode(forwards(1), drafter, batch, SimpleNamespace(accept_lens=torch.tensor([3, 1])))
    assert [call.position for call in recorder.calls] == [0, 1, 2, 0]
    assert recorder.calls[0].slots.tolist() == [4, 2]
    # After the last accepted token of each row: columns 2 and 0 of their windows.
    assert recorder.calls[3].logits[:, 0].tolist() == [2.0, 3.0]
    # A captured draft extend has taken them already.
    assert recorder.calls[3].hidden[:, 0].tolist() == [2.5, 3.5]
    replay = SimpleNamespace(
        execute=lambda: SimpleNamespace(next_token_logits=torch.full((2, VOCAB), 7.0), hidden_states=None)
    )
    drafter.cuda_graph_runner_for_draft_extend = replay
    accepted = SimpleNamespace(accept_lens=torch.tensor([3, 1]))
    eagle.extend_decode(lambda drafter, *_, **__: replay.execute(), drafter, batch, accepted)
    assert recorder.calls[4].position == 0
    assert recorder.calls[4].logits[:, 0].tolist() == [7.0, 7.0]
    for call in recorder.calls:
        given = None if call.temperature is None else call.temperature.tolist()
        assert given == (pytest.approx([0.7, 1.3]) if drawn else None)
