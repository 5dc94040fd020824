"""The families of decoders: config.json -> ModelConfig, and what the tensors of each part are called.

After `Checkpoint.arrange` every family has the tensor names and the decoder layer of the Llama line (torch_decoder.py); only
the files of this folder and its rooms have the names in the checkpoint.
"""

from edgeq.converters.families.family import (
    EMBEDDING,
    EMBEDDING_NORM,
    HEAD,
    LAYER_ROWS,
    LINEARS,
    NORM,
    NORM_BIAS,
    NORMS,
    POSITIONS,
    ROW_CONTEXT,
    ROW_CONTEXT_NORM,
    Family,
    FamilyDescription,
    ScaleMapping,
    linear_module,
)
from edgeq.converters.families.table import FAMILIES, recognise

__all__ = [
    "EMBEDDING",
    "EMBEDDING_NORM",
    "FAMILIES",
    "HEAD",
    "LAYER_ROWS",
    "LINEARS",
    "NORM",
    "NORMS",
    "NORM_BIAS",
    "POSITIONS",
    "ROW_CONTEXT",
    "ROW_CONTEXT_NORM",
    "Family",
    "FamilyDescription",
    "ScaleMapping",
    "linear_module",
    "recognise",
]
