#!/usr/bin/env bash
# A Ray cluster over machines without SLURM, reached by ssh without a password, with megarl in the same folder on each.
#   eval "$(launch/ray_cluster.sh start --nodes host1,host2)"      the first is the head; --help shows all options
#   megarl train CONFIG device=cuda --ray-address auto             on one of these machines
#   launch/ray_cluster.sh address                                  the address and the token again, for another shell
#   launch/ray_cluster.sh stop
# The token is in a file of mode 0600 here and on each machine. A cluster that runs already, whoever started it, needs
# none of this: `megarl train CONFIG --ray-address HOST:PORT`, with its token in RAY_AUTH_TOKEN_PATH if it has one.
# NCCL_* and GLOO_* variables are handed on to all machines (launch/slurm/train.sbatch says what they are for).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec "${MEGARL_VENV:-$root/.venv}/bin/python" -m megarl.cluster.remote "$@"
