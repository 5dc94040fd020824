"""The vision tower and its projector: pixels of pictures become vectors that rows of the decoder bring in place of tokens.

Blocks are those of the decoder (decoder.py); a patch sees all patches of its frame and none of another.  A page of the tower's
cache holds the keys and values of one layer: each layer overwrites those of the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgeq.config import VisionConfig
from edgeq.container import ModelFile
from edgeq.errors import InputError, ResourceError
from edgeq.frames import FRAME, WINDOW, Frame, Grid
from edgeq.metadata import Metadata
from edgeq.records import KvCodec
from edgeq.runtime.decoder import attention_block, buffer_widths, mlp_block, norm
from edgeq.targets.graph import Activate, Function, Graph, InjectVectors, Linear, Operation, Select
from edgeq.targets.rows import PAGE, VISION, Rows
from edgeq.targets.target import OnProgress, Options, Target, no_progress

OnPatches = Callable[[int, int], None]
"""Progress callback of a tower: (patches done, total patches)."""


def tower(metadata: Metadata) -> Graph:
    """The graph of a file's vision tower: rows bring the pixels of a patch, the result are features."""
    config = vision_of(metadata)
    operations: list[Operation] = [
        InjectVectors(-1, "pixels"),
        Linear(-1, "pixels", metadata.linears["vision.patch"], "x"),
    ]
    for layer in range(config.num_hidden_layers):
        span = WINDOW if layer in config.window_layers else FRAME
        operations += attention_block(metadata, config, layer, cache=0, span=span)
        operations += mlp_block(metadata, config, layer)
    operations += projector(metadata, config)
    return Graph(
        buffers=buffer_widths(config)
        | {
            "pixels": config.patch_width,
            "joined": config.joined_size,
            "project": config.project_size,
            "projected": config.project_size,
            "features": config.out_hidden_size,
        },
        operations=tuple(operations),
        result="features",
        layers=1,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def projector(metadata: Metadata, config: VisionConfig) -> Iterator[Operation]:
    """features = project.1(act(project.0(joined))): each joins neighbouring patches, whose norm comes before or after."""
    linears, together = metadata.linears, config.merge**2
    if config.project_norm == "patch":
        yield norm(metadata, config, -1, "x", "vision.norm", "normed")
        yield Select(-1, ("normed",), ("joined",), together)
    else:
        yield Select(-1, ("x",), ("joined",), together)
        yield norm(metadata, config, -1, "joined", "vision.norm", "joined")
    yield Linear(-1, "joined", linears["vision.project.0"], "project")
    yield Activate(-1, "project", config.project_size, "projected", cast(Function, config.project_act), gated=False)
    yield Linear(-1, "projected", linears["vision.project.1"], "features")


def vision_of(metadata: Metadata) -> VisionConfig:
    """InputError: the model of the file reads text alone."""
    if metadata.config.vision is None:
        raise InputError(f"this model ({metadata.config.model_type}) reads text alone; give it no images")
    return metadata.config.vision


class Tower:
    """The compiled vision tower of a file.  One caller at a time.

    most_patches   of a frame
    """

    def __init__(
        self, file: ModelFile, target: Target, options: Options, most_patches: int, on_progress: OnProgress = no_progress
    ) -> None:
        """options       the decoder's; its mode holds where the file has none for the tower
        most_patches     of a frame, in whole tokens

        InputError: the file has no tower.  ResourceError: its buffers do not fit in memory.
        """
        self.config = vision_of(file.metadata)
        together = self.config.merge**2
        self.most_patches = most_patches // together * together
        graph = tower(file.metadata)
        options = replace(
            options,
            mode=file.metadata.vision_mode or options.mode,
            max_rows=self.most_patches,
            max_logits=self.most_patches // together,
            kv=KvCodec(),
            requantize=False,
        )
        room = target.room(graph, file, options)
        pages = -(-self.most_patches // PAGE)
        needed = room.needed + file.metadata.vision_bytes() + pages * graph.page_bytes(options.kv)
        if needed > room.available:
            raise ResourceError(
                f"pictures of {options.max_logits} tokens need {needed >> 20:,} MiB, weights included; "
                f"{room.available >> 20:,} are available; allow fewer tokens a picture"
            )
        self.program = target.compile(graph, file, options, on_progress)
        self._pages = [self.program.new_page() for _ in range(pages)]

    def encode(
        self, pixels: NDArray[np.float32], grids: Sequence[Grid], on_progress: OnPatches | None = None
    ) -> NDArray[np.float32]:
        """The features float32 [tokens, out_hidden_size] of pictures, one after another.

        pixels   float32 [patches, patch_width] of all pictures, in the order of VisionConfig
        grids    of each picture

        ValueError: pixels and grids do not agree, or a frame is larger than this tower was compiled for.
        """
        config, total = self.config, sum(t * h * w for t, h, w in grids)
        if pixels.shape != (total, config.patch_width):
            raise ValueError(f"pixels {pixels.shape} for pictures of {total} patches of {config.patch_width}")
        features, done = [], 0
        for grid in grids:
            frames, rows, columns = grid
            count = rows * columns
            if rows % config.merge or columns % config.merge or not 0 < count <= self.most_patches:
                raise ValueError(f"a picture of {rows} x {columns} patches; at most {self.most_patches}, in whole tokens")
            frame = Frame.of(grid, config)
            for _ in range(frames):
                features.append(self.program.run(self._rows(pixels[done : done + count], frame)).copy())
                done += count
                if on_progress is not None:
                    on_progress(done, total)
        return np.concatenate(features) if features else np.zeros((0, config.out_hidden_size), np.float32)

    def _rows(self, pixels: NDArray[np.float32], frame: Frame) -> Rows:
        """Rows whose result are the features in the order of the picture."""
        count = len(pixels)
        slots = np.arange(count, dtype=np.int32)
        return Rows(
            tokens=np.zeros(count, np.int32),
            positions=frame.places,
            slots=slots,
            sessions=np.zeros(count, np.int32),
            pages=[self._pages],
            wanted=np.argsort(frame.order).astype(np.int32),
            vectors=pixels,
            vector_of=frame.order,
            modality=np.full(count, VISION, np.uint8),
            spans=frame.spans,
        )
