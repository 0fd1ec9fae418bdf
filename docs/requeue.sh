#!/bin/bash
# A Slurm job that saves five minutes before its time is over, and is queued again until the run is finished:
#
#   CONFIG=config.yaml TASK=task.py:function RUN=runs/first sbatch docs/requeue.sh
#
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300

ending=
end() {
  ending=1
  kill -TERM "$run"
}
trap end TERM

srun torchrun --standalone --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" -m trainkit.cli \
  train "$CONFIG" --task "$TASK" train.run_dir="$RUN" train.resume=auto &
run=$!
wait "$run"
code=$?
if [ -n "$ending" ]; then  # the signal has ended the first wait; the run is still saving
  wait "$run"
  code=$?
  [ "$code" -eq 0 ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
