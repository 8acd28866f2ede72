import pytest

from rl.orchestrator.env_ids import EnvLoadError, check_installed


def test_owner_and_version_are_taken_off():
    assert check_installed("someone/single-digit-addition@0.1.0") == "someone/single-digit-addition"
    assert check_installed("single-digit-addition@latest") == "single-digit-addition"


@pytest.mark.parametrize(
    ("env_id", "text"),
    [
        ("nobody/not-there@1.0", "`prime env install nobody/not-there@1.0`"),
        ("not-there", "`uv pip install not-there`"),
        ("me/single-digit-addition@9.9", "0.1.0 is installed; `prime env install me/single-digit-addition@9.9`"),
        ("../escape", "is not installed"),
    ],
)
def test_what_is_not_there_says_how_to_get_it(env_id, text):
    with pytest.raises(EnvLoadError) as error:
        check_installed(env_id)
    assert text in str(error.value)
