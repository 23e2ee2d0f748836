#!/usr/bin/env bash
# torch 2.13.0: DDP rejects the bf16 compression hook under gloo by the hook's name, not by what the backend can do.
#
# Guess: gloo cannot sum bfloat16, so DistributedDataParallel.register_comm_hook raises for bf16_compress_hook. Seen: in
# a build without CUDA and NCCL it raises TypeError for a callable whose name is bf16_compress_hook. The same function,
# registered under another name, works, and its averages are those of the gradients that are rounded to bfloat16.
#
# Why a training loop cares: a run that is tried on CPUs before it goes to a cluster needs the same options there. A
# loop that catches the error and trains without compression gets other bits than the run on the cluster.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
cat >tried.py <<'END'
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def other_name(group, bucket):
    return bf16_compress_hook(group, bucket)


def averaged(hook, rank):
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    ddp(torch.full((1, 1), 1.001 + rank)).sum().backward()
    return model.weight.grad.item()


def main(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        averaged(bf16_compress_hook, rank)
    except TypeError as error:
        refused = str(error)
    else:
        refused = ""
    dist.barrier()
    average = averaged(other_name, rank)
    if rank == 0:
        assert "bf16" in refused.lower(), refused
        assert average == 1.5, average  # 1.001 and 2.001 are 1.0 and 2.0 as bfloat16
        print(f"torch {torch.__version__.split('+')[0]}: TypeError under its own name, average {average} under another")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(main, (port,), nprocs=2)
END
env/bin/python -W ignore tried.py
