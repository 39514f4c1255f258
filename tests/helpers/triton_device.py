"""Where Triton's kernels are tested: on the GPU if there is one, else on a CPU in the interpreter."""

import torch

from mmserve.models.ops.triton import runtime

DEVICE = torch.device("cpu" if runtime.INTERPRETED else "cuda")
EXACT = 1e-5 if runtime.INTERPRETED else 1e-4  # of float32: a GPU makes each product of three of TF32
