import pytest

pytest_plugins = ["pytester"]

TESTS = """
import os, pytest

@pytest.fixture
def leaves_badly():
    yield
    assert "GOOD" in os.environ

@pytest.mark.parametrize("i", range(3))
def test_number(i):
    assert i != 1 or "GOOD" in os.environ

def test_teardown(leaves_badly):
    pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    (pytester.path / "pyproject.toml").touch()
    (pytester.mkdir("tests") / "test_some.py").write_text(TESTS)

    def run(good):
        monkeypatch.setenv("GOOD", "1") if good else monkeypatch.delenv("GOOD", raising=False)
        return pytester.runpytest_inprocess("-p", "tests.resume", "--resume", "-p", "no:cacheprovider", "tests")

    return run


def test_what_passed_is_left_out_until_all_has_passed(run):
    first = run(good=False)
    first.assert_outcomes(passed=3, failed=1, errors=1)
    assert first.ret == pytest.ExitCode.TESTS_FAILED
    # What failed, also while it was taken down, is run again; what passed is not.
    second = run(good=True)
    second.assert_outcomes(passed=2, deselected=2)
    assert second.ret == pytest.ExitCode.OK
    third = run(good=False)
    third.assert_outcomes(deselected=4)
    assert third.ret == pytest.ExitCode.OK
    third.stdout.fnmatch_lines("resumed: 4 tests have passed before on the same sources")


def test_an_edit_starts_afresh(run, pytester):
    run(good=True).assert_outcomes(passed=4)
    (pytester.mkdir("av_triton") / "op.py").touch()
    run(good=True).assert_outcomes(passed=4)
