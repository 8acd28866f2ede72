import time
from multiprocessing.pool import ThreadPool

import pytest

from rl.trainer.threads import result_within


def test_what_a_disk_does_not_give_in_time_ends_the_wait():
    with ThreadPool(2) as pool:
        reading = pool.apply_async(time.sleep, (1,))
        with pytest.raises(TimeoutError, match=r"waited 0 s for x to be read: does that disk answer\?"):
            result_within(reading, 0.05, "x to be read")
        assert result_within(pool.apply_async(int, ("7",)), 5, "y") == 7
        with pytest.raises(ValueError, match="invalid literal"):
            result_within(pool.apply_async(int, ("x",)), 5, "y")
