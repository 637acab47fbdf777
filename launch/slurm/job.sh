#!/usr/bin/env bash
# What train.sbatch and train_single_node.sbatch do with their arguments, those of `megarl train`. To be sourced by them:
# SLURM runs a copy of theirs, which does not know where megarl is. What takes more than a line is megarl/cluster/slurm.py.
set -euo pipefail
root="${MEGARL_ROOT:-$SLURM_SUBMIT_DIR}"
if [ $# = 0 ]; then echo "megarl: error: no config: sbatch ... CONFIG [key.path=value ...]" >&2; exit 2; fi
trap : USR1 TERM  # until there is something to tell

# For the tasks, in whose container there may be no SLURM.
MEGARL_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
MEGARL_TIME_LEFT=$(squeue --noheader --job "$SLURM_JOB_ID" --format=%L)
: "${MEGARL_SIGNAL_LEAD:=$(sed -n 's/^#SBATCH --signal=B:USR1@//p' "$0")}"
: "${MEGARL_JOIN_TIMEOUT_S:=120}" "${MEGARL_MAX_RESTARTS:=3}"
MEGARL_REQUEUE="$PWD/.megarl-$SLURM_JOB_ID-requeue"
rm -f "$MEGARL_REQUEUE"
export MEGARL_REQUEUE MEGARL_NODES MEGARL_TIME_LEFT MEGARL_SIGNAL_LEAD MEGARL_JOIN_TIMEOUT_S MEGARL_MAX_RESTARTS

# One task a node with all of its CPUs. When one fails the others get SIGTERM, and the site's KillWait to clear up.
srun=(srun --ntasks-per-node=1 --cpu-bind=none --mpi=none --kill-on-bad-exit=1 --wait=0)
venv="$root/.venv" enter=()
mounts="$PWD:$PWD${MEGARL_CONTAINER_MOUNTS:+,$MEGARL_CONTAINER_MOUNTS}"
if [ -n "${MEGARL_PYXIS_IMAGE:-}" ]; then
  venv=/opt/megarl/.venv
  srun+=(--container-image="$MEGARL_PYXIS_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
elif [ -n "${MEGARL_APPTAINER_IMAGE:-}" ]; then
  venv=/opt/megarl/.venv
  enter=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$MEGARL_APPTAINER_IMAGE")
fi
task=("${enter[@]}" "${MEGARL_VENV:-$venv}/bin/python" -m megarl.cluster.slurm)

MEGARL_PORT=$("${srun[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${task[@]}" check "$@" </dev/null)
export MEGARL_PORT

# The token of the Ray cluster goes to the tasks by their standard input: never onto a shared disk or a command line.
token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
# In a session of its own: where SLURM signals process groups, a scancel would reach srun, which then kills the tasks.
setsid "${srun[@]}" "${task[@]}" run "$@" <<<"$token" &
step=$!
stopped="" signal=""
trap 'signal=yes; kill -USR1 $step || true' USR1  # srun hands it on to the tasks
trap 'signal=yes stopped=yes; kill -USR2 $step || true' TERM  # a SIGTERM to srun would kill them
while :; do
  signal="" code=0
  wait "$step" || code=$?
  [ -n "$signal" ] || break
done
if [ -e "$MEGARL_REQUEUE" ]; then
  rm "$MEGARL_REQUEUE"
  if [ -n "$stopped" ]; then exit 130; fi
  echo "megarl: saved before the time limit; job $SLURM_JOB_ID requeues itself and goes on from there"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
