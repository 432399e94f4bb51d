"""The collector of traces: its columns against their definitions, the loader, and going on where it was stopped."""

import math

import numpy as np
import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from av_triton.demo.sampling import nucleus
from benchmarks.traces import collect, quality
from tests.demo import tiny

PROMPTS = [4, 9, 2, 15, 6, 3]


def law_of(logits, temperature, top_p):
    """The definition: tokens by falling probability until their mass reaches top_p, renormalised; float64."""
    weights = [math.exp(x / temperature) for x in logits]
    total, mass, kept = sum(weights), 0.0, {}
    for token in sorted(range(len(weights)), key=lambda t: -weights[t]):
        if mass >= top_p:
            break
        kept[token] = weights[token] / total
        mass += kept[token]
    return [kept.get(token, 0.0) / mass for token in range(len(weights))]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_columns_follow_their_definitions(temperature, rng):
    rows, depth, vocab, draft_vocab = 3, 4, 13, 9
    draft_logits = 2 * torch.randn(rows, depth, draft_vocab, generator=rng)
    draft_logits[0, 0, 3] = -torch.inf
    target_logits = 2 * torch.randn(rows, depth, vocab, generator=rng)
    drafts = draft_logits.argmax(-1) if not temperature else torch.tensor([[0, 1, 2, 4]] * rows)
    law = nucleus(target_logits.flatten(0, 1) / temperature, 0.9).view_as(target_logits) if temperature else None
    found = collect.describe(draft_logits, target_logits, drafts, temperature, law)
    for b in range(rows):
        for k in range(depth):
            x, y, d = draft_logits[b, k].tolist(), target_logits[b, k].tolist(), int(drafts[b, k])
            t = temperature or 1.0
            q, raw = law_of(x, t, 2), law_of(y, t, 2)
            first, second = sorted(q)[-1], sorted(q)[-2]
            if temperature:
                p = law_of(y, t, 0.9)
                alpha = min(1.0, p[d] / q[d])
                expected = sum(min(p[token], q[token]) for token in range(draft_vocab))
            else:
                alpha = expected = float(max(range(vocab), key=y.__getitem__) == d)
                p = [alpha] * vocab
            wanted = {
                "f": math.log(first / (1 - first)),
                "q_max": first,
                "q_sampled": q[d],
                "log_q_sampled": math.log(q[d]),
                "entropy": -sum(v * math.log(v) for v in q if v),
                "gap": math.log(first / second),
                "is_top1": float(q[d] == first),
                "p_sampled": p[d],
                "p_raw": raw[d],
                "alpha": alpha,
                "exp_acc": expected,
            }
            assert {name: float(column[b, k]) for name, column in found.items()} == pytest.approx(wanted, abs=3e-6)


def trace(kind, temperature, labels=400, batch=4, depth=5):
    model = tiny.target()
    recorder = collect.Recorder(temperature, 0.9, seed=3)
    filled = tiny.prompts(model, PROMPTS, stop=5)
    drafter = tiny.drafter(kind, model, vocab=9)
    with torch.inference_mode():
        return collect.record(model, drafter, filled, recorder, labels, batch=batch, max_new=12, depth=depth)


@pytest.mark.parametrize("kind", ["block", "layer-skip"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_agrees_with_the_decoding(kind, temperature, tmp_path):
    columns = trace(kind, temperature)
    observed, accept, alpha = columns["observed"] != 0, columns["accept"] != 0, columns["alpha"]
    assert 400 <= observed.sum() < 400 + 4 * 5
    # The verdicts are those of the sampler, which computes p and q on its own.
    assert not accept[observed & (alpha == 0)].any()
    assert accept[observed & (alpha == 1)].all()
    for which in (observed, ~observed):
        spread = np.sqrt((alpha * (1 - alpha))[which].sum())
        assert abs(accept[which].sum() - alpha[which].sum()) <= 4 * spread
    if temperature:
        assert ((alpha > 0) & (alpha < 1)).any()
    for name, limit in {"prompt": 6, "row": 4, "gen": 10, "round": 12}.items():
        assert 0 < columns[name].max() < limit, name
    # A round starts where the one before it has ended: after its accepted drafts and one more token.
    grid = {name: values.reshape(-1, 4, 5) for name, values in columns.items()}
    went_on = grid["round"][1:, :, 0] > 0
    taken = (grid["accept"] & grid["observed"]).sum(-1)[:-1] + 1
    assert ((grid["ctx"][1:, :, 0] - grid["ctx"][:-1, :, 0].astype(int))[went_on] == taken[went_on]).all()

    name = collect.file_name(kind, "gsm8k", temperature)
    collect.save(tmp_path / name, columns | {"workload": np.zeros_like(columns["row"])})
    loaded = quality.load(tmp_path / name)
    assert loaded.features.shape[1:] == (4, 5)
    assert loaded.greedy == (temperature == 0)
    assert np.array_equal(loaded.features, grid["f"])
    assert np.array_equal(loaded.accepted, taken_drafts(grid))


def taken_drafts(grid):
    return (grid["observed"] & grid["accept"]).sum(-1)


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    def models(draft_vocab, length, track):
        model = tiny.target()
        return model, [tiny.drafter(kind, model) for kind in ("layer-skip", "block")]

    class Tokenizer:
        eos_token_id = 5

    monkeypatch.setattr(collect, "load_models", models)
    monkeypatch.setattr(collect, "load_tokenizer", Tokenizer)
    monkeypatch.setattr(collect, "encode", lambda tokenizer, texts: [[i % 11, 7, 3] for i in range(len(texts))])
    monkeypatch.setattr(collect, "K", 5)
    app = Typer()
    app.command()(collect.main)

    options = ["--out", str(tmp_path), "--labels", "6", "--batch", "2", "--max-new", "9"]

    def run():
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.output
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.glob("*.npz")}

    before = run()
    assert len(before) == 24
    (tmp_path / "block_humaneval_T0.7.npz").unlink()
    after = run()
    assert {name for name in before if before[name][1] != after[name][1]} == {"block_humaneval_T0.7.npz"}
    assert {name: data for name, (data, _) in before.items()} == {name: data for name, (data, _) in after.items()}
    refused = CliRunner().invoke(app, [*options, "--seed", "1"])
    assert refused.exit_code == 2
    assert "give another --out" in refused.output.replace("\n", " ")
    with np.load(tmp_path / "block_summaries_T1.npz") as file:
        assert set(file["workload"].tolist()) == {quality.WORKLOADS.index("summaries")}


def test_every_workload_has_its_prompts():
    for workload in collect.SOURCES:
        numbers, texts = collect.read_prompts(workload)
        assert len(set(numbers)) == len(set(texts)) == 32, workload
