#!/bin/bash
# A Slurm job that starts a Ray cluster on its machines: one GPU of the first one trains, and all others sample. SIGTERM,
# two minutes before its time is over, makes the run save:
#
#   CONFIG=config.yaml TASK=task.py:function RUN=runs/first sbatch --nodes=3 docs/ray.sh
#
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --signal=TERM@120

HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HOST PORT=6379 ACTORS=$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE - 1))  # one GPU is left for the training

srun bash -c '
  if [ "$SLURM_NODEID" -eq 0 ]; then
    ray start --head --port=$PORT --include-dashboard=false --disable-usage-stats
    trainkit train "$CONFIG" --task "$TASK" train.run_dir="$RUN" train.resume=auto \
      rollout.engine="{name: ray, address: \"$HOST:$PORT\", actors: $ACTORS, gpus: 1}" rollout.staleness=1
    ended=$?
    ray stop
    exit $ended
  fi
  until ray start --address=$HOST:$PORT --disable-usage-stats; do sleep 5; done
  while ray status --address=$HOST:$PORT > /dev/null 2>&1; do sleep 30; done
'
