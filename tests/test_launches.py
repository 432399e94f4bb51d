"""The launch table: what is in force for a GPU, and tables that are none."""

import pytest
import torch

import av_triton as av
from av_triton import launches
from av_triton.launches import Launches, LogitMaxLaunch, SampleLaunch, read, trial
from av_triton.ops.logit_max import launch_shape
from av_triton.ops.sample import sample_shape

OTHER = Launches(LogitMaxLaunch(block_bytes=2048, logits=4096, warps=4), SampleLaunch(logits=8192, warps=4))


@pytest.fixture
def use_table(monkeypatch, tmp_path):
    def use(text):
        (tmp_path / "table.json").write_text(text)
        monkeypatch.setenv("AV_TRITON_LAUNCHES", str(tmp_path / "table.json"))
        launches._entry.cache_clear()

    yield use
    launches._entry.cache_clear()


def test_the_shipped_table_covers_every_gpu():
    assert "default" in read(launches.TABLE)
    assert launch_shape(129_280, 2, "sm_90") == (8, 16_384, 4096, 8)
    assert launch_shape(129_280, 2, "a GPU of next year") == launch_shape(129_280, 2, "sm_90")
    assert sample_shape(129_280, "sm_90") == (8, 16_384, 8)


@pytest.mark.parametrize("vocab", [1, 100, 4097, 262_144])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_programs_cover_the_row(vocab, itemsize):
    for entry in (launches.launches("sm_90"), OTHER):
        with trial(entry):
            splits, chunk, block, warps = launch_shape(vocab, itemsize, "sm_90")
            assert splits <= 16
            assert splits * chunk >= vocab
            assert chunk % block == 0
            assert warps & (warps - 1) == 0
            splits, chunk, _ = sample_shape(vocab, "sm_90")
            assert splits <= 16
            assert splits * chunk >= vocab


def test_a_table_of_the_user_is_in_force_for_the_gpus_it_names(use_table):
    entry = '{"logit_max": {"block_bytes": 2048, "logits": 4096, "warps": 4}, "sample": {"logits": 8192, "warps": 4}}'
    shipped = (
        '{"logit_max": {"block_bytes": 8192, "logits": 16384, "warps": 8}, "sample": {"logits": 8192, "warps": 8}}'
    )
    use_table(f'{{"default": {shipped}, "sm_80": {entry}}}')
    assert launches.launches("sm_80") == OTHER
    assert launch_shape(32_000, 2, "sm_80") == (8, 4096, 1024, 4)
    assert launch_shape(32_000, 2, "sm_90")[3] == 8


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "truncated"),
        ('{"default": {"logit_max": {"block_bytes": 8192, "logits": 16384}}}', "warps"),
        (
            '{"default": {"logit_max": {"block_bytes": 8192, "logits": 16384, "warps": 6}, '
            '"sample": {"logits": 8192, "warps": 8}}}',
            "warps = 6: give a power of 2 from 1 to 16",
        ),
        ("{}", 'no entry "default": copy one from'),
    ],
)
def test_a_table_that_is_none_is_refused(use_table, text, says):
    use_table(text)
    with pytest.raises(ValueError, match=says):
        launch_shape(100, 2, "sm_90")


def test_a_missing_table_is_named(monkeypatch):
    monkeypatch.setenv("AV_TRITON_LAUNCHES", "/nowhere/table.json")
    launches._entry.cache_clear()
    with pytest.raises(ValueError, match=r"/nowhere/table.json.*write one with `av-triton bench --table FILE`"):
        launches.launches("sm_90")
    launches._entry.cache_clear()


def test_results_do_not_depend_on_the_table(use, rng):
    use("triton")
    x, seeds = torch.randn(3, 9000, generator=rng), torch.arange(3)
    before = av.sample_and_score(x, seeds), av.sample_and_score(x, None)
    with trial(OTHER):
        after = av.sample_and_score(x, seeds), av.sample_and_score(x, None)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[0], b[0])
        torch.testing.assert_close(a[1:], b[1:], rtol=1e-6, atol=1e-6)
