"""What ends the orchestrator."""


class RunError(Exception):
    """The run cannot go on; the message says why and what to do."""
