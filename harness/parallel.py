"""Data-parallel training: torchrun --nproc_per_node=N train.py ...

Every process is one client. It sees its own part of the training images in batches of --batch-size, has its
own batch statistics and its own conditional-entropy loss; behind the stash the gradients are averaged, so
that all clients take the same step from the same weights. Running statistics (BatchNorm, the surrogate's, a
proxy's) are averaged at the end of an epoch. The first process alone writes files and prints. Without
torchrun every function here does nothing.

In your own loop, with a *_cel.py that you copied: leave `cel` outside DDP (no find_unused_parameters is
needed), refresh it in one process and broadcast its buffers, and after each backward call this. gated's and
slot's memory stays each process's own.

    def synchronise(cel):  # in every process, after loss.backward()
        tensors = [p.grad for p in cel.parameters() if p.grad is not None]
        tensors += [b for name, b in cel.named_buffers() if b.is_floating_point() and name != "memory"]
        for t in tensors:
            torch.distributed.all_reduce(t)
            t /= torch.distributed.get_world_size()
"""

import os

import torch
import torch.distributed as dist


def start(device):
    """Join the other processes, if torchrun started any. -> the device of this one."""
    if not dist.is_torchelastic_launched() or dist.is_initialized():
        return device
    # Imported later (the optimiser does so), its functions hold the group as a default. Then stop() cannot
    # end the group's threads, and one that needs Python while Python ends aborts the process.
    import torch.distributed.nn  # noqa: F401

    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def is_first():
    return rank() == 0


def processes():
    return dist.get_world_size() if dist.is_initialized() else 1


def first_alone(work):
    """work() in the first process; -> its result there, None in the others. Where it fails, all fail."""
    result, error = None, None
    if is_first():
        try:
            result = work()
        except Exception as caught:
            error = caught
    error = from_first(error)
    if error is not None:
        raise error
    return result


def first_then_others(work):
    """work() in the first process, then in the others: what it downloads or caches is written once."""
    result = first_alone(work)
    return result if is_first() else work()


@torch.no_grad()
def average(tensors):
    """Each tensor becomes its mean over the processes, in place."""
    tensors = [t for t in tensors if t.is_floating_point()]
    if processes() == 1 or not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    for tensor, mean in zip(tensors, (flat / processes()).split([t.numel() for t in tensors])):
        tensor.copy_(mean.view_as(tensor))


def average_statistics(module):
    """Its running statistics become their means; counts, and samples it remembers, those of the first."""
    named = dict(module.named_buffers())
    first = {name for name, b in named.items() if not b.is_floating_point() or name.endswith("memory")}
    average([b for name, b in named.items() if name not in first])
    copy_from_first([named[name] for name in sorted(first)])


def average_gradients(parameters):
    # g = (1/n) Σ g_i; a process whose own gradient is missing counts as zero
    if processes() > 1:
        parameters = list(parameters)
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        average([p.grad for p in parameters])


def copy_from_first(tensors):
    """All processes get the tensors of the first, in place."""
    if processes() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def from_first(thing):
    """What the first process holds, in all of them."""
    if processes() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, 0)
    return box[0]
