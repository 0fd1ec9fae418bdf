#!/bin/bash
# A Slurm job on several machines, one process per GPU. SIGTERM, five minutes before its time is over, makes the run save:
#
#   CONFIG=config.yaml TASK=task.py:function RUN=runs/first sbatch --nodes=2 docs/machines.sh
#
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@300

HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HOST

srun bash -c 'torchrun --nnodes=$SLURM_JOB_NUM_NODES --node_rank=$SLURM_NODEID \
  --nproc_per_node=${SLURM_GPUS_ON_NODE:-1} --master_addr=$HOST --master_port=29500 -m trainkit.cli \
  train "$CONFIG" --task "$TASK" train.run_dir="$RUN" train.resume=auto'
