"""The support matrix: each refusal with its message, and the checks of SGLang's own code."""

from types import SimpleNamespace
from typing import Any

import pytest

from av_triton_sglang import hooks, supports, targets
from av_triton_sglang.flag import Config
from av_triton_sglang.supports import UnsupportedError

GOOD = {
    "speculative_algorithm": "DSPARK",
    "speculative_num_draft_tokens": 8,
    "speculative_eagle_topk": 1,
    "max_running_requests": 48,
    "speculative_attention_mode": "prefill",
    "attention_backend": "fa3",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "cuda_graph_config": None,
    "disable_cuda_graph": True,
    "tp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "speculative_adaptive": False,
    "enable_lora": None,
    "enable_two_batch_overlap": False,
    "disable_cuda_graph_padding": False,
    "disaggregation_mode": "null",
    "enable_pdmux": False,
    "enable_mixed_chunk": False,
    "enable_multi_layer_eagle": False,
    "speculative_use_block_verification": False,
    "enable_watermark": False,
    "enable_hisparse": False,
    "use_ray": False,
}
CONFIG = Config(cost_table="cost.json")


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**GOOD | changes)


def test_supported_arguments_pass() -> None:
    for algorithm in supports.ALGORITHMS:
        assert supports.refusals(arguments(speculative_algorithm=algorithm), CONFIG) == []


# (rule, what the user gave, how the message begins)
REFUSED = [
    ("algorithm", {"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM: n-gram drafts have no"),
    ("algorithm", {"speculative_algorithm": "UNO"}, "--speculative-algorithm UNO: "),
    ("algorithm", {"speculative_algorithm": "FROZEN_KV_MTP"}, "--speculative-algorithm FROZEN_KV_MTP: Gemma-4"),
    ("attention_backend", {"attention_backend": "triton"}, "attention backend triton: "),
    (
        "attention_backend",
        {"speculative_attention_mode": "decode", "decode_attention_backend": "triton"},
        "attention backend triton: ",
    ),
    ("draft_positions", {"speculative_num_draft_tokens": 18}, "17 draft positions: "),
    ("max_running_requests", {"max_running_requests": 2000}, "--max-running-requests 2000: "),
    ("tree", {"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4: a tree has no prefix"),
    (
        "cuda_graphs",
        {
            "disable_cuda_graph": False,
            "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full")),
        },
        "CUDA graphs (full) for decoding: ",
    ),
    ("dp", {"dp_size": 2}, "--dp 2: "),
    ("attn_dp", {"attn_dp_size": 2}, "--attn-dp-size 2: "),
    ("attn_cp", {"attn_cp_size": 2}, "--attn-cp-size 2: "),
    ("dcp", {"dcp_size": 2}, "--dcp-size 2: "),
    ("pp", {"pp_size": 2}, "--pp-size 2: "),
    ("adaptive_steps", {"speculative_adaptive": True}, "--speculative-adaptive: "),
    ("lora", {"enable_lora": True}, "--enable-lora: "),
    ("two_batch_overlap", {"enable_two_batch_overlap": True}, "--enable-two-batch-overlap: "),
    ("padding", {"disable_cuda_graph_padding": True}, "--disable-cuda-graph-padding: "),
    ("disaggregation", {"disaggregation_mode": "decode"}, "--disaggregation-mode decode: "),
    ("pdmux", {"enable_pdmux": True}, "--enable-pdmux: "),
    ("mixed_chunk", {"enable_mixed_chunk": True}, "--enable-mixed-chunk: "),
    ("multi_layer_eagle", {"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle: "),
    ("block_verification", {"speculative_use_block_verification": True}, "--speculative-use-block-verification: "),
    ("watermark", {"enable_watermark": True}, "--enable-watermark: "),
    ("hisparse", {"enable_hisparse": True}, "--enable-hisparse: "),
    ("ray", {"use_ray": True}, "--use-ray: "),
]
REFUSED_ENVIRONMENT = [
    ("greedy_draft", "SGLANG_DSPARK_USE_GREEDY_DRAFT", "1"),
    ("simulated_acceptance", "SGLANG_SIMULATE_ACC_LEN", "3"),
    ("dp_prefill_coordination", "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", "1"),
    ("plan_stream", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1"),
]


@pytest.mark.parametrize(("rule", "changes", "message"), REFUSED)
def test_refusal(rule: str, changes: dict[str, Any], message: str) -> None:
    [found] = supports.refusals(arguments(**changes), CONFIG)
    assert found.startswith(message)
    assert "; " in found  # the remedy


@pytest.mark.parametrize(("rule", "name", "value"), REFUSED_ENVIRONMENT)
def test_refusal_of_an_environment_variable(monkeypatch: pytest.MonkeyPatch, rule: str, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    [found] = supports.refusals(arguments(), CONFIG)
    assert found.startswith(f"{name}={value}: ")
    assert found.endswith("; unset it")


def test_every_rule_has_a_test() -> None:
    tested = {rule for rule, *_ in [*REFUSED, *REFUSED_ENVIRONMENT]}
    assert tested == {rule.name for rule in supports.RULES}


def test_no_drafter() -> None:
    assert supports.refusals(arguments(speculative_algorithm=None), CONFIG) == [
        "no drafter: give --speculative-algorithm and --speculative-draft-model-path"
    ]


def test_all_reasons_are_listed_at_once() -> None:
    with pytest.raises(UnsupportedError) as error:
        supports.check(arguments(dp_size=2, enable_lora=True), CONFIG)
    assert "\n  - --dp 2: " in str(error.value)
    assert "\n  - --enable-lora: " in str(error.value)


def test_a_backend_of_another_plugin_can_be_named() -> None:
    config = Config(cost_table="cost.json", ragged_backends=("mine",))
    assert supports.refusals(arguments(attention_backend="mine"), config) == []


def test_changed_targets_are_named() -> None:
    here = f"{__name__}."
    expected = {
        here + "arguments": "**changes",
        here + "test_refusal": "rule, changes",
        here + "renamed": "self",
        "no_such_module.function": "",
    }
    found = targets.mismatches(expected)
    assert found[0] == f"{here}test_refusal takes (rule, changes, message), expected (rule, changes)"
    assert found[1].startswith(f"{here}renamed is missing")
    assert found[2].startswith("no_such_module.function is missing")
    assert len(found) == 3


def test_parameters_are_written_as_in_a_signature() -> None:
    def function(a: int, *, b: int = 0) -> None: ...
    def variadic(a: int, *rest: int, b: int, **more: int) -> None: ...

    assert targets.parameters(function) == "a, *, b"
    assert targets.parameters(variadic) == "a, *rest, b, **more"


def test_hooks_are_unique_and_listed_as_targets() -> None:
    from av_triton_sglang import plugin

    for family, expected in plugin.FAMILIES.values():
        hooked = [hook.target for hook in family]
        assert len(set(hooked)) == len(hooked)
        assert set(hooked) <= set(expected) | set(targets.COMMON)
        assert all(hook.kind in (hooks.AFTER, hooks.AROUND, hooks.BEFORE) for hook in family)
