"""The one place that chooses an implementation for each op of the decode path.

Every op runs as its torch twin, on the CPU and on CUDA alike; a Triton kernel for an op is added
here, behind the same signature, and nowhere else.
"""

from longread_kernels.reference import attend_ref as attend
from longread_kernels.reference import rms_norm_ref as rms_norm
from longread_kernels.reference import rope_ref as rope
from longread_kernels.reference import score_ref as score
from longread_kernels.reference import select_rows_ref as select_rows
from longread_kernels.reference import swiglu_ref as swiglu
from longread_kernels.reference import vote_ref as vote

__all__ = ["attend", "rms_norm", "rope", "score", "select_rows", "swiglu", "vote"]
