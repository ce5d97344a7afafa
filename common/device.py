"""
Devices and processes. The functions say which device is used, how fast it is, and in which type it
computes products. The processes are those of a training run. Each process has a device of its own,
or a part of the CPU. stop_request listens to the signals that ask a run to stop.
"""
import contextlib
import importlib.util
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from common.options import UserError, end_process, first_line, typed_value


def pick_device(name, world=1):
    """Return the torch device that a device= option names. With several processes on CUDA, each
    process takes the GPU of its LOCAL_RANK. Raise UserError if this machine has no such
    device."""
    if name == "auto":                          # gloo cannot use mps
        mps = torch.backends.mps.is_available() and world == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if world > 1 and name not in ("cpu", "cuda"):
        raise UserError(f"device={name} cannot serve {world} processes: device=cuda (a GPU for "
                        f"each) or device=cpu can")
    local = os.environ.get("LOCAL_RANK", 0)
    try:
        device = torch.device(f"cuda:{local}" if name == "cuda" else name)
        torch.ones(1, device=device).item()     # fails if this machine has no such device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as e:
        if name == "cuda" and world > 1 and 0 < torch.cuda.device_count() <= int(local):
            raise UserError(f"there is no GPU {local} for this process: start at most one process "
                            f"for each GPU") from e
        raise UserError(f"device={name} cannot be used: {first_line(e)} (device=auto finds "
                        f"another)") from e
    return device


def device_name(device):
    """Return the name of a device for a printed line."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


# For each GPU by its name, the most floating-point operations a second in dense matrix products of
# bfloat16, summed in float32, and the most bytes a second from memory (NVIDIA's data sheets).
# The names are whole, because variants of one GPU differ. On each of these GPUs, products of
# float32 in TF32 run at half that rate.
PEAKS = {"NVIDIA A100-SXM4-40GB": (312e12, 1555e9),
         "NVIDIA A100-SXM4-80GB": (312e12, 2039e9),
         "NVIDIA A100-PCIE-40GB": (312e12, 1555e9),
         "NVIDIA A100 80GB PCIe": (312e12, 1935e9),
         "NVIDIA B200": (2250e12, 8000e9),
         "NVIDIA GeForce RTX 3090": (71e12, 936e9),
         "NVIDIA GeForce RTX 4090": (165.2e12, 1008e9),
         "NVIDIA GeForce RTX 5090": (209.5e12, 1792e9),
         "NVIDIA H100 80GB HBM3": (989e12, 3350e9),
         "NVIDIA H100 PCIe": (756e12, 2000e9),
         "NVIDIA H200": (989e12, 4800e9),
         "NVIDIA L4": (121e12, 300e9),
         "NVIDIA L40S": (362e12, 864e9)}


def gpu_peaks(device):
    """Return the device's two PEAKS, or None for a CPU and for a GPU that the table lacks."""
    return PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def precision(dtype, device):
    """Return bfloat16 or float32, as dtype= says. auto means bfloat16 on a CUDA GPU that computes
    in it, else float32. (On CUDA, training computes products of float32 in TF32, see
    Processes.)"""
    if dtype != "auto":
        return dtype
    if device.type != "cuda":
        return "float32"
    with torch.cuda.device(device):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def autocast(cfg, device):
    """Return the context of a forward pass, in which products have the type of precision."""
    enabled = precision(cfg.dtype, device) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def compiles(cfg, device):
    """Return whether training calls torch.compile, as compile= says. auto does so on a CUDA GPU, if
    triton is installed, which torch.compile needs there."""
    auto = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return cfg.compile == "true" or cfg.compile == "auto" and auto


class Processes:
    """A Processes object stands for torchrun's processes, or for a single one. It knows the rank of
    its own process, how many processes there are, and its device with the precision of products."""

    def __init__(self, cfg):
        self.world = typed_value("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), int)
        self.rank = typed_value("RANK", os.environ.get("RANK", "0"), int)
        self.master = self.rank == 0
        if not 0 <= self.rank < self.world:
            raise UserError(f"RANK={self.rank} must be from 0 to below WORLD_SIZE={self.world}: "
                            f"start with torchrun, which sets both")
        self.device = pick_device(cfg.device, self.world)
        if cfg.gradient_accumulation_steps % self.world and not cfg.eval_only:
            raise UserError(f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} is "
                            f"not divisible by the {self.world} processes that share it")
        if cfg.fsdp and self.world == 1:
            raise UserError("fsdp=true needs several processes: torchrun --nproc_per_node=N "
                            "train.py starts them, and one process reads the same checkpoints with "
                            "fsdp=false")
        self.precision = precision(cfg.dtype, self.device)
        self.autocast = autocast(cfg, self.device)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        try:
            if self.world > 1:
                # The others wait while the first process writes a checkpoint, perhaps for long.
                dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=30),
                                        device_id=self.device if cuda else None)
        except (RuntimeError, ValueError) as e:
            raise UserError(f"the {self.world} processes do not meet: {first_line(e)}") from e

    def sum(self, *values):
        """Return a list of floats, each the sum of one of the values over all processes."""
        if self.world == 1:         # a copy to the GPU and back would wait for all of its kernels
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    @contextlib.contextmanager
    def together(self):
        """The code inside may fail in some processes and not in others. All of them must enter. If
        some have a UserError, OSError or MemoryError, the one of lowest rank raises it, and all
        others exit with status 2 and print nothing. (Another error ends its own process, and
        torchrun then ends the others.)"""
        error = None
        try:
            yield
        except (UserError, OSError, MemoryError) as e:
            error = e
        failed = self.sum(*(float(error is not None and r == self.rank) for r in range(self.world)))
        if any(failed):
            if self.rank == failed.index(1.0):
                raise error
            end_process(2)

    def meet(self):
        """Wait until every process is here."""
        if self.world > 1:
            dist.barrier()

    def leave(self):
        """End this process after success if it is one of several. It does not wait for the others,
        because the first process may write a sample for longer than a collective may take. The
        caller calls `meet` first."""
        if self.world > 1:
            end_process(0)      # all files are written


@contextlib.contextmanager
def stop_request():
    """Yield a list of signals. It is empty until SIGTERM, SIGINT or SIGHUP (a terminal is closed)
    asks for a stop after the current step. Further signals change nothing, because timeout,
    torchrun and schedulers send several, and the state is to be saved. A signal during an
    evaluation takes effect after the evaluation and one more step. SIGKILL ends a run at once. In
    an evaluation this loses no step, because the state was saved before it. torchrun sends SIGKILL
    30 seconds after one of these signals, so that step and save must take less. A signal that was
    ignored at the start, as SIGHUP is under nohup, stays ignored."""
    asked = []

    def ask(sig, frame):
        if not asked and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):      # print may not be called in a handler
                os.write(2, b"\nstopping after this step\n")
        asked.append(sig)
    known = [getattr(signal, name, None) for name in ("SIGTERM", "SIGINT", "SIGHUP")]
    # Windows has no SIGHUP. getsignal returns None for a handler of a C library, which stays.
    heard = [sig for sig in known
             if sig is not None and signal.getsignal(sig) not in (signal.SIG_IGN, None)]
    handlers = {sig: signal.signal(sig, ask) for sig in heard}
    try:
        yield asked
    finally:
        for sig, handler in handlers.items():
            signal.signal(sig, handler)
