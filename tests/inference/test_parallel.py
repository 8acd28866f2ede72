"""A server of several engines, and one of several workers: each holds its part of a version, and all of them the same one."""

from collections import Counter

import pytest

from rl.inference.ranks import Ranks
from rl.models.tiny import make_tiny_model
from tests.inference.servers import assert_logprobs, damaged_copy, start_server

PROMPT = list(range(10, 40))


def test_a_session_stays_with_its_engine_and_new_ones_go_where_least_is_open():
    ranks = Ranks(4)
    seen = []
    for session in range(8):
        for _ in range(3):
            with ranks.use(session) as rank:
                seen.append(rank)
    assert all(seen[3 * i] == seen[3 * i + 1] == seen[3 * i + 2] for i in range(8))
    held = [ranks.use(session) for session in range(100, 108)]
    assert Counter(use.__enter__() for use in held) == {0: 2, 1: 2, 2: 2, 3: 2}
    crowd = [ranks.use(200) for _ in range(40)]
    found = [use.__enter__() for use in crowd]
    assert found[:30] == [found[0]] * 30 and len(set(found)) == 2  # too much for one: another takes the rest
    with ranks.use(None) as rank, Ranks(1).use(5) as only:
        assert rank is None and only is None


@pytest.mark.parametrize("kind", ["data", "tensor"])
def test_several_engines_and_several_workers(tmp_path, kind):
    """Every engine answers by the version that it says, before and after a load; a version that one cannot read is loaded by none."""
    versions = [make_tiny_model(tmp_path / f"{version:06d}", None, version) for version in range(2)]
    server = start_server(tmp_path / "server", versions, inference__vllm=f"{{{kind}_parallel_size = 2}}")
    try:
        server.wait_ready()
        for version in (0, 1):
            answers = [server.post("/generate", token_ids=PROMPT, sampling={"max_tokens": 8}, session=session) for session in range(4)]
            for answer in answers:
                assert answer.status_code == 200 and {span[0] for span in answer.json()["policy_versions"]} == {version}
                assert_logprobs(server, PROMPT, answer.json())
            if version == 0:
                refused = server.load(7, damaged_copy(versions[1], tmp_path / "damaged"))
                assert (refused.status_code, server.status()["policy_version"]) == (422, 0), refused.text
                gone = server.load(7, tmp_path / "none")
                assert gone.status_code == 404
                assert server.load(1).json()["policy_version"] == 1
    finally:
        server.end()
