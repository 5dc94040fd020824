"""Plant outliers in a Llama checkpoint, or in one that reads pictures, without changing what it computes.

    python -m edgeq.tools.lab.plant_outliers SRC OUT --norms 10 --up 10
    python -m edgeq.tools.lab.plant_outliers models/tiny-qwen2vl OUT --visual 200

Large language models have a few channels with values far above the others, and quantizers differ most in what they do with
them; a small model has none.  Every kind multiplies some numbers, and divides by the same factor those that they are multiplied
with:

    norms    channels of every norm's gain, and the columns of the layers after it: methods that fold norms undo these
    up       output channels of the up projection, and columns of the down projection
    values   output channels of the value projection, and columns of the output projection of all query heads that read them
    keys     pairs of channels that RoPE rotates together, in the key and, inversely, in its query heads
    visual   channels between up and down projection, those that rows of pictures reach the most times as far as
             those of text; alone.  A scale for all rows is then too coarse for text, as in large models that read pictures
             (MQuant, arXiv 2502.00425, figure 2)
    basis    the residual stream rotated into the basis of its principal components, where variance gathers in few channels

The whole checkpoint is held in memory in float32.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from edgeq.errors import InputError
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.terminal import note, progress
from edgeq.tools.lab import signs
from edgeq.tools.quality import corpus

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Tensors = dict[str, Tensor]

WINDOW, WINDOWS = 256, 32
"""Tokens of a window, and windows, of the text whose principal components become the basis."""
SIGNS = 64
"""Pictures whose channels are compared with those of text."""


@dataclass(frozen=True)
class Kinds:
    """The factor of each kind; 1 leaves it out.  `channels` outliers in every norm, layer or head."""

    norms: float = 1.0
    up: float = 1.0
    values: float = 1.0
    keys: float = 1.0
    visual: float = 1.0
    basis: bool = False
    channels: int = 8
    seed: int = 0


def plant(source: Path, out: Path, kinds: Kinds) -> None:
    """Write `source` with its outliers into the new folder `out`, weights in float32.

    InputError: not a folder with a Llama checkpoint, or `out` exists.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from edgeq.converters.families import EMBEDDING

    if out.exists():
        raise InputError(f"{out}: it exists; give the name of a new folder")
    if kinds.visual != 1:
        if kinds != Kinds(visual=kinds.visual, channels=kinds.channels, seed=kinds.seed):
            raise InputError("--visual is planted alone; leave the other kinds out")
        plant_visual(source, out, kinds)
        return
    config = read_config(source)
    tensors = {name: t.float() for path in sorted(source.glob("*.safetensors")) for name, t in load_file(path).items()}
    if EMBEDDING not in tensors:
        raise InputError(f"{source}: no weights of a Llama in its *.safetensors")
    if kinds.basis:
        change_basis(tensors, config, principal_components(source))
    random = torch.Generator().manual_seed(kinds.seed)
    for layer in range(config["num_hidden_layers"]):
        plant_layer(tensors, config, f"model.layers.{layer}.", kinds, random)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "config.json"))
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2), encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})


def plant_visual(source: Path, out: Path, kinds: Kinds) -> None:
    """`plant` of the kind `visual`."""
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = {name: t.float() for path in sorted(source.glob("*.safetensors")) for name, t in load_file(path).items()}
    for layer, channels in enumerate(visual_channels(source, kinds.channels)):
        ending = f"layers.{layer}.mlp.up_proj.weight"
        (up,) = (name for name in tensors if name.endswith(ending) and "visual" not in name)
        tensors[up][channels] *= kinds.visual
        tensors[up.replace("up_proj", "down_proj")][:, channels] /= kinds.visual
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "config.json"))
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2), encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})


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


def read_config(source: Path) -> dict[str, Any]:
    """config.json of a Llama without biases.  InputError: it is not one, or cannot be read."""
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: no readable config.json: {error}") from None
    if config.get("model_type") != "llama":
        raise InputError(f"{source}: model_type {config.get('model_type')!r}; outliers can be planted in: llama")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise InputError(f"{source}: {key} is true; outliers can be planted in a llama without biases")
    return config


def plant_layer(tensors: Tensors, config: dict[str, Any], p: str, kinds: Kinds, random: torch.Generator) -> None:
    """Plant all kinds but the basis in the decoder layer with the prefix `p`."""
    import torch

    def some(size: int) -> Tensor:
        return torch.randperm(size, generator=random)[: min(kinds.channels, size)]

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v, o = (tensors[f"{p}self_attn.{name}_proj.weight"] for name in "qkvo")
    gate, up, down = (tensors[f"{p}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    for norm, followers in (("input_layernorm", (q, k, v)), ("post_attention_layernorm", (gate, up))):
        channels = some(config["hidden_size"])
        tensors[f"{p}{norm}.weight"][channels] *= kinds.norms
        for follower in followers:
            follower[:, channels] /= kinds.norms
    channels = some(config["intermediate_size"])
    up[channels] *= kinds.up
    down[:, channels] /= kinds.up
    group = heads // kv_heads
    for head in range(kv_heads):
        readers = range(head * group, (head + 1) * group)
        dims = some(head_dim)
        v[head * head_dim + dims] *= kinds.values
        for reader in readers:
            o[:, reader * head_dim + dims] /= kinds.values
        # RoPE rotates channels i and i + head_dim / 2 into each other: the same factor for both commutes with it.
        pairs = some(head_dim // 2)[: max(1, kinds.channels // 2)]
        dims = torch.cat([pairs, pairs + head_dim // 2])
        k[head * head_dim + dims] *= kinds.keys
        for reader in readers:
            q[reader * head_dim + dims] /= kinds.keys


def change_basis(tensors: Tensors, config: dict[str, Any], basis: Tensor) -> None:
    """Fold gains into the layers after their norms, then rotate the residual stream, x -> x basis.

    basis    float64 [hidden, hidden], orthogonal

    The head and the embedding are two matrices afterwards.
    """
    import torch

    from edgeq.converters.families import EMBEDDING, HEAD, NORM

    tensors[HEAD] = tensors.get(HEAD, tensors[EMBEDDING]) * tensors[NORM]
    tensors[NORM] = torch.ones_like(tensors[NORM])
    for name in list(tensors):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name] = rotated(tensors[name] * tensors[f"{name.split('self_attn')[0]}input_layernorm.weight"], basis)
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = rotated(tensors[name] * tensors[f"{name.split('mlp')[0]}post_attention_layernorm.weight"], basis)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = rotated(tensors[name].T, basis).T
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name] = torch.ones_like(tensors[name])
    tensors[HEAD], tensors[EMBEDDING] = rotated(tensors[HEAD], basis), rotated(tensors[EMBEDDING], basis)
    config["tie_word_embeddings"] = False


def rotated(rows: Tensor, basis: Tensor) -> Tensor:
    """rows basis, computed in float64."""
    return (rows.double() @ basis).float()


def principal_components(source: Path) -> Tensor:
    """Float64 [hidden, hidden]: in its columns the eigenvectors of the second moments of the inputs of all layers together."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from edgeq.converters.calibration.dataset import MODULES

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    text = "".join(corpus.modules(MODULES))
    tokens = AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False).input_ids
    size = model.config.hidden_size
    moments = torch.zeros(size, size, dtype=torch.float64)
    with progress() as report, torch.no_grad():
        for i in range(WINDOWS):
            report(i, WINDOWS, "principal components")
            window = torch.tensor([tokens[i * WINDOW : (i + 1) * WINDOW]])
            for hidden in model(window, output_hidden_states=True).hidden_states[:-1]:
                moments += hidden[0].double().T @ hidden[0].double()
    vectors: Tensor = torch.linalg.eigh(moments).eigenvectors
    return vectors


@click.command(cls=Command)
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--norms", default=1.0, show_default=True, help="Factor of channels of every norm; 1: none.")
@click.option("--up", default=1.0, show_default=True, help="Factor of channels between up and down projection; 1: none.")
@click.option("--values", default=1.0, show_default=True, help="Factor of channels of every value head; 1: none.")
@click.option("--keys", default=1.0, show_default=True, help="Factor of channel pairs of every key head; 1: none.")
@click.option("--visual", default=1.0, show_default=True, help="Factor of channels that pictures reach most; 1: none.")
@click.option("--basis", is_flag=True, help="Rotate the residual stream into the basis of its principal components.")
@click.option("--channels", type=click.IntRange(1), default=8, show_default=True, help="Outliers per norm, layer or head.")
@click.option("--seed", default=0, show_default=True, help="Start of the random choice of channels.")
def main(source: Path, out: Path, **kinds: Any) -> None:
    """Copy the checkpoint SRC into the new folder OUT with outliers; it computes what SRC computes.  Needs torch."""
    plant(source, out, Kinds(**kinds))
    note(f"{out}: outliers planted")


if __name__ == "__main__":
    main()
