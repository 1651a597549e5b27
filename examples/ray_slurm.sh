#!/usr/bin/env bash
#SBATCH --job-name=clawgym
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=48G
#SBATCH --time=08:00:00
#
# Sandboxes on every machine of a Slurm job, as an ordinary user, with no cgroup delegated:
#
#   sbatch examples/ray_slurm.sh eval ClawGym-Bench --agent tool-loop --model MODEL --base-url URL
#
# The arguments are those of `clawgym`; --sandbox ray is added. Submitted again, the run goes on where it ended.
# Needed on every machine: this environment (the same versions), and user namespaces: `srun -N 1 clawgym doctor` says.
set -euo pipefail

export RAY_USAGE_STATS_ENABLED=0
# Ray runs whatever a client sends it: without a secret, that of anybody who reaches its ports.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname -i)
address=${address%% *}
export RAY_ADDRESS="$address:$((20000 + SLURM_JOB_ID % 20000))"

end() {
    kill $(jobs -p) 2>/dev/null || true # srun ends its step, and Ray there with it
}
trap end EXIT

# `--block` keeps each step alive as long as its Ray.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    ray start --head --node-ip-address="$address" --port="${RAY_ADDRESS##*:}" --num-cpus="$SLURM_CPUS_PER_TASK" \
    --include-dashboard=false --block &
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap \
        bash -c 'until ray start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK" --block; do sleep 2; done' &
done

# Until all of them are there; nodes that come later are used all the same.
python3 - "${#nodes[@]}" <<'PYTHON'
import sys, time
import ray

deadline = time.monotonic() + 180
while True:
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
        break
    except (ConnectionError, RuntimeError):
        if time.monotonic() > deadline:
            raise
        time.sleep(2)
while len([node for node in ray.nodes() if node["Alive"]]) < int(sys.argv[1]) and time.monotonic() < deadline:
    time.sleep(1)
PYTHON

clawgym "$@" --sandbox ray
