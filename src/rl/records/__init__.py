"""Reads run directories, live or finished: `rl.open("outputs/x")` is an rl.records.run.Run;
docs/python.md shows what it has.

Never writes to them, and imports neither torch nor vllm. Every call reflects the files at that
moment, and reads only what is new in them. A damaged or deleted file affects only itself: the
index leaves it out (`run.damaged`), and a rollout whose file was deleted raises RunError when
its text is accessed. A Run is thread-safe.
"""
