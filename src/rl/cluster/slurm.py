"""Slurm: one job of the machines that train, and an array of jobs of one machine each that serve,
so that Slurm replaces those one by one.

On preemption, before the time limit and on scancel, SIGTERM goes to all processes of a step, also
to those in sessions of their own. A job that then ends by itself is not queued again, whatever its
exit code: its batch script asks for it.
"""

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from rl.cluster.reach import OFFSET
from rl.config.base import Fault
from rl.config.plan import END_S, cluster_of, plan
from rl.config.run import RLConfig
from rl.launch.children import OF_AN_ATTEMPT, Children
from rl.run_dir.nodes import Nodes
from rl.run_dir.paths import RunDir
from rl.system.children import PYTHON, Stopped, inherited
from rl.system.errors import RunError
from rl.system.terminal import say

TIMEOUT_S = 60.0
"""Seconds that a command of Slurm has to answer."""
SERVERS = "RL_SERVERS"
"""Environment variable of the trainer's job: the array of the machines that serve."""
OF_A_JOB = ("partition", "account", "qos", "time", "gres")
"""Settings that are options of sbatch, most of which have a default in a variable such as
SBATCH_ACCOUNT."""
SHARING = re.compile(r"--(exclusive|oversubscribe|cpus-per-\w+|mem[-\w]*|ntasks-per-\w+)\b|-[cs]\b")
"""Options after which a job does not get whole machines."""
TASK = """\
tries=0; stop=; trap stop=1 TERM
while [ -z "$stop" ]; do
  "$@"; code=$?
  if { [ $code != 1 ] && [ $code -le 128 ]; } || [ $tries = 5 ]; then exit $code; fi
  tries=$((tries + 1))
  if [ -z "$stop" ]; then echo "rl node ended with exit code $code and starts again"; sleep 5; fi
done
exit 75"""
"""Runs `rl node` on a machine. If it is killed alone, Slurm would not start it again."""
BEGIN = """\
if [ -e "$over" ]; then echo "rl: the run is over, says $over"; exit 0; fi
fact() { scontrol show job "$job" | tr ' ' '\\n' | sed -n "s/^$1=//p"; }
again() {
  if [ "${SLURM_RESTART_COUNT:-0}" -lt "$most" ]; then scontrol requeue "$job"; return; fi
  echo "rl: this job was queued again cluster.max_requeues = $most times: continue with --resume"
  return 1
}
# This shell gets SIGTERM from scancel, after a requeue, and when steps have not ended in time: of
# these only the time limit asks for more.
told() { told=1; if [ "$(fact Reason)" = TimeLimit ]; then again; fi; }
told=; trap told TERM
"""
END = """\
while kill -0 $step 2>/dev/null; do wait $step; code=$?; done
if [ ! -e "$over" ]; then
  # srun returns 0 if the machines whose tasks were left are lost.
  if [ $code = 0 ]; then code=75; fi
  if [ $code = 75 ] && [ -z "$told" ] && again; then exit $code; fi
fi
"""
LAST = f"""\
# Without this job the machines that serve wait in vain, unless it is queued again: by `told`, or by
# Slurm after the loss of a machine.
if [ -n "${SERVERS}" ] && [ "$(fact Restarts)" = "${{SLURM_RESTART_COUNT:-0}}" ]; then
  if [ -e "$over" ]; then scancel --quiet --state=PENDING "${SERVERS}"
  else scancel --quiet "${SERVERS}"; fi
fi
"""


def faults(config: RLConfig) -> Iterator[Fault]:
    """Yields what Slurm would refuse. Raises RunError if it does not answer."""
    if stays(config):
        return
    if not shutil.which("sbatch"):
        remedy = "needs `sbatch`, which is not on the PATH: run this on a login node of the cluster"
        yield "cluster.engine", "slurm", remedy
        return
    for script in scripts(config).values():
        done = call(["sbatch", "--test-only"], script)
        if done.returncode:
            settings = cluster_of(config).slurm.model_dump(exclude_defaults=True)
            yield "cluster.slurm", settings, f"sbatch refuses the job: {complaint(done)}"
            return


def render(config: RLConfig, run_dir: RunDir) -> str:
    """Returns the batch scripts, for --dry-run."""
    return "\n".join(scripts(config).values())


def submit(config: RLConfig, run_dir: RunDir) -> list[str]:
    """Queues the run. Returns the ids of the jobs. Raises RunError and Stopped, and then removes
    the jobs that it knows of."""
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, str] = {}
    unknown = (
        f"a job may be queued all the same: `squeue {shlex.quote(f'--name={config.name}')}` "
        "shows it, and scancel removes it"
    )
    with contextlib.ExitStack() as undo:
        for role, script in reversed(scripts(config).items()):
            servers = {SERVERS: jobs.get("inference", "")}
            try:
                done = call(["sbatch", "--parsable"], script, servers, late=unknown)
            except Stopped:
                say(f"rl: {unknown}")
                raise
            if done.returncode:
                raise RunError(
                    f"sbatch does not take the job of the machines for {role}, so nothing is "
                    f"queued: {complaint(done)}"
                )
            jobs[role] = done.stdout.strip().partition(";")[0]
            undo.callback(cancel, [jobs[role]], config)
        undo.pop_all()
    return [*reversed(jobs.values())]


def active(jobs: list[str], config: RLConfig) -> list[str]:
    """Returns those of the jobs that are queued or running. Raises RunError."""
    listed = ask(["squeue", "--noheader", "--format=%A %F", f"--jobs={','.join(jobs)}"]).split()
    return [job for job in jobs if job in listed]


def cancel(jobs: list[str], config: RLConfig) -> None:
    """Removes jobs; those that have ended are no error. Raises RunError."""
    ask(["scancel", "--quiet", *jobs], late=f"jobs {', '.join(jobs)} may still be queued")


def stays(config: RLConfig, variables: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to an allocation that has enough machines. The run starts
    there at once, and ends with this process."""
    return (
        "SLURM_JOB_ID" in variables
        and int(variables.get("SLURM_JOB_NUM_NODES", "0")) >= cluster_of(config).nodes
    )


def run(config: RLConfig, run_dir: RunDir, children: Children) -> int:
    """Runs all machines as one step of this process's allocation. Returns the exit code. Raises
    RunError."""
    cluster, name = cluster_of(config), f"rl-{os.getpid()}"
    options = (
        f"--job-name={name} --nodes={cluster.nodes} --ntasks={cluster.nodes} --ntasks-per-node=1 "
        "--overlap --no-kill"
    )
    variables = [
        f"export {key}={shlex.quote(os.environ[key])}" if key in os.environ else f"unset {key}"
        for key in OF_AN_ATTEMPT
    ]
    srun = f"exec srun {options} {shlex.join(step(config))}"
    shell = "\n".join([*variables, *cluster.slurm.setup, srun])
    child = children.start("slurm", ["bash", "-c", shell], dict(os.environ), run_dir.logs)
    try:
        while child.wait(1.0) is None:
            children.poll()
    except Stopped as stop:
        children.stop_caught()
        # srun itself would kill the machines at once. scancel fails if a machine of the allocation
        # has no task, but tells the others.
        job = f"--jobs={os.environ['SLURM_JOB_ID']}"
        listed = ask(["squeue", "--steps", "--noheader", job, "--format=%i %j"])
        words = [line.split() for line in listed.splitlines()]
        steps = [step for step, *rest in words if rest == [name]]
        call(["scancel", "--quiet", "--signal=TERM", *steps])
        child.wait(cluster.grace_s + END_S)
        return 128 + stop.signum
    return child.exit_code or 0


# The scripts --------------------------------------------------------------------------------------


def scripts(config: RLConfig) -> dict[str, str]:
    """Returns the batch scripts by role: `trainer`, and `inference` if there are machines that
    only serve."""
    cluster, division = cluster_of(config), plan(config)
    trainers, servers = division.trainers, division.servers
    shrinks = ["--no-kill"] if (cluster.min_trainer_nodes or trainers) < trainers else []
    nodes, job = f"--nodes={trainers}", '"$SLURM_JOB_ID"'
    result = {"trainer": script(config, nodes, "%j", job, shrinks, last=LAST)}
    if servers:
        # The id of one element is also that of the array, so elements are named by both numbers.
        nodes, job = (
            f"--nodes=1 --array=0-{servers - 1}",
            '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
        )
        index = f'export RL_NODE_INDEX="$SLURM_ARRAY_TASK_ID" {OFFSET}={trainers}\n'
        result["inference"] = script(config, nodes, "%A_%a", job, [], begin=index)
    return result


def script(
    config: RLConfig,
    size: str,
    log: str,
    job: str,
    shrinks: list[str],
    begin: str = "",
    last: str = "",
) -> str:
    """Returns a batch script. `size`: options of sbatch. `log`: the part of the log's name that
    tells jobs apart. `job`: expression for the job's id. `shrinks`: the option with which the job
    outlives a machine, if it does.
    """
    cluster = cluster_of(config)
    output = str(config.run_dir.logs).replace("%", "%%") + f"/slurm-{log}.log"
    whole = [] if any(map(SHARING.match, cluster.slurm.extra)) else ["--exclusive", "--mem=0"]
    options = [
        f"--job-name={config.name}",
        *size.split(),
        "--ntasks-per-node=1",
        *whole,
        *shrinks,
        "--requeue",
        "--export=ALL",
        f"--signal=TERM@{math.ceil(cluster.grace_s) + END_S}",
        "--open-mode=append",
        f"--output={output}",
    ]
    for key in OF_A_JOB:
        if value := getattr(cluster.slurm, key) or os.environ.get(f"SBATCH_{key.upper()}"):
            options.append(f"--{key}={value}")
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {quote(option)}" for option in [*options, *cluster.slurm.extra]),
        *cluster.slurm.setup,
        f"cd {shlex.quote(os.getcwd())} || exit 3",
        f"over={shlex.quote(str(Nodes(config.run_dir).over_path))} most={cluster.max_requeues} "
        f"job={job}",
    ]
    srun = f"srun {shlex.join([*shrinks, *step(config)])} &\nstep=$!\n"
    return "\n".join([*lines, begin + BEGIN + srun + END + last + "exit $code\n"])


def step(config: RLConfig) -> list[str]:
    """Returns the end of an srun command: a task on each machine, none of which ends the others."""
    image, here = cluster_of(config).slurm.container_image, os.getcwd()
    container = []
    if image:
        weights = config.trainer.weights.dir or ""
        folders = str(config.run_dir.root.parent), here, weights, config.model.name
        mounts = [f"{path}:{path}" for path in dict.fromkeys(folders) if os.path.isabs(path)]
        container = [
            f"--container-image={image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={here}",
        ]
    options = ["--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", *container]
    return [*options, "bash", "-c", TASK, "rl", *command(config)]


def command(config: RLConfig) -> list[str]:
    """Returns the command of a machine."""
    program = ["rl"] if cluster_of(config).slurm.container_image else [*PYTHON, "-m", "rl.main"]
    return [*program, "node", "@", str(config.run_dir.config)]


def quote(option: str) -> str:
    """Quotes an option as sbatch reads it in a script: by its own rules, which are not those of
    a shell."""
    if re.fullmatch(r"[\w%+,./:=@^-]+", option):
        return option
    return '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'


# Commands of Slurm --------------------------------------------------------------------------------


def call(
    command: list[str],
    script: str = "",
    variables: Mapping[str, str] | None = None,
    late: str = "",
) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm, without the variables of a job around it, and those of the user's
    own jobs.

    Raises RunError if it cannot be run or does not answer. `late`: what that may mean.
    """
    # defaults of options come before what a script says
    outer = re.compile(r"SLURM_(?!CONF$)|SBATCH_")
    env = {key: value for key, value in inherited().items() if not outer.match(key)}
    env |= variables or {}
    try:
        return subprocess.run(
            command, input=script, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        raise RunError(
            f"there is no `{command[0]}` on the PATH: run this on a login node of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{command[0]} has not answered for {TIMEOUT_S:.0f} s: does Slurm's controller run "
            f"(`scontrol ping`)?{'; ' if late else ''}{late}"
        ) from None


def ask(command: list[str], late: str = "") -> str:
    """Returns what a command of Slurm prints, of jobs that ended long ago nothing. Raises RunError
    if it fails, and as `call`."""
    done = call(command, late=late)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise RunError(
            f"{command[0]} failed: {complaint(done)}; does Slurm's "
            "controller run (`scontrol ping`)?"
        )
    return done.stdout


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Returns an error message of Slurm on one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in done.stderr.splitlines()]
    return "; ".join(filter(None, lines)) or f"exit code {done.returncode}"
