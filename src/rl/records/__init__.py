"""The reader of run directories, live or finished. It writes nothing of them, and loads neither torch nor vllm.

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
    run.batch(step).fault                          # why there is no token log of it; empty if there is
    run.tokenizer, run.load_model("best")          # of transformers
    run.versions                                   # [Version]: weights, checkpoint, evaluations, which is best
    run.timeline(begin=None, end=None)             # Timeline: .spans, .gauges, .marks (wall time); .trace() for Perfetto
    run.events, run.status, run.end, run.origin    # as their files say it
    run.logs, run.log("trainer", lines=50)         # {process: {attempt: path}}, last lines
    run.diagnosis(), run.problems                  # what `rl doctor RUN` says; [Problem] with metrics, files and rollouts that show it
    run.damaged                                    # {path: fault} of files of rollouts that are left out

Every call answers as the files are at that moment, and reads only what is new of them. A file that is damaged or gone costs itself alone:
the index leaves it out (`run.damaged`), and a rollout whose file was deleted raises RunError when its text is asked for. A Run may be used
by several threads.
"""
