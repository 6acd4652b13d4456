#!/bin/bash
# A run on the machines of a Slurm job. It continues after a time limit, a preemption or a lost machine:
#
#   sbatch deploy/slurm.sh NAME CONFIG [OPTION ...]
#   sbatch --nodes 4 deploy/slurm.sh lora openvla_oft_grpo_libero_lora --plan.mode auto
#
# Submit it in the clone, or where `embodied` is on the PATH, and in a folder that all machines share: the run is
# runs/NAME in it (or below $RUNS). The same command, submitted again, continues the run.
#
# Secrets: Ray's token is new in every job, and only in the environment. HF_TOKEN comes from yours, as sbatch does by
# default, or from the file of `hf auth login` in the home directory. /dev/shm counts as memory of the job: --mem=0
# gives all of it. Ports: 6379, and free ones between the machines; --exclusive, since two jobs cannot share 6379.
#SBATCH --job-name=embodied --nodes=1 --ntasks-per-node=1
#SBATCH --gpus-per-node=8 --cpus-per-task=96 --exclusive --mem=0 --time=24:00:00
# Slurm requeues the job after a preemption or a lost machine, and this script after the time limit. It is warned 300 s
# before, which is for the update in progress and its checkpoint; without them the run continues from an earlier one.
#SBATCH --requeue --open-mode=append --signal=B:USR1@300
set -euo pipefail

fail() {
    echo "deploy/slurm.sh: $*" >&2
    exit 2
}

[ $# -ge 2 ] || fail "give the run's name and a configuration: sbatch deploy/slurm.sh NAME CONFIG [OPTION ...]"
name=$1
shift
runs=${RUNS:-$PWD/runs}
export PATH=$PWD/.venv/bin:$PATH
command -v embodied >/dev/null || fail "there is no embodied on the PATH of $(hostname), nor in $PWD/.venv/bin"

# The first start of a job leaves a mark beside the run, and every machine must see it, now and after a restart.
mark=$runs/.slurm-$SLURM_JOB_ID
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ ! -e "$mark" ]; then
    fail "job $SLURM_JOB_ID began the run $name in another $runs than that of $(hostname), so it cannot continue:" \
        "submit the job in a folder that all machines share, or set RUNS to one"
fi
mkdir -p "$runs"
touch "$mark"
srun --ntasks-per-node=1 --overlap test -e "$mark" ||
    fail "a machine of $SLURM_JOB_NODELIST does not see $mark, so the run $name could not continue there:" \
        "submit the job in a folder that all machines share, or set RUNS to one"

# A Ray node on each machine. This one's is not a step of the job: it outlives the signal that Slurm sends to steps.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
here=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
address=$here:6379
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${machines[0]} # where Slurm runs this script
start_head() {
    ray start --head --node-ip-address "$here" --port 6379 --node-name "$head" \
        --include-dashboard false --include-log-monitor false --block &
    ray=$!
}
start_head
others=
trap 'kill "$ray" $others 2>/dev/null || true' EXIT
if [ "$SLURM_NNODES" -gt 1 ]; then
    # Again where the 30 s that Ray gives itself to start are too short, as on a busy machine.
    # shellcheck disable=SC2016 # the other machines' own names
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 --exclude="$head" --overlap bash -c \
        'until (: < "/dev/tcp/${0/:/\/}") 2>/dev/null && \
            ray start --address "$0" --node-name "$SLURMD_NODENAME" --include-log-monitor false --block; do sleep 5; done' \
        "$address" &
    others=$!
fi
joined="import ray, sys; ray.init('$address', logging_level='ERROR', log_to_driver=False)
sys.exit(sum(node['Alive'] for node in ray.nodes()) < $SLURM_NNODES)"
starts=1
# Where nothing listens, Ray would try for minutes.
until (: < "/dev/tcp/$here/6379") 2>/dev/null && timeout 120 python -c "$joined" 2>/dev/null; do
    [ "$SECONDS" -lt 900 ] || fail "Ray did not start on every machine of $SLURM_JOB_NODELIST within 900 s"
    if ! kill -0 "$ray" 2>/dev/null; then
        [ "$starts" -lt 4 ] || fail "Ray did not start on $head, $starts times; its messages are above"
        starts=$((starts + 1))
        start_head
    fi
    sleep 2
done

# The run is a step of the job. SIGTERM has it finish the update, write a checkpoint and end.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    embodied train "$@" --name "$name" --runs-dir "$runs" --runtime.address "$address" --resume auto &
run=$!
again=no
trap 'again=yes; kill -TERM "$run" || true' USR1
trap 'kill -TERM "$run" || true' TERM
while true; do # a signal that is trapped ends `wait`, not the run
    status=0
    wait "$run" || status=$?
    kill -0 "$run" 2>/dev/null || break
done
if [ "$status" = 0 ]; then
    rm -f "$mark"
elif [ "$again" = yes ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
