"""For the PYTHONPATH of environment workers: they need transformers for its tokenizers alone, which imports torch wherever it finds it.

That is a third of a worker's start. Who imports torch by name still gets it.
"""

import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
