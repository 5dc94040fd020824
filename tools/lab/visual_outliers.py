"""Plants outliers that only the rows of pictures have, in a copy of a checkpoint that computes what it did.

In each decoder layer a few inputs of the down projection are made larger: those whose largest magnitude in rows of pictures is
the most times that in rows of text.  A scale for all rows is then too coarse for text, as in large models that read pictures
(MQuant, arXiv 2502.00425, figure 2).
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from edgeq.errors import InputError
from edgeq.tools.lab import signs

if TYPE_CHECKING:
    from torch import Tensor

SIGNS = 64


def visual_channels(source: Path, channels: int) -> list[Tensor]:
    """For each decoder layer, i64 [channels]: the inputs of its down projection that pictures reach most, by the ratio to text.

    Measured on signs that neither training nor evaluation has.  InputError: the model reads text alone.
    """
    import torch

    from edgeq.converters.calibration.sample_forward import SampleForward
    from edgeq.converters.calibration.samples import read_samples
    from edgeq.converters.calibration.staged import staged
    from edgeq.converters.checkpoint.download import HubAccess
    from edgeq.converters.checkpoint.tokenizer import read_text
    from edgeq.converters.families.network import described, open_tensors
    from edgeq.converters.importers import open_source
    from edgeq.converters.method import features_of
    from edgeq.converters.methods.none import Unquantized
    from edgeq.converters.planning.options import ConvertOptions

    opened = open_source(str(source), HubAccess())
    family, config = described(opened)
    if family.tower is None:
        raise InputError(f"{source}: it reads text alone; --visual is for models that read pictures")
    checkpoint = open_tensors(opened, family)
    with TemporaryDirectory() as folder:
        signs.write(Path(folder), "calibration", SIGNS)
        samples = read_samples(Path(folder), config, read_text(opened, config.vocab_size)).samples
        tower = Unquantized(ConvertOptions(method="none"), family.tower, family.tower.config)
        pictures = [picture for sample in samples for picture in sample.pictures]
        forward = SampleForward(family, config, samples, features_of(tower, pictures, checkpoint, None), checkpoint)
    found = []
    for index in range(config.num_hidden_layers):
        layer = forward.load(index)
        run = staged(forward, index, layer)
        run.moments("mlp.down_proj")
        text, vision = run.largest["mlp.down_proj"]
        run.finish()
        forward.unload(layer)
        found.append(torch.argsort(vision / text, descending=True)[:channels])
    return found
