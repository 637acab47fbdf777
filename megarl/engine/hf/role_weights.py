"""The weights of a role folder under their Hugging Face names, without an engine that would hold them all."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.checkpoint.folder import HF_FOLDER, MANIFEST, ROLE_FILE, verify
from megarl.config_lora import LoraConfig
from megarl.engine.hf.layout import StoredWeight, stored_weights
from megarl.engine.hf.mapping import Parameter, from_shards
from megarl.engine.hf.peft import merge, stored_adapters
from megarl.engine.hf.shape import ModelShape
from megarl.engine.hf.streaming import StoredTensors
from megarl.errors import ConfigError

OTHER_STATE = ("optimizer.", "reference.")  # keys of what is no weight
VALUE_HEAD_BIAS = "output_layer.bias"


class RoleWeights:
    def __init__(self, folder: Path):
        """Reads no weights yet. Raises ConfigError where a file is missing, too short or, with a manifest, not as it
        was written, and where the checkpoint holds another model than its config.json describes."""
        self.folder = folder
        if (folder.parent / MANIFEST).is_file():
            verify(folder.parent)
        about = json.loads((folder / ROLE_FILE).read_text())
        self.dtype: str = about["dtype"]
        self.head: str = about.get("head", "lm")  # a checkpoint that names none is of a language model
        self.shape = ModelShape.read(folder / HF_FOLDER)
        self.lora = LoraConfig(**about["lora"]) if about.get("lora") else None
        self._stored = StoredTensors(folder)
        self._weights = stored_weights(self.shape, self.head)
        self._adapters = stored_adapters(self.shape, self.lora) if self.lora else []
        if found := [*self._not_listed(), *self._misfits()]:
            raise ConfigError(f"{folder}: {'; '.join(found)}")

    def hf_shapes(self) -> dict[str, torch.Size]:
        """HF name -> shape, in the order of `hf_tensors`."""
        return {name: size for weight in self._weights for name, size in weight.hf_shapes(self.shape).items()}

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, the whole tensor), each read when it is asked for."""
        for weight in self._weights:
            tensors = from_shards(self.shape, weight.parameter, [self._whole(weight)])
            yield from zip(weight.parameter.hf_names(self.shape), tensors, strict=True)

    def value_head_bias(self) -> float:
        """0 where there is none."""
        return self._stored.read(VALUE_HEAD_BIAS, ()).item() if VALUE_HEAD_BIAS in self._stored.sizes else 0.0

    def _whole(self, weight: StoredWeight) -> torch.Tensor:
        """What is exported of a weight: with its adapter, where it has one."""
        if weight.key == VALUE_HEAD_BIAS:  # without one SGLang's classes for Qwen leave theirs at random values
            return torch.tensor([self.value_head_bias()])
        whole = self._stored.read(weight.key, weight.index)
        matrices = [
            self._stored.read(a.key, a.index) for a in self._adapters if a.parameter.adapted == weight.parameter
        ]
        return merge(whole, *matrices, self.lora.scale) if matrices else whole

    def adapters(self) -> dict[Parameter, torch.Tensor]:
        """LoRA's matrices A and B, whole."""
        return {adapter.parameter: self._stored.read(adapter.key, adapter.index) for adapter in self._adapters}

    def _not_listed(self) -> Iterator[str]:
        """Data files that the manifest, where there is one, does not know: their digests were not compared."""
        manifest = self.folder.parent / MANIFEST
        if manifest.is_file():
            listed = json.loads(manifest.read_text())["files"]
            names = (f"{self.folder.name}/{name}" for name in self._stored.files)
            yield from (f"{manifest} has no entry of {name}" for name in names if name not in listed)

    def _misfits(self) -> Iterator[str]:
        sizes = self._stored.sizes
        weights = {weight.key: weight for weight in [*self._weights, *self._adapters]}
        for key, weight in weights.items():
            expected = [*weight.stack, *weight.size]
            if key not in sizes and key != VALUE_HEAD_BIAS:
                yield f"it holds no {key}"
            elif key in sizes and not weight.fits(sizes[key]):
                yield f"{key} is {list(sizes[key])} and by config.json should be {expected}"
        unknown = [key for key in sizes if key not in weights and not key.startswith(OTHER_STATE)]
        if unknown:
            yield f"{', '.join(unknown)} have no place in a {self.shape.family} model with head {self.head}"
