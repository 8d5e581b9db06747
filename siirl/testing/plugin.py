"""The pytest plugin: a workflow is played by a mark, and each assertion of `siirl test` is a test.

    @pytest.mark.siirl("workflow.yaml", "data.train_files=train.parquet", answers="answers.yaml")
    def test_the_workflow(siirl_assertion):
        siirl_assertion()

It is loaded wherever siirl is installed, so it imports nothing of siirl before a test asks for it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from siirl.testing.trial import Trial

MARK = "siirl"
FORM = f"{MARK}(*settings, answers=None, only=all runs, tiny=True): the workflow of siirl_trial"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", FORM)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `siirl_assertion` is one for each of them."""
    if "siirl_assertion" in metafunc.fixturenames:
        from siirl.testing.assertions import ASSERTIONS

        metafunc.parametrize("siirl_assertion", list(ASSERTIONS), indirect=True)


@pytest.fixture(scope="session")
def siirl_play(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., "Trial"]:
    """(*settings, **options of siirl.testing.trial.play) -> trial; the same are played once."""
    played: dict[str, Trial] = {}

    def play_once(*settings: str, **options: Any) -> "Trial":
        from siirl.errors import UserError
        from siirl.testing.trial import play

        key, refused = repr((settings, sorted(options.items()))), ""
        if key not in played:
            try:
                played[key] = play(settings, tmp_path_factory.mktemp(MARK), **options)
            except UserError as error:
                refused = f"siirl test refuses it: {error}"
        if refused:
            pytest.fail(refused, pytrace=False)
        return played[key]

    return play_once


@pytest.fixture
def siirl_trial(request: pytest.FixtureRequest, siirl_play: Callable[..., "Trial"]) -> "Trial":
    """The trial of the test's mark: what functions of siirl.testing.expect look at."""
    mark = request.node.get_closest_marker(MARK)
    if mark is None:
        pytest.fail(f"the test has no workflow. Mark it: @pytest.mark.{FORM}", pytrace=False)
    return siirl_play(*mark.args, **mark.kwargs)


@pytest.fixture
def siirl_assertion(request: pytest.FixtureRequest, siirl_trial: "Trial") -> Callable[[], None]:
    """Fails the test with what is wrong and what to change; skips it where the assertion does not apply."""
    from siirl.testing.assertions import judged

    def check() -> None:
        verdict = judged(siirl_trial, [request.param]).get(request.param)
        if verdict is None:
            pytest.skip("its run was not played, or the steps do not run")
        if verdict.status == "n/a":
            pytest.skip(verdict.evidence)
        if verdict.is_open:
            pytest.fail(f"{verdict.evidence}. {verdict.fix}", pytrace=False)

    return check
