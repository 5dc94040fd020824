"""The tower alone in OpenVINO, in bf16 where the processor has it, which is OpenVINO's default."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from edgeq.tools.lab.peers.pictures import PATCH, Checkpoint, Seconds, Size

NAME = "tower.xml"
QUICK = 1.702
EPSILON = 1e-6


def version() -> str:
    return str(import_module("openvino").__version__)


class Tower:
    """The operations of a Qwen2-VL tower: pixels [patches, 1176], cosines and sines [patches, head_dim] become features."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._op: Any = import_module("openvino.opset13")
        self._weights = checkpoint
        about = checkpoint.config["vision_config"]
        self._width, self._heads, self._layers = about["embed_dim"], about["num_heads"], about["depth"]
        self.dim, self._merge = self._width // self._heads, about["spatial_merge_size"]

    def _constant(self, values: Any) -> Any:
        # Half the size on disk; OpenVINO widens and rounds to bf16 when it compiles.
        return self._op.convert(self._op.constant(np.asarray(values, np.float16)), "f32")

    def _linear(self, x: Any, name: str) -> Any:
        weight = self._weights[f"{name}.weight"]
        product = self._op.matmul(x, self._constant(weight.reshape(len(weight), -1)), False, True)
        return product if "patch_embed" in name else self._op.add(product, self._constant(self._weights[f"{name}.bias"]))

    def _norm(self, x: Any, name: str) -> Any:
        normed = self._op.mvn(x, np.array([-1], np.int64), True, EPSILON, "INSIDE_SQRT")
        scaled = self._op.multiply(normed, self._constant(self._weights[f"{name}.weight"]))
        return self._op.add(scaled, self._constant(self._weights[f"{name}.bias"]))

    def _turned(self, x: Any, cosines: Any, sines: Any) -> Any:
        low, high = self._op.split(x, np.array(2, np.int64), 2).outputs()
        other = self._op.concat([self._op.negative(high), low], 2)
        return self._op.add(self._op.multiply(x, cosines), self._op.multiply(other, sines))

    def _block(self, x: Any, name: str, cosines: Any, sines: Any) -> Any:
        op, shape = self._op, np.array([0, 3, self._heads, self.dim], np.int64)
        heads = op.reshape(self._linear(self._norm(x, f"{name}.norm1"), f"{name}.attn.qkv"), shape, True)
        parts = op.split(op.transpose(heads, np.array([1, 2, 0, 3])), np.array(0, np.int64), 3).outputs()
        q, k, v = (op.squeeze(part, np.array([0], np.int64)) for part in parts)
        q, k = (op.unsqueeze(self._turned(each, cosines, sines), np.array([0], np.int64)) for each in (q, k))
        seen = op.scaled_dot_product_attention(q, k, op.unsqueeze(v, np.array([0], np.int64)))
        rows = op.reshape(op.transpose(seen, np.array([0, 2, 1, 3])), np.array([-1, self._width], np.int64), False)
        x = op.add(x, self._linear(rows, f"{name}.attn.proj"))
        inner = self._linear(self._norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")
        inner = op.multiply(inner, op.sigmoid(op.multiply(inner, np.float32(QUICK))))
        return op.add(x, self._linear(inner, f"{name}.mlp.fc2"))

    def model(self) -> Any:
        op, ov = self._op, import_module("openvino")
        pixels = op.parameter([-1, 3 * 2 * PATCH**2], np.float32)
        cosines, sines = (op.parameter([-1, self.dim], np.float32) for _ in range(2))
        x = self._linear(pixels, "visual.patch_embed.proj")
        for layer in range(self._layers):
            x = self._block(x, f"visual.blocks.{layer}", cosines, sines)
        joined = np.array([-1, self._merge**2 * self._width], np.int64)
        x = op.reshape(self._norm(x, "visual.merger.ln_q"), joined, False)
        x = self._linear(op.gelu(self._linear(x, "visual.merger.mlp.0"), "erf"), "visual.merger.mlp.2")
        return ov.Model([x], [pixels, cosines, sines], "tower")


def build(checkpoint: Path, folder: Path) -> None:
    import_module("openvino").save_model(Tower(Checkpoint(checkpoint)).model(), str(folder / NAME), compress_to_fp16=True)


def load(folder: Path, threads: int, most_patches: int, isa: str | None) -> OpenVino:
    return OpenVino(folder / NAME, threads)


class OpenVino:
    """A compiled tower; see `Viewer`."""

    def __init__(self, path: Path, threads: int) -> None:
        core = import_module("openvino").Core()
        settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads}
        self._compiled = core.compile_model(str(path), "CPU", settings)
        self.settings = (
            f"precision {self._compiled.get_property('INFERENCE_PRECISION_HINT').to_string()}, latency hint, one stream"
        )

    def see(self, size: Size) -> Seconds:
        patches = size[0] * size[1] // PATCH**2
        random = np.random.default_rng(0)
        shapes = [each.get_partial_shape()[1].get_length() for each in self._compiled.inputs]
        pixels, angles, _ = (random.standard_normal((patches, width)).astype(np.float32) for width in shapes)
        inputs = [pixels, np.cos(angles), np.sin(angles)]
        began, worked = perf_counter(), process_time()
        self._compiled(inputs)
        return Seconds(perf_counter() - began, process_time() - worked, None)
