"""Compile the Triton kernels for GPUs that are not here, and check registers, spills and shared memory.

    python tests/compile_kernels.py          all variants that the launchers can choose (minutes)
    python tests/compile_kernels.py ci       a few of each kernel, which the tests run

It prints a table and then each variant that is wrong. A variant is wrong if it has a compile error, more shared memory
than the chip has, or spills. There may be no spills on sm_90 in 16 bits up to head size 128, and at most 1 KB
elsewhere (3 KB at head size 256 with own pairs). sm_89 stands for GPUs with less shared memory."""
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels_triton
import rt_triton
from kernels import HEAD_SIZES
from kernels_triton import MOST_SPLITS, scan_options, tile_options

AMD = GPUTarget("hip", "gfx942", 64)
# A chip has a target, its shared memory a block in bytes, and whether the kernels' large tiles are for it.
CHIPS = {"sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024, True),
         "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024, True),
         "gfx942": (AMD, 64 * 1024, False),
         "gfx942>2GB": (AMD, 64 * 1024, False),                 # some tensor is that large
         "sm_89": (GPUTarget("cuda", 89, 32), 99 * 1024, False)}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
OF_RT = {"add_and_norm": 1024, "add_norm_backward": 1024, "read_pairs": 64, "add_pair_grad": 64,
         "store_da_delta": 1024}       # widths of rows
FLOAT32 = ("lse_ptr", "lses_ptr", "outs_ptr", "dlse_ptr", "delta_ptr", "slopes_ptr", "own_score_ptr", "own_value_ptr")
# These kernels are the forward one, with own pairs, and for one query. RT's own values are float32, and so is the output
# with them. The splits of the last kernel write float32, too.
FORWARD = "attend_forward_kernel", "attend_own_kernel", "attend_split_kernel"


def source(kernel, dtype, constants, chip, float32_out=False):
    """Return the kernel with its arguments' types, as the launchers call it. Pointers, head sizes and strides are
    multiples of 16. Nothing is known of the arguments that are not specialised. On AMD, tensors below 2 GB are known to
    be so."""
    signature, attributes = {}, {}
    for number, parameter in enumerate(kernel.params):
        name, known = parameter.name, []
        loose = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if name.endswith("_ptr"):
            is_float32 = name in FLOAT32 or float32_out and name == "out_ptr"
            signature[name] = "*i32" if "pos" in name else "*fp32" if is_float32 else "*" + TYPES[dtype]
        else:
            plain = "fp32" if name in ("scale", "eps") else "i32"
            signature[name] = "constexpr" if name in constants else plain
        if name not in constants and not loose and name not in ("scale", "eps"):
            known.append(["tt.divisibility", 16])
        if name.endswith("_ptr") and chip == "gfx942":
            known.append(["tt.pointer_range", 32])
        if known:
            attributes[(number,)] = known
    return ASTSource(kernel, signature, constants, attributes)


def nvidia_figures(ptx):
    """Return registers and spilled bytes (loads and stores), from ptxas."""
    chip = re.search(r"^\.target (\w+)", ptx, re.M)[1]
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={chip}", "/dev/stdin", "-o", os.devnull]
    out = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", out)
    return int(re.search(r"Used (\d+) registers", out)[1]), int(spilled[1]) + int(spilled[2])


def amd_figures(text):
    """Return the same from the assembly's metadata. Spilled are vector registers of 4 bytes each, or scratch memory if
    that is more."""
    count = {key: int(re.search(rf"\.{key}:\s+(\d+)", text)[1])
             for key in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")}
    return count["vgpr_count"], max(4 * count["vgpr_spill_count"], count["private_segment_fixed_size"])


def measure(job):
    """Return (registers, spilled bytes, shared bytes) of one of the jobs, and what is wrong with it, or an empty
    string."""
    chip, name, dtype, launch = job
    target, memory, _ = CHIPS[chip]
    constants = {n: v for n, v in launch.items() if n.isupper()}
    options = {n: v for n, v in launch.items() if not n.isupper()}
    try:
        kernel = FORWARD[0] if name in FORWARD else name
        kernel = getattr(kernels_triton if hasattr(kernels_triton, kernel) else rt_triton, kernel)
        made = triton.compile(source(kernel, dtype, constants, chip, name in FORWARD[1:]), target=target,
                              options=options)
        registers, spilled = nvidia_figures(made.asm["ptx"]) if "ptx" in made.asm else amd_figures(made.asm["amdgcn"])
    except Exception as e:                      # any error of the compiler is the finding
        return (0, 0, 0), " ".join(f"{type(e).__name__}: {e}".split())[:300]
    shared, wrong = made.metadata.shared, ""
    precise = chip == "sm_90" and dtype != torch.float32 and launch.get("BLOCK_D", 0) <= 128
    own_256 = launch.get("OWN") and launch["BLOCK_D"] == 256
    allowed = 3072 if own_256 else 0 if precise else 1024
    if spilled > allowed:
        wrong = f"{spilled} bytes spilled, allowed are {allowed}"
    if shared > memory:
        wrong = f"{shared} bytes of shared memory, the chip has {memory}"
    return (registers, spilled, shared), wrong


def jobs(quick):
    """Return (chip, kernel's name, dtype, launch options) of all that kernels_triton.py can launch, or of a few, and of
    rt_triton.py's kernels. The kernels' other parameters are run-time arguments."""
    chips = list(CHIPS)[:3] if quick else CHIPS
    for chip, dtype in itertools.product(chips, TYPES):
        head_sizes, chunks = HEAD_SIZES, (1, 2, 4, 8, 16, 32, 64)
        if quick:
            of = {"bf16": (64, 128), "fp32": (64,)} if chip == "sm_90" else {"bf16": (128,)}
            head_sizes = of.get(TYPES[dtype], ())
            chunks = (16,) if head_sizes else ()
        for name, D in itertools.product(("forward", "own", "split", "dq", "dkv"), head_sizes):
            options = tile_options(name.replace("own", "forward"), D, dtype, CHIPS[chip][2])
            own = {} if name in ("dq", "dkv") else dict(OWN=name == "own")
            yield chip, f"attend_{name}_kernel", dtype, options | own
        for D in head_sizes:
            yield chip, "merge_splits_kernel", dtype, dict(SPLITS=MOST_SPLITS, BLOCK_D=D)
        for name, chunk in itertools.product(("forward", "backward"), chunks):
            yield chip, f"scan_{name}_kernel", dtype, scan_options(chunk)
        for name, width in OF_RT.items() if head_sizes else ():
            yield chip, f"{name}_kernel", dtype, dict(BLOCK=width)


def main(argv):
    todo, wrong = list(jobs("ci" in argv)), []
    print("chip, kernel, type, tiles, warps and stages, registers, spilled and shared bytes")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (chip, name, dtype, launch), (figures, bad) in zip(todo, pool.map(measure, todo)):
            tiles = " ".join(f"{n}={v:d}" for n, v in launch.items())
            row = f"{chip:12}{name:26}{TYPES[dtype]:6}{tiles:70}"
            print(row, *figures, flush=True)
            wrong += [f"{row}: {bad}"] if bad else []
    print(f"{len(todo)} compiled, {len(wrong)} wrong", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
