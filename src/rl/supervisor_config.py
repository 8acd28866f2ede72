"""Settings of `rl` itself: when it starts a dead process again, and when it takes a silent one for dead."""

from pydantic import Field

from rl.settings import Settings


class SupervisorConfig(Settings):
    """How `rl` keeps the processes of a run alive."""

    max_restarts: int = Field(20, ge=0)
    """Restarts of one process within window_s; one more ends the run with a summary. 0: the first death ends it."""
    window_s: float = Field(1800.0, gt=0)
    """Over how long restarts are counted."""
    backoff_s: float = Field(0.5, ge=0)
    """Wait before the first restart; it doubles with every death that follows without progress, up to backoff_limit_s."""
    backoff_limit_s: float = Field(30.0, ge=0)
    """Longest wait before a restart."""
    silence_s: float = Field(60.0, gt=0)
    """A process without a heartbeat for so long (stopped, or stuck in the kernel) is killed and started again. A thread of its own beats
    every 2 s, but a long call that keeps Python's lock (loading a large model) holds it up, too, for half a minute where it is bad."""
    stall_s: float = Field(600.0, gt=0)
    """No new token, rollout, batch or step for so long: a diagnosis is printed that names what everything waits for."""
    quarantine_after: int = Field(3, ge=1)
    """A batch during whose step the trainer died so often in a row is quarantined: its step is skipped, and that is recorded."""
