"""A plugin of pytest: the adapter of v1 takes the installed verifiers for a version that it does not know."""

from rl.envs.v1 import versions

versions.KNOWN = ()
