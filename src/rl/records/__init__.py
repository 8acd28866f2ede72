"""Reads run directories, live or finished. Never writes to them, and imports neither torch nor vllm.

    import rl
    run = rl.open("outputs/x")                     # an rl.records.run.Run
    run.config                                     # RLConfig
    run.metrics(source=None, kind=None)            # pandas or polars table, or dict of numpy columns (kind="columns")
    run.curve("reward/mean")                       # (steps, values)
    run.rollouts(kind=None, step=range(1, 9), env="sums", why="no_signal", reward=(0.5, None))   # Rollouts: lazy, sliced for pages
        len(r); r[0]; r[20:40]; r.where(...); r.sorted("reward", descending=True); r.counts("why"); r.by("version"); r.column("reward")
        r.containing("text"); r.frame(); r.fields
        r[0].reward, .step, .version, .env, .task, .group_id, .metrics, ...      # from the index
        r[0].messages, .text, .row                                               # read from the file now
    run.group(17)                                  # Rollouts of one group
    run.task("sums", 3, kind="eval")               # {version: Rollouts}: one task over all versions
    run.tokens(step, group=None, rollout=None)     # [SampleTokens]: ids, logprobs of both sides, ratio, entropy, clip and mask, teacher gap
    run.batch(step).fault                          # why it has no token log; empty if it has one
    run.tokenizer, run.load_model("best")          # of transformers
    run.versions                                   # [Version]: weights, checkpoint, evaluations, which is best
    run.timeline(begin=None, end=None)             # Timeline: .spans, .gauges, .marks (wall time); .trace() for Perfetto
    run.events, run.status, run.end, run.origin    # the contents of their files
    run.logs, run.log("trainer", lines=50)         # {process: {attempt: path}}, last lines
    run.diagnosis(), run.problems                  # the output of `rl doctor RUN`; [Problem] with metrics, files and rollouts as evidence
    run.damaged                                    # {path: fault} of rollout files that are left out

Every call reflects the files at that moment, and reads only what is new in them. A damaged or deleted file affects only itself: the
index leaves it out (`run.damaged`), and a rollout whose file was deleted raises RunError when its text is accessed. A Run is
thread-safe.
"""
