"""What `rl doctor` says of a run's files by their beginnings alone."""

import os

from rl.diagnosis.problems import record_fault


def test_a_pipe_in_place_of_a_batch_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "000012.batch")
    assert record_fault(tmp_path / "000012.batch") == "it is not a file"
